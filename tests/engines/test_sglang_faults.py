"""Every fault inside real SGLang, with the guard: the request ends in an error, its neighbour in
its own text. With the check that the fault is for taken out, it goes through: a 200.

The faults and their public reports: `stand_ins/engine_faults.py`.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from faulty import (
    Ask,
    FaultyPair,
    adds_up,
    ask_now,
    make,
    message_of,
    notes,
    pool_of,
    text_of,
    wait_for,
    wait_whole,
)
from rig import Answer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

VICTIM, NEIGHBOUR = notes(11, 120)[0], notes(12, 104)[0]
LONG = 1100  # above prefill's pool of 1,024 tokens, far below the window of 4,096


@pytest.fixture(scope="module", params=["0.5.19", "0.5.23"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyPair]:
    folder = tmp_path_factory.mktemp("faults") / request.param
    with FaultyPair(request.param, guard=True, folder=folder, waiting_s=120) as pair:
        print(f"\nguarded {request.param} ready after {pair.start_seconds:.0f} s")
        yield pair


@pytest.fixture(scope="module")
def alone(pair: FaultyPair) -> dict[str, str]:
    """What victim and neighbour are told when nothing is wrong; the rooms stay known to prefill."""
    texts = {}
    for name, tokens in (("victim", VICTIM), ("neighbour", NEIGHBOUR)):
        [answers] = ask_now(pair, make(tokens, answer=40))
        assert answers.decode.status == 200, answers.decode.body
        texts[name] = text_of(answers.decode)
    return texts


@pytest.fixture(autouse=True)
def _calm(pair: FaultyPair) -> Iterator[None]:
    """Every case starts without faults, and leaves pools that add up."""
    pair.switch()
    yield
    pair.switch()
    wait_whole(pair)


@dataclass(frozen=True)
class Case:
    """``check``: of the guard, the one that finds it; ``at`` and ``kind``: of its evidence."""

    fault: str
    check: str
    at: str
    kind: str
    about: Callable[[Ask, Ask], Mapping[str, Any]]


AT_COMMIT = [
    Case(
        "page_unwritten", "commit", "commit", "unwritten", lambda v, _: {"room": v.room, "page": 3}
    ),
    Case(
        "pages_swapped",
        "commit",
        "commit",
        "misplaced",
        lambda v, _: {"room": v.room, "pages": [2, 4]},
    ),
    Case(
        "other_pages",
        "commit",
        "commit",
        "wrong_text",
        lambda v, n: {"room": v.room, "other": n.room, "page": 2},
    ),
    Case("placeholder", "commit", "commit", "unwritten", lambda v, _: {"rid": v.rid}),
    Case("cut_short", "commit", "commit", "short", lambda v, _: {"rid": v.rid, "tokens": 3}),
]


def show(pair: FaultyPair, what: str, answer: Answer) -> None:
    said = text_of(answer) or message_of(answer)
    print(f"  {pair.version} {what}: {answer.status} in {answer.seconds:.1f} s {said[:90]!r}")


def without(off: list[str]) -> str:
    return f" without {', '.join(off)}" if off else ""


@pytest.mark.parametrize("case", AT_COMMIT, ids=lambda case: case.fault)
class TestHandOff:
    """What arrives is not what was reserved for."""

    def test_it_ends_in_an_error_and_harms_nobody(
        self, pair: FaultyPair, alone: dict[str, str], case: Case
    ) -> None:
        neighbour, victim = make(NEIGHBOUR, answer=40), make(VICTIM, answer=40)
        if case.fault == "other_pages":
            ask_now(pair, neighbour)
        pair.switch({case.fault: case.about(victim, neighbour)})
        if case.fault == "other_pages":
            neighbour = make(NEIGHBOUR, answer=40)
        hit, beside = ask_now(pair, victim, neighbour)
        show(pair, case.fault, hit.decode)
        assert hit.decode.status in (500, 503)
        [evidence] = [e for e in pair.evidence(victim.rid) if e["role"] == "decode"]
        assert evidence["at"] == case.at
        assert case.kind in {page["kind"] for page in evidence["pages"]}
        assert text_of(beside.decode) == alone["neighbour"]

    def test_without_the_check_it_goes_through(
        self, pair: FaultyPair, alone: dict[str, str], case: Case
    ) -> None:
        neighbour, victim = make(NEIGHBOUR, answer=8), make(VICTIM, answer=24)
        if case.fault == "other_pages":
            ask_now(pair, neighbour)
        # A header that is not as expected is found at the next release too.
        pair.switch({case.fault: case.about(victim, neighbour)}, off=[case.check, "release"])
        [hit] = ask_now(pair, victim)
        show(pair, f"{case.fault} without {case.check}", hit.decode)
        assert hit.decode.status == 200
        print(f"    alone it was {alone['victim'][:90]!r}")


class TestRunning:
    """Something goes wrong with a request that decode is already answering."""

    def together(
        self, pair: FaultyPair, first: Ask, then: Ask, switch: Callable[[], None]
    ) -> tuple[Answer, Answer]:
        """``then`` is asked once ``first`` is being answered."""
        got: list[Answer] = []
        thread = threading.Thread(target=lambda: got.append(ask_now(pair, first)[0].decode))
        thread.start()
        wait_for(lambda: bool(pair.traced("committed", rid=first.rid)), 60, "first is answered")
        switch()
        [late] = ask_now(pair, then)
        thread.join()
        return got[0], late.decode

    def stray(self, pair: FaultyPair, off: list[str]) -> tuple[Ask, Answer, Answer]:
        """The neighbour's first pages land in the victim's as well, over Mooncake."""
        victim, neighbour = make(VICTIM, answer=120), make(NEIGHBOUR, answer=40)
        fault = {"stray": {"room": neighbour.room, "victim": victim.room, "page": 2}}
        hit, beside = self.together(pair, victim, neighbour, lambda: pair.switch(fault, off=off))
        assert pair.traced("stray", room=neighbour.room)
        show(pair, f"stray write{without(off)}", hit)
        return victim, hit, beside

    def test_a_stray_write_fails_the_request_that_it_hit(
        self, pair: FaultyPair, alone: dict[str, str]
    ) -> None:
        victim, hit, beside = self.stray(pair, [])
        assert hit.status == 500
        [evidence] = pair.evidence(victim.rid)
        assert (evidence["at"], evidence["pages"][0]["kind"]) == ("release", "foreign")
        assert text_of(beside) == alone["neighbour"]

    def test_without_the_check_at_release_it_goes_through(self, pair: FaultyPair) -> None:
        victim, hit, _ = self.stray(pair, ["release"])
        assert hit.status == 200
        assert not pair.evidence(victim.rid)

    def row(self, pair: FaultyPair, off: list[str]) -> tuple[Ask, Answer, Answer]:
        neighbour, victim = make(NEIGHBOUR, answer=160), make(VICTIM, answer=24)
        fault = {"row": {"rid": victim.rid, "other": neighbour.rid, "page": 2}}
        beside, hit = self.together(pair, neighbour, victim, lambda: pair.switch(fault, off=off))
        assert pair.traced("row", rid=victim.rid)
        show(pair, f"row{without(off)}", hit)
        return victim, hit, beside

    def test_a_row_that_leads_to_a_neighbour_fails_its_request(
        self, pair: FaultyPair, alone: dict[str, str]
    ) -> None:
        victim, hit, beside = self.row(pair, [])
        assert hit.status == 500
        [evidence] = pair.evidence(victim.rid)
        assert (evidence["at"], evidence["pages"][0]["kind"]) == ("step", "row")
        assert text_of(beside).startswith(alone["neighbour"])

    def test_without_the_check_of_the_row_it_goes_through(self, pair: FaultyPair) -> None:
        victim, hit, _ = self.row(pair, ["row"])
        assert hit.status == 200
        assert not pair.evidence(victim.rid)


class TestPrefixCache:
    """A prefix of one scope is found by another."""

    def second(self, pair: FaultyPair, seed: int, off: list[str]) -> tuple[Ask, Answer, int]:
        """Status for the second scope, and how many of its tokens prefill took from the first."""
        tokens = notes(seed, 96)[0]
        pair.switch({"scopeless": {}}, off=off)
        [first] = ask_now(pair, make(tokens, answer=4, scope="one"))
        assert first.decode.status == 200, first.decode.body
        other = make(tokens, answer=4, scope="two")
        [answers] = ask_now(pair, other)
        show(pair, f"scopeless{without(off)}", answers.decode)
        cached = 0
        if answers.prefill.status == 200:
            cached = int(answers.prefill.json()["meta_info"]["cached_tokens"])
        return other, answers.decode, cached

    def test_the_other_scope_gets_an_error(self, pair: FaultyPair) -> None:
        other, answer, _ = self.second(pair, 31, [])
        assert answer.status in (500, 503)
        [evidence] = [e for e in pair.evidence(other.rid) if e["role"] == "prefill"]
        assert (evidence["at"], evidence["pages"][0]["kind"]) == ("step", "prefix")

    def test_without_the_check_of_the_scope_decode_still_finds_it(self, pair: FaultyPair) -> None:
        """Digests begin at the scope: the other scope's pages say another text."""
        other, answer, _ = self.second(pair, 32, ["scope"])
        assert answer.status in (500, 503)
        [evidence] = pair.evidence(other.rid)
        assert (evidence["role"], evidence["at"]) == ("decode", "commit")

    def test_without_both_it_is_served(self, pair: FaultyPair) -> None:
        _, answer, cached = self.second(pair, 33, ["scope", "commit", "release"])
        assert answer.status == 200
        assert cached >= 64


