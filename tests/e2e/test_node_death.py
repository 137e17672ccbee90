"""``kill -9`` of a node at work: errors for its own requests, nothing for the others, no page
lost, and a successor."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from platform_kit import (
    LONG,
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
PROMPTS = [words(40, salt) for salt in range(6)]
ANSWER: dict[str, Any] = {**LONG, "max_tokens": 400}


@pytest.fixture(scope="module", params=["memory", "mooncake"])
def two_decoders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    transport = request.param if request.param == "memory" else mooncake_or_skip()
    folder = tmp_path_factory.mktemp("death")
    roles = ["prefill", "decode", "decode"]
    with platform(folder, tiny_model(tmp_path_factory), roles, transport=transport) as running:
        yield running


def test_kill_9_of_a_decode_node_mid_stream(two_decoders: Platform) -> None:
    async def scenario() -> tuple[str, list[Answer], list[Answer], list[Answer]]:
        async with two_decoders.client() as client:
            alone = await ask_all(client, PROMPTS)
            begun = [asyncio.Event() for _ in PROMPTS]
            streams = [
                asyncio.create_task(client.ask(prompt, on_text=begins(event), **ANSWER))
                for prompt, event in zip(PROMPTS, begun, strict=True)
            ]
            wholes = [asyncio.create_task(client.ask(prompt, **ANSWER)) for prompt in PROMPTS]
            for event in begun:
                await event.wait()
            killed = two_decoders.kill("decode")
            return killed, alone, await asyncio.gather(*streams), await asyncio.gather(*wholes)

    killed, alone, streams, wholes = asyncio.run(scenario())
    assert {answer.code for answer in streams} == {None, "node_lost"}
    for answer, expected in zip(streams, alone, strict=True):
        assert answer.status == 200
        if answer.code is None:
            assert answer.content == expected.content
            assert answer.done
        else:
            assert (answer.finish, answer.done) == (None, False)
            assert answer.text
            assert expected.text.startswith(answer.text)
            assert expected.logprobs[: len(answer.logprobs)] == answer.logprobs
    assert {answer.code for answer in wholes} == {None, "node_lost"}
    for answer, expected in zip(wholes, alone, strict=True):
        if answer.code is None:
            assert answer.content == expected.content
        else:
            assert (answer.status, answer.text) == (503, "")
            assert answer.headers["retry-after"] == "2"
    assert two_decoders.wait_replaced(killed) in two_decoders.fleet.pids()
    two_decoders.wait_settled()
    again = asyncio.run(ask_in_new_loop(two_decoders, PROMPTS))
    assert [answer.content for answer in again] == [answer.content for answer in alone]


def test_kill_9_of_the_prefill_node_while_it_computes_a_long_prompt(
    two_decoders: Platform,
) -> None:
    async def scenario() -> tuple[str, Answer, Answer, Answer]:
        async with two_decoders.client() as client:
            [alone] = await ask_all(client, PROMPTS[:1])
            begun = asyncio.Event()
            decoding = asyncio.create_task(client.ask(PROMPTS[0], on_text=begins(begun), **ANSWER))
            await begun.wait()
            lost = asyncio.create_task(client.ask(words(14000, 77), max_tokens=1))
            await asyncio.to_thread(
                two_decoders.wait_reports,
                lambda found: found["prefill-0.1"].requests["running"] == 1,
                "the long prompt in the prefill node",
            )
            killed = two_decoders.kill("prefill")
            return killed, alone, await decoding, await lost

    killed, alone, decoding, lost = asyncio.run(scenario())
    assert (lost.status, lost.code) == (503, "node_lost")
    assert lost.headers["retry-after"] == "2"
    assert decoding.content == alone.content, "a request that needed prefill no more"
    # Decode takes its pages back although the writer never said that it has ended.
    two_decoders.wait_replaced(killed)
    two_decoders.wait_settled()
    [again] = asyncio.run(ask_in_new_loop(two_decoders, PROMPTS[:1]))
    assert again.content == alone.content


async def ask_all(client: Client, prompts: list[str]) -> list[Answer]:
    answers = await asyncio.gather(*(client.ask(prompt, **ANSWER) for prompt in prompts))
    for answer in answers:
        assert (answer.status, answer.finish, len(answer.logprobs)) == (200, "length", 400)
    return list(answers)


async def ask_in_new_loop(running: Platform, prompts: list[str]) -> list[Answer]:
    async with running.client() as client:
        return await ask_all(client, prompts)
