"""Full queues and full pools: requests wait, or are refused with ``Retry-After``; no deadlock."""

import asyncio
from typing import Any

import pytest

from platform_kit import LONG, Answer, begins, platform, tiny_model, words

pytestmark = pytest.mark.timeout(1200)
FOREVER: dict[str, Any] = {**LONG, "max_tokens": 3900}


def test_a_full_queue_is_429_with_retry_after_and_who_waits_is_served(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model, folder = tiny_model(tmp_path_factory), tmp_path_factory.mktemp("queue")

    async def scenario() -> tuple[list[Answer], list[Answer], Answer, Answer]:
        prompts = [words(30, salt) for salt in range(2)]
        async with running.client() as client:
            alone = [await client.ask(prompt) for prompt in prompts]
            begun = asyncio.Event()
            hold = asyncio.create_task(client.ask(words(30, 9), begins(begun), **FOREVER))
            await begun.wait()
            waiting = [asyncio.create_task(client.ask(prompt)) for prompt in prompts]
            await asyncio.to_thread(
                running.wait_reports,
                lambda found: found["colocated-0.1"].requests["waiting"] == 2,
                "two in the queue",
            )
            whole = await client.ask(words(30, 3))
            stream = await client.ask(words(30, 3), begins(asyncio.Event()))
            assert not hold.done()
            hold.cancel()
            await asyncio.gather(hold, return_exceptions=True)
            return alone, await asyncio.gather(*waiting), whole, stream

    with platform(folder, model, ["colocated"], batch_max=1, queue_max=2) as running:
        alone, waited, *refused = asyncio.run(scenario())
        running.wait_settled()
    for answer in refused:
        assert (answer.status, answer.code, answer.text) == (429, "queue_full", "")
        assert answer.headers["retry-after"] == "1"
    assert [answer.content for answer in waited] == [answer.content for answer in alone]


def test_a_full_pool_is_waited_for_and_then_503_with_retry_after(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The one that runs holds more than 4096 - 3900 tokens, so the other one never fits."""
    model, folder = tiny_model(tmp_path_factory), tmp_path_factory.mktemp("pool")

    async def scenario() -> tuple[Answer, Answer]:
        large = [5 + n % 1000 for n in range(3900)]
        async with running.client() as client:
            begun = asyncio.Event()
            prompt = words(220, 1)
            hold = asyncio.create_task(client.ask(prompt, begins(begun), **LONG, max_tokens=3700))
            await begun.wait()
            refused = await client.ask(large, max_tokens=1)
            assert not hold.done()
            hold.cancel()
            await asyncio.gather(hold, return_exceptions=True)
            await asyncio.to_thread(running.wait_settled)
            return refused, await client.ask(large, max_tokens=1)

    with platform(folder, model, ["colocated"], pool_tokens=4096, wait_max=1.0) as running:
        refused, served = asyncio.run(scenario())
        running.wait_settled()
    assert (refused.status, refused.code, refused.text) == (503, "capacity_exceeded", "")
    assert refused.headers["retry-after"] == "2"
    assert (served.status, served.finish) == (200, "length")


@pytest.mark.parametrize("roles", [["prefill", "decode"], ["colocated"]], ids=["split", "one"])
def test_many_long_requests_over_a_small_pool_all_end_as_if_alone(
    tmp_path_factory: pytest.TempPathFactory, roles: list[str]
) -> None:
    """Each grows to 20 of the 48 pages, and 12 are asked for at once: they start with 5 pages,
    so more run than can grow, and some are preempted and computed again."""
    model, folder = tiny_model(tmp_path_factory), tmp_path_factory.mktemp("small")
    prompts = [words(70 + salt, salt) for salt in range(12)]
    fields: dict[str, Any] = {**LONG, "max_tokens": 230}

    async def scenario() -> tuple[list[Answer], list[Answer]]:
        async with running.client() as client:
            alone = [await client.ask(prompt, **fields) for prompt in prompts]
            streamed = [begins(asyncio.Event()) if n % 2 else None for n in range(12)]
            together = await asyncio.gather(
                *(client.ask(p, s, **fields) for p, s in zip(prompts, streamed, strict=True))
            )
            return alone, together

    with platform(folder, model, roles, pool_tokens=768) as running:
        alone, together = asyncio.run(scenario())
        running.wait_settled()
    for one, other in zip(alone, together, strict=True):
        assert (one.status, len(one.logprobs)) == (200, 230)
        assert (other.status, other.content) == (200, one.content)