class TestAdmission:
    """A prompt that prefill cannot hold; SGLang 0.5.19 leaks there (sglang#30233)."""

    def test_it_is_refused_and_nothing_is_reserved(self, pair: FaultyPair) -> None:
        long = make(notes(41, LONG)[0])
        [answers] = ask_now(pair, long)
        show(pair, "over-long", answers.decode)
        assert (answers.prefill.status, answers.decode.status) == (400, 400)
        assert str(LONG) in message_of(answers.decode)
        assert not pair.traced("reserved", rid=long.rid)

    def test_without_admission_pages_are_reserved_and_the_commit_refuses(
        self, pair: FaultyPair
    ) -> None:
        long = make(notes(42, LONG)[0])
        pair.switch(off=["admission"])
        [answers] = ask_now(pair, long)
        show(pair, "over-long without admission", answers.decode)
        assert pair.traced("reserved", rid=long.rid)
        assert answers.decode.status >= 400

    def test_without_both_the_incident_is_back(self, pair: FaultyPair) -> None:
        if pair.version != "0.5.19":
            pytest.skip("later versions refuse on prefill by themselves")
        long = make(notes(43, LONG)[0])
        pair.switch(off=["admission", "commit", "release"])
        [answers] = ask_now(pair, long)
        show(pair, "over-long without admission and commit", answers.decode)
        assert answers.decode.status == 200
        [reserved], [sent] = (
            pair.traced("reserved", rid=long.rid),
            pair.traced("sent", room=long.room),
        )
        assert (len(reserved["pages"]), sent["pages"]) == (-(-LONG // 16), 1)


class TestFree:
    """Pages that are given back twice would have two owners (sglang PR#30937)."""

    def test_a_page_that_is_given_back_twice_is_free_once(self, pair: FaultyPair) -> None:
        victim = make(VICTIM, answer=4)
        pair.switch({"double_free": {"role": "decode"}})
        [answers] = ask_now(pair, victim)
        assert answers.decode.status == 200
        wait_for(lambda: bool(pair.traced("double_free")), 20, "pages are given back")
        pair.switch()
        pool = pool_of(pair.decode)
        assert pool["free_twice"] == 0
        assert adds_up(pool), json.dumps(pool)
        assert "double_free" in pair.decode.log.read_text(errors="replace")
