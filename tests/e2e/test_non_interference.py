"""With a real model: tenant A's answers are the same bytes alone and under a storm of tenant B's
traffic with aborts, greedy and seeded, with split and with colocated nodes."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from platform_kit import Answer, Client, begins
from serve_kit import SEKISHO, Served, serve

pytestmark = pytest.mark.timeout(1200)
# The third one fills pages of its own; B says the same, which must not be shared between them.
PROMPTS = (
    "The gate between two domains was watched by",
    "A traveller who came by night had to",
    "Once upon a time, in a village below the pass, there lived an old woman who kept the papers "
    "of everybody who had ever crossed it, and she knew each of them by",
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.2, "top_p": 0.9, "seed": 7},
)
ASKED = [(prompt, way) for prompt in PROMPTS for way in WAYS]
LENGTH: dict[str, Any] = {"max_tokens": 24}


@pytest.fixture(scope="module", params=["split", "colocated"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("state")
    # Small, so that pages change hands all the time: B's requests alone need more.
    flags = ["--state-dir", str(state), "--pool-tokens", "1024", "--max-batch", "8"]
    if request.param == "colocated":
        flags += ["--colocated", "1"]
    with serve([SEKISHO, "serve", "--port", "0", *flags]) as running:
        yield running


def test_tenant_a_gets_the_same_bytes_under_a_storm_of_tenant_b(served: Served) -> None:
    key_a, key_b = served.keys.values()
    done = asyncio.Event()
    served_b = 0

    async def attack(client: Client, number: int) -> None:
        """Requests one after the other until A has all its answers; two of three are left."""
        nonlocal served_b
        for turn in itertools.count():
            prompt = f"{number} {turn} " * (1 + 5 * (turn % 4)) if turn % 3 else PROMPTS[turn % 2]
            fields: dict[str, Any] = {"max_tokens": 40, "temperature": 1, "seed": turn}
            stream = begins(asyncio.Event()) if turn % 2 else None
            if turn % 3 == 0:
                answer = await client.ask(prompt, stream, **fields)
                served_b += answer.status == 200
            else:
                after = (number * 37 + turn * 101) % 900 / 1000
                await client.ask_and_leave(prompt, after, on_text=stream, **fields)
            if done.is_set():
                return

    async def scenario() -> tuple[list[Answer], list[Answer]]:
        async with (
            Client(served.url, key_a, served.model) as a,
            Client(served.url, key_b, served.model) as b,
        ):
            alone = [await a.ask(prompt, **way, **LENGTH) for prompt, way in ASKED]
            storm = [asyncio.create_task(attack(b, number)) for number in range(10)]
            stormy = [await a.ask(prompt, **way, **LENGTH) for prompt, way in ASKED]
            stormy += await asyncio.gather(
                *(a.ask(prompt, begins(asyncio.Event()), **way, **LENGTH) for prompt, way in ASKED)
            )
            done.set()
            await asyncio.gather(*storm)
            return alone, stormy

    alone, stormy = asyncio.run(scenario())
    assert served_b > 0
    texts = [answer.text for answer in alone]
    assert len(set(texts)) == len(texts), "an answer must say which one it is"
    assert all(answer.logprobs for answer in alone)
    for expected, found in zip(alone * 2, stormy, strict=True):
        assert (found.status, found.content) == (200, expected.content)
