"""Clients that leave at every stage: no page is lost, and no token of one request is in another.

Every answer that somebody waited for is compared, log-probabilities included, with the answer to
the same prompt alone.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from platform_kit import (
    LONG,
    TENANTS,
    Answer,
    Client,
    Platform,
    begins,
    mooncake_or_skip,
    platform,
    tiny_model,
    words,
)

pytestmark = pytest.mark.timeout(1200)
BATCH_MAX = 4
REQUESTS = 400
AT_ONCE = 40
# Lengths on both sides of a page's and of a chunk's end; no two tenants share a text.
PROMPTS = {
    tenant: [words(length, 100 * number + length) for length in (3, 16, 17, 64, 65, 200, 400)]
    for number, tenant in enumerate(TENANTS)
}
HOLD: dict[str, Any] = {**LONG, "max_tokens": 4000}


@pytest.fixture(scope="module", params=["memory", "mooncake"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    transport = request.param if request.param == "memory" else mooncake_or_skip()
    with platform(
        tmp_path_factory.mktemp("leave"),
        tiny_model(tmp_path_factory),
        ["prefill", "decode"],
        transport=transport,
        batch_max=BATCH_MAX,
    ) as started:
        yield started


@pytest.fixture(scope="module")
def alone(running: Platform) -> dict[str, dict[str, Answer]]:
    """Each prompt's answer, by tenant, one request at a time."""

    async def ask() -> dict[str, dict[str, Answer]]:
        answers: dict[str, dict[str, Answer]] = {}
        for tenant, prompts in PROMPTS.items():
            async with running.client(tenant) as client:
                answers[tenant] = {prompt: await client.ask(prompt, **LONG) for prompt in prompts}
        return answers

    answers = asyncio.run(ask())
    for by_prompt in answers.values():
        for answer in by_prompt.values():
            assert (answer.status, answer.finish, len(answer.logprobs)) == (200, "length", 16)
    texts = [answer.text for by_prompt in answers.values() for answer in by_prompt.values()]
    assert len(set(texts)) == len(texts), "an answer must say whose it is"
    return answers


def test_hundreds_leave_at_staggered_milliseconds_under_load(
    running: Platform, alone: dict[str, dict[str, Answer]]
) -> None:
    stayed: list[tuple[str, str, Answer]] = []
    left = 0

    async def one(number: int, client: Client, tenant: str, room: asyncio.Semaphore) -> None:
        nonlocal left
        prompt = PROMPTS[tenant][number // 2 % len(PROMPTS[tenant])]
        on_text = begins(asyncio.Event()) if number % 3 == 0 else None
        async with room:
            if number % 5 == 0:
                stayed.append((tenant, prompt, await client.ask(prompt, on_text, **LONG)))
                return
            after = (number * 7 % 600) / 1000
            answer = await client.ask_and_leave(prompt, after, on_text=on_text, **LONG)
            if answer is None:
                left += 1
            else:
                stayed.append((tenant, prompt, answer))

    async def storm() -> None:
        room = asyncio.Semaphore(AT_ONCE)
        async with running.client(TENANTS[0]) as first, running.client(TENANTS[1]) as second:
            clients = (first, second)
            await asyncio.gather(
                *(one(n, clients[n % 2], TENANTS[n % 2], room) for n in range(REQUESTS))
            )

    asyncio.run(storm())
    assert left > REQUESTS // 10
    assert len(stayed) >= REQUESTS // 5
    for tenant, prompt, answer in stayed:
        assert (answer.status, answer.content) == (200, alone[tenant][prompt].content)
    running.wait_settled()


def test_clients_leave_while_queued(running: Platform, alone: dict[str, dict[str, Answer]]) -> None:
    async def scenario() -> None:
        async with running.client() as client:
            holds, begun = [], [asyncio.Event() for _ in range(BATCH_MAX)]
            for number, event in enumerate(begun):
                prompt = words(20, 900 + number)
                holds.append(asyncio.create_task(client.ask(prompt, begins(event), **HOLD)))
                await event.wait()
            prompts = PROMPTS[TENANTS[0]]
            queued = [asyncio.create_task(client.ask(prompts[n % 7])) for n in range(50)]
            await asyncio.to_thread(
                running.wait_reports,
                lambda found: found["decode-0.1"].requests["waiting"] == 50,
                "50 requests in the queue",
            )
            for task in queued:
                task.cancel()
                await asyncio.sleep(0.002)
            await asyncio.to_thread(
                running.wait_reports,
                lambda found: found["decode-0.1"].requests["waiting"] == 0,
                "an empty queue",
            )
            assert not any(hold.done() for hold in holds), "those that run go on"
            for hold in holds:
                hold.cancel()
            await asyncio.gather(*queued, *holds, return_exceptions=True)

    asyncio.run(scenario())
    running.wait_settled()
    check_again(running, alone)


def test_clients_leave_while_prefilling_and_transferring(
    running: Platform, alone: dict[str, dict[str, Answer]]
) -> None:
    """The prefill process is stopped in the middle of its work, with pages sent and pages to be
    sent; the clients leave; then it goes on, against requests that have ended."""
    pid = running.fleet.pids()["prefill-0.1"]

    async def scenario() -> None:
        async with running.client() as client:
            prompts = [words(3000, 800 + n) for n in range(BATCH_MAX)]
            asked = [asyncio.create_task(client.ask(prompt, max_tokens=1)) for prompt in prompts]
            await asyncio.to_thread(
                running.wait_reports,
                lambda found: found["prefill-0.1"].requests["running"] > 0,
                "a prompt in the prefill node",
            )
            os.kill(pid, signal.SIGSTOP)
            try:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
            finally:
                os.kill(pid, signal.SIGCONT)

    asyncio.run(scenario())
    running.wait_settled()
    check_again(running, alone)


def test_clients_leave_while_decoding(
    running: Platform, alone: dict[str, dict[str, Answer]]
) -> None:
    async def scenario() -> None:
        async with running.client() as client:
            for number in range(20):
                begun = asyncio.Event()
                prompt = words(20 + number, 700 + number)
                task = asyncio.create_task(client.ask(prompt, begins(begun), **HOLD))
                await begun.wait()
                await asyncio.sleep(number / 500)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    running.wait_settled()
    check_again(running, alone)


def check_again(running: Platform, alone: dict[str, dict[str, Answer]]) -> None:
    """All at once, each tenant's prompts get the answers that they got alone."""

    async def ask() -> None:
        async with running.client(TENANTS[0]) as first, running.client(TENANTS[1]) as second:
            for tenant, client in zip(TENANTS, (first, second), strict=True):
                answers = await asyncio.gather(*(client.ask(p, **LONG) for p in PROMPTS[tenant]))
                for prompt, answer in zip(PROMPTS[tenant], answers, strict=True):
                    assert answer.content == alone[tenant][prompt].content

    asyncio.run(ask())
