"""Real vLLM pairs over real Mooncake, without and with the guard: what arrives, what a client sees.

Both columns of the table that `test_table` prints are what was observed in this run.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from faulty_vllm import (
    BLOCK,
    FaultyPair,
    Outcome,
    ask,
    ask_decode_alone,
    ask_now,
    ask_with_a_row_of_another,
    body,
    outcome,
)
from rig import post
from rig_vllm import VllmServer
from vllm_prompts import OTHER, STORY, tokens

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
_NATURAL = (
    "The capital of France is",
    "Once upon a time there was a king who had three daughters, and the youngest of them",
    STORY * 20 + "The harbour lay",  # goes on as before, whatever the last bits of a sum are
)


@dataclass
class Arm:
    """One pair's observations, by row of the table."""

    seen: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    right: dict[str, str] = field(default_factory=dict)
    natural: list[str] = field(default_factory=list)


def _verdict(found: Outcome, right: str) -> str:
    """A 200 is the right text or it is not; anything else is an error."""
    if found.status != 200:
        return f"{found.status} after {found.seconds:.1f} s"
    return "200, right text" if found.text == right else "200, wrong text"


def _observe(pair: FaultyPair) -> Arm:
    """All rows, in an order in which none spoils the next."""
    arm = Arm()
    for number, text in enumerate(_NATURAL):
        found = ask_now(pair, {**body([], 32), "prompt": text, "cache_salt": f"n{number}"})[0]
        assert found.status == 200, found.said
        arm.natural.append(found.text)
    # What comes next depends on the last block, so that what is missing there is seen.
    eight = tokens(STORY, 7 * BLOCK) + tokens(OTHER, BLOCK)
    right = _row(pair, body(eight, salt="right"))
    assert right.status == 200, right.said
    for name, prefilled in {
        "1 block where 8 were reserved": eight[:BLOCK],
        "same length, another prompt's content": tokens(OTHER, 8 * BLOCK),
        "31 tokens missing inside the last block": eight[: 8 * BLOCK - 31],
        "prefill longer than decode's prompt": tokens(OTHER, 2 * BLOCK) + eight,
    }.items():
        salt = f"row {name}"
        found = _row(pair, body(eight, salt=salt), body(prefilled, salt=salt))
        _keep(arm, name, found, right.text)
    pair.switch({"one_block": {}})
    found = _row(pair, body(eight, salt="one block"))
    _keep(arm, "success reported, 1 block of 8 written", found, right.text)
    pair.switch()
    _neighbours(pair, arm)
    found = asyncio.run(ask_decode_alone(pair, body(eight, salt="alone")))
    _keep(arm, "prefill never runs", found, right.text)
    _unsalted(pair, arm)
    after = _row(pair, body(eight, salt="afterwards"))
    assert after.text == right.text, "a request after all these is not served as before them"
    return arm


def _row(pair: FaultyPair, asked: Any, prefilled: Any = None) -> Outcome:
    return asyncio.run(ask(pair, asked, prefilled))


def _keep(arm: Arm, name: str, found: Outcome, right: str) -> None:
    arm.outcomes[name], arm.right[name] = found, right
    arm.seen[name] = _verdict(found, right)


def _neighbours(pair: FaultyPair, arm: Arm) -> None:
    victim, other = ask_with_a_row_of_another(pair, 96)
    _keep(arm, "a block table row points at another's block", *victim)
    _keep(arm, "  … its neighbour", *other)


def _unsalted(pair: FaultyPair, arm: Arm) -> None:
    prompt = tokens(OTHER, 4 * BLOCK + 7)
    for _ in range(2):
        found = _row(pair, body(prompt, salt=""))
    text = found.text if found.status == 200 else "refused"
    _keep(arm, "request without cache_salt", found, text)


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arm]:
    """Both columns, one pair after the other."""
    out = {}
    for name in ("stock", "guarded"):
        folder = tmp_path_factory.mktemp(name)
        with _pair(folder, guard=name == "guarded") as pair:
            out[name] = _observe(pair)
    return out


def _pair(folder: Path, *, guard: bool, **more: Any) -> FaultyPair:
    more = {"prefill_tokens": 4096, "decode_tokens": 4096, "abort_s": 60, "give_up_s": 20} | more
    return FaultyPair(guard=guard, folder=folder, **more)


def test_table(arms: dict[str, Arm]) -> None:
    """Where stock vLLM answers 200 with another text, the guard answers with an error."""
    stock, guarded = arms["stock"].seen, arms["guarded"].seen
    print(f"\n{'what arrives at decode':46}| {'stock':26}| guarded")
    for name in stock:
        print(f"{name:46}| {stock[name]:26}| {guarded[name]}")
    wrong = {
        "same length, another prompt's content",
        "31 tokens missing inside the last block",
        "prefill longer than decode's prompt",
        "success reported, 1 block of 8 written",
    }
    assert wrong <= {name for name, seen in stock.items() if seen == "200, wrong text"}
    for name, found in arms["guarded"].outcomes.items():
        if name == "  … its neighbour":
            assert (found.status, found.text) == (200, arms["guarded"].right[name])
        else:
            assert found.status == 500, (name, found)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one server says that does both, without a guard."""
    with VllmServer(folder=tmp_path_factory.mktemp("single")) as server:
        return asyncio.run(_natural(server.server.url))


async def _natural(url: str) -> list[str]:
    out = []
    async with aiohttp.ClientSession() as session:
        for text in _NATURAL:
            asked = {**body([], 32), "prompt": text}
            out.append(outcome(await post(session, f"{url}/v1/completions", asked)).text)
    return out


def test_the_guard_changes_no_text(arms: dict[str, Arm], single: list[str]) -> None:
    print(f"\n{single}")
    assert arms["guarded"].natural == arms["stock"].natural
    assert arms["guarded"].natural == single
