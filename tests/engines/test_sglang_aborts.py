"""Requests that end early, and writers that do not: no page is used again while somebody may
still write it, and none is held for ever.

Reports: sglang PR#32564, #35049, #38961 (pages freed under a live writer), PR#35965 (an abort that
is never heard), #24527.
"""

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from faulty import (
    Ask,
    FaultyPair,
    ask,
    ask_now,
    guard_says,
    make,
    message_of,
    notes,
    text_of,
    wait_for,
    wait_whole,
)
from rig import Answer, EngineProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]

WAITING_S = 30
STALL_S = 80
DECODE_TOKENS = 2048  # SGLang keeps 512 of them back from every admission
VICTIM, OTHER, AROUND = notes(61, 120)[0], notes(62, 90)[0], notes(63, 400)[0]


@pytest.fixture(scope="module", params=["0.5.19", "0.5.23"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyPair]:
    """A small decode pool, so that a few requests go once around it."""
    folder = tmp_path_factory.mktemp("aborts") / request.param
    sizes = {"decode_tokens": DECODE_TOKENS, "waiting_s": WAITING_S}
    with FaultyPair(request.param, guard=True, folder=folder, **sizes) as pair:
        print(f"\nguarded {request.param} ready after {pair.start_seconds:.0f} s")
        ask_now(pair, make(OTHER, answer=2))  # the first request compiles for long
        yield pair


@pytest.fixture(autouse=True)
def _calm(pair: FaultyPair) -> Iterator[None]:
    pair.switch()
    yield
    pair.switch()


@pytest.fixture(scope="module")
def alone(pair: FaultyPair) -> str:
    """What the steady neighbour is told when nothing else happens."""
    [answers] = ask_now(pair, make(OTHER, answer=32))
    assert answers.decode.status == 200, answers.decode.body
    return text_of(answers.decode)


def served(pair: FaultyPair, alone: str) -> None:
    """Nothing is held, and the next request is answered as ever."""
    wait_whole(pair, 60)
    assert guard_says(pair.decode)["quarantined_pages"] == 0
    [answers] = ask_now(pair, make(OTHER, answer=32))
    assert text_of(answers.decode) == alone


def abort(process: EngineProcess, rid: str) -> None:
    """SGLang's own way to end a request."""
    body = json.dumps({"rid": rid}).encode()
    head = {"content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{process.url}/abort_request", body, head), timeout=30
    ):
        pass


class Background:
    """A request that runs while the test does something else."""

    def __init__(self, pair: FaultyPair, one: Ask) -> None:
        self.got: list[Answer] = []

        def run() -> None:
            self.got.append(ask_now(pair, one)[0].decode)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def answer(self) -> Answer:
        self.thread.join()
        return self.got[0]


class TestAborts:
    """Under load, at staggered times, both ways, both roles."""

    @pytest.mark.parametrize("how", ["client leaves", "prefill", "decode", "both"])
    def test_pages_come_back_and_the_neighbour_keeps_its_text(
        self, pair: FaultyPair, alone: str, how: str
    ) -> None:
        roles = {
            "prefill": [pair.prefill],
            "decode": [pair.decode],
            "both": [pair.prefill, pair.decode],
        }.get(how, [])

        async def one_abort(delay_ms: int) -> int:
            victim = make(VICTIM, answer=64)
            task = asyncio.create_task(ask(pair, victim))
            await asyncio.sleep(delay_ms / 1000)
            if not roles:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return 0
            for process in roles:
                await asyncio.to_thread(abort, process, victim.rid)
            return (await task).decode.status

        async def all_aborts() -> list[int]:
            return [await one_abort(ms) for ms in (0, 10, 40, 150, 500, 1500)]

        steady = Background(pair, make(OTHER, answer=32))
        statuses = asyncio.run(all_aborts())
        print(f"\n  {pair.version} {how}: {statuses}")
        assert text_of(steady.answer()) == alone
        served(pair, alone)


class TestLateWrite:
    """A transfer that goes on after decode has given up on it."""

    def late(self, pair: FaultyPair, off: list[str]) -> tuple[set[int], set[int], Answer]:
        """The victim's pages, those that others were given before its write landed, its answer."""
        ask_now(pair, make(AROUND, answer=2))
        victim = make(VICTIM, answer=8)
        faults: dict[str, Any] = {
            "stalled": {"room": victim.room, "seconds": STALL_S},
            "abort_lost": {"room": victim.room},
        }
        pair.switch(faults, off=off)
        lost = Background(pair, victim)
        wait_for(lambda: bool(pair.traced("stalling", room=victim.room)), 60, "the write begins")
        answer = lost.answer()
        assert answer.status != 200
        assert not pair.traced("sent", room=victim.room)
        held = guard_says(pair.decode)["quarantined_pages"]
        without = f"without {off[0]}" if off else "guarded"
        print(f"\n  {pair.version} {without}: {answer.status}, {held} pages quarantined")
        used: set[int] = set()
        rounds = 0
        # Ten prompts of 25 pages go around a pool of 128; prefill has them cached.
        while rounds < 10 and not pair.traced("sent", room=victim.room):
            rounds += 1
            other = make(AROUND, answer=2)
            ask_now(pair, other)
            [reserved] = pair.traced("reserved", rid=other.rid)
            landed = pair.traced("sent", room=victim.room)
            if not landed or reserved["at"] < landed[0]["at"]:
                used |= set(reserved["pages"])
        wait_for(lambda: bool(pair.traced("sent", room=victim.room)), 90, "the write lands")
        [stalling] = pair.traced("stalling", room=victim.room)
        print(f"  {rounds} requests of others used {len(used)} pages meanwhile")
        return set(stalling["pages"]), used, answer

    def test_its_pages_are_not_used_again_before_it_has_landed(
        self, pair: FaultyPair, alone: str
    ) -> None:
        pages, used, answer = self.late(pair, [])
        assert len(used) > DECODE_TOKENS // 16 // 2, "the others went around the pool"
        assert not pages & used
        print(f"  {message_of(answer)[:100]}")
        served(pair, alone)

    def test_without_the_quarantine_they_are(self, pair: FaultyPair, alone: str) -> None:
        pages, used, _ = self.late(pair, ["quarantine"])
        assert pages & used
        pair.switch()
        served(pair, alone)


class TestKilled:
    """A process ends as a crash does."""

    def test_prefill_in_the_middle_of_a_transfer(self, pair: FaultyPair, alone: str) -> None:
        victim = make(VICTIM, answer=8)
        pair.switch({"stalled": {"room": victim.room, "seconds": 600}})
        lost = Background(pair, victim)
        wait_for(lambda: bool(pair.traced("stalling", room=victim.room)), 60, "the write begins")
        pair.prefill.kill()
        answer = lost.answer()
        print(f"\n  {pair.version} prefill killed: {answer.status} in {answer.seconds:.0f} s")
        assert answer.status != 200
        wait_for(lambda: guard_says(pair.decode)["quarantined_pages"] == 0, 60, "nothing is held")
        pair.switch()
        pair.prefill.start()
        pair.prefill.wait_ready()
        ask_now(pair, make(OTHER, answer=2))
        served(pair, alone)

    def test_decode_in_the_middle_of_an_answer(self, pair: FaultyPair, alone: str) -> None:
        victim = make(VICTIM, answer=400)
        lost = Background(pair, victim)
        wait_for(lambda: bool(pair.traced("committed", rid=victim.rid)), 60, "it is answered")
        pair.decode.kill()
        assert lost.answer().status != 200
        pair.decode.start()
        pair.decode.wait_ready()
        ask_now(pair, make(OTHER, answer=2))
        served(pair, alone)
