"""The incident of 2026 in real SGLang 0.5.19 (sglang#30233), and the same requests with the guard.

Prefill holds 1,024 tokens, decode 2,048, and 4,096 are advertised. Tenant A's documents are
answered and their pages freed; then B asks with more than prefill holds. Whose pages B's request is
given, and what stands in its answer, is printed for both arms.

Decode has 128 pages, and hands out freed ones, in order, only when all were used:

    A, 970 tokens   1 … 63          (61 pages and two for the answer)
    A               64 … 126
    B, 1,018        1 … 64, 65 … 70 the first document's pages, each at the same ordinal
    A               1 … 63          58 pages were left, too few

``ENGINE_RECORD=FOLDER`` keeps requests, answers, trace and logs of the unguarded arm there.
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
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
    text_from,
    text_of,
    tokens_of,
    wait_whole,
)
from rig import ROOT
from rig_sglang import PairAnswers

from sekisho.engine.demo import ensure_demo_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(2400)]

ROUNDS_MAX = 12
DECODE_TOKENS = 2048
PREFILL_TAKES = 1018
LENGTHS = (1026, 1018)
ANSWER = 96  # four items of the notes: a code stands in every third
NATURAL = (
    "The capital of France is",
    "A short poem about the sea:\n",
    "Water boils at one hundred degrees. Ice melts at",
)


@dataclass
class Arm:
    """What one pair was asked and what it said, in order."""

    version: str
    guard: bool
    kinds: list[str] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    answers: list[PairAnswers] = field(default_factory=list)

    def ask(self, pair: FaultyPair, kind: str, one: Ask) -> PairAnswers:
        [got] = ask_now(pair, one, timeout_s=400)
        self.kinds.append(kind)
        self.asks.append(one)
        self.answers.append(got)
        said = text_of(got.decode) or message_of(got.decode)
        arm = f"{self.version} {'guarded  ' if self.guard else 'unguarded'}"
        where = f"prefill {got.prefill.status} in {got.prefill.seconds:.2f} s, decode"
        where += f" {got.decode.status} in {got.decode.seconds:.2f} s"
        print(f"  {arm} {kind:<22} {len(one.tokens):>5} tokens: {where} {said[:70]!r}", flush=True)
        return got

    def texts(self, kind: str) -> list[str]:
        found = zip(self.kinds, self.answers, strict=True)
        return [text_of(got.decode) for name, got in found if name == kind]

    def natural(self, pair: FaultyPair, kind: str) -> None:
        for prompt in NATURAL:
            self.ask(pair, kind, make(tokens_of(prompt), answer=16))


@dataclass(frozen=True)
class Pages:
    """How decode got the pages of one request: reserved, written by prefill, and the names of the
    requests whose pages the unwritten ones were."""

    reserved: int
    received: int
    owners: dict[str, int]


def pages_of(pair: FaultyPair, one: Ask) -> Pages:
    [reserved] = pair.traced("reserved", rid=one.rid)
    received = sum(sent["pages"] for sent in pair.traced("sent", room=one.room))
    owners: dict[str, int] = {}
    for rid in reserved["before"][received:]:
        owners[rid] = owners.get(rid, 0) + 1
    return Pages(len(reserved["pages"]), received, owners)


@dataclass
class Incident:
    """The unguarded arm: when the code came out, and what the controls said."""

    arm: Arm
    rounds: int
    code: str
    leaked: str
    pages: Pages
    tenant_a: set[str]
    normal: list[Pages]
    without_a: str
    in_limit: str
    codes: list[str]


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Incident:
    folder = tmp_path_factory.mktemp("incident") / "unguarded"
    arm = Arm("0.5.19", guard=False)
    sizes = {"decode_tokens": DECODE_TOKENS, "waiting_s": 300}
    with FaultyPair("0.5.19", guard=False, folder=folder, **sizes) as pair:
        print(f"\nunguarded 0.5.19 ready after {pair.start_seconds:.0f} s")
        found = play(pair, arm)
        record(pair, found)
    return found


def play(pair: FaultyPair, arm: Arm) -> Incident:
    """Controls first, then rounds until A's code stands in B's answer."""
    arm.natural(pair, "natural before")
    alone = arm.ask(pair, "B over, no A", make(notes(900, LENGTHS[0])[0], answer=ANSWER))
    codes: list[str] = []
    tenant_a: set[str] = set()
    normal: list[Pages] = []
    rounds, code, pages, leaked = 0, "", Pages(0, 0, {}), ""
    while rounds < ROUNDS_MAX and not code:
        rounds += 1
        for document in range(2):
            tokens, planted = notes(100 + 10 * rounds + document, 970)
            codes.append(planted)
            one = make(tokens, answer=24)
            tenant_a.add(one.rid)
            arm.ask(pair, "A document", one)
            normal.append(pages_of(pair, one))
        over = make(notes(900 + rounds, LENGTHS[rounds % 2])[0], answer=ANSWER)
        leaked = text_of(arm.ask(pair, "B over-long", over).decode)
        pages = pages_of(pair, over)
        print(f"    {pages}", flush=True)
        code = next((one for one in codes if one in leaked), "")
    inside = arm.ask(pair, "B in limit, after A", make(notes(950, 960)[0], answer=ANSWER))
    arm.natural(pair, "natural after")
    without_a, in_limit = text_of(alone.decode), text_of(inside.decode)
    return Incident(arm, rounds, code, leaked, pages, tenant_a, normal, without_a, in_limit, codes)


class TestUnguarded:
    """0.5.19 as it is."""

    def test_the_other_tenants_code_stands_in_an_answer_with_status_200(
        self, incident: Incident
    ) -> None:
        print(f"\n  after {incident.rounds} rounds {incident.code!r} in {incident.leaked!r}")
        assert incident.code in incident.codes
        assert incident.code in incident.leaked

    def test_one_page_was_received_and_the_rest_had_been_the_other_tenants(
        self, incident: Incident
    ) -> None:
        pages = incident.pages
        assert pages.received == 1
        assert pages.reserved in {-(-length // 16) for length in LENGTHS}
        stale = sum(n for rid, n in pages.owners.items() if rid in incident.tenant_a)
        print(f"\n  {pages.reserved} reserved, {pages.received} received, {stale} had been A's")
        assert stale > pages.reserved // 2

    def test_in_limit_every_page_is_received(self, incident: Incident) -> None:
        assert {one.reserved - one.received for one in incident.normal} == {0}

    def test_neither_control_says_a_code(self, incident: Incident) -> None:
        print(f"\n  without A: {incident.without_a!r}\n  in limit: {incident.in_limit!r}")
        assert incident.in_limit
        for code in incident.codes:
            assert code not in incident.without_a
            assert code not in incident.in_limit


@dataclass
class Guarded:
    """The guarded arm of one version."""

    arm: Arm
    over: list[PairAnswers]
    asks: list[Ask]
    reserved: list[Any]
    pools: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["0.5.19", "0.5.23"])
def guarded(
    request: pytest.FixtureRequest, incident: Incident, tmp_path_factory: pytest.TempPathFactory
) -> Guarded:
    """After the unguarded pair has ended: two at once are too many for a machine."""
    folder = tmp_path_factory.mktemp("incident") / request.param
    arm = Arm(request.param, guard=True)
    sizes = {"decode_tokens": DECODE_TOKENS, "waiting_s": 300}
    with FaultyPair(request.param, guard=True, folder=folder, **sizes) as pair:
        print(f"\nguarded {request.param} ready after {pair.start_seconds:.0f} s")
        arm.natural(pair, "natural before")
        arm.ask(pair, "A document", make(notes(110, 970)[0], answer=24))
        asks = [make(notes(901, length)[0], answer=ANSWER) for length in (1018, 1026, 1999)]
        over = [arm.ask(pair, "B over-long", one) for one in asks]
        reserved = [pair.traced("reserved", rid=one.rid) for one in asks]
        wait_whole(pair)
        pools = [pool_of(process) for process in (pair.prefill, pair.decode)]
        arm.natural(pair, "natural after")
        return Guarded(arm, over, asks, reserved, pools)


class TestGuarded:
    """The same requests, the guard in."""

    def test_the_request_ends_in_400_with_both_numbers(self, guarded: Guarded) -> None:
        for one, got in zip(guarded.asks, guarded.over, strict=True):
            assert (got.prefill.status, got.decode.status) == (400, 400)
            numbers = {int(n) for n in re.findall(r"\d+", message_of(got.decode))}
            assert len(one.tokens) in numbers
            assert any(n <= PREFILL_TAKES for n in numbers)

    def test_it_ends_in_under_a_second(self, guarded: Guarded) -> None:
        """The fastest of three, since the machine may be busy; unguarded later versions take
        the whole time-out."""
        assert min(got.decode.seconds for got in guarded.over) < 1.0

    def test_nothing_is_held(self, guarded: Guarded) -> None:
        assert guarded.reserved == [[], [], []]
        for pool in guarded.pools:
            print(f"\n  {pool}")
            assert adds_up(pool)

    def test_requests_before_and_after_are_answered_as_without_the_guard(
        self, guarded: Guarded, incident: Incident
    ) -> None:
        expected = incident.arm.texts("natural before")
        assert all(expected)
        assert guarded.arm.texts("natural before") == expected
        assert guarded.arm.texts("natural after") == expected
        assert incident.arm.texts("natural after") == expected


# -- the fixtures of the audit


def record(pair: FaultyPair, incident: Incident) -> None:
    """Keep the unguarded arm where ``ENGINE_RECORD`` says, without paths of this machine."""
    folder = os.environ.get("ENGINE_RECORD")
    if not folder:
        return
    to, arm = Path(folder), incident.arm
    to.mkdir(parents=True, exist_ok=True)
    requests, answers = [], []
    for kind, one, got in zip(arm.kinds, arm.asks, arm.answers, strict=True):
        text = text_from(one.tokens)
        requests.append({"kind": kind, "room": one.room, "prompt": text, **one.body()})
        for role, answer in (("prefill", got.prefill), ("decode", got.decode)):
            said = {"rid": one.rid, "role": role, "status": answer.status}
            answers.append(said | {"seconds": round(answer.seconds, 3), "body": answer.json()})
    for name, lines in (("requests", requests), ("answers", answers)):
        kept = "\n".join(json.dumps(line) for line in lines)
        (to / f"{name}.jsonl").write_text(kept + "\n")
    over = [one.rid for kind, one in zip(arm.kinds, arm.asks, strict=True) if "over-long" in kind]
    summary = {
        "version": arm.version,
        "rounds": incident.rounds,
        "code": incident.code,
        "answer": over[-1],
        "reserved": incident.pages.reserved,
        "received": incident.pages.received,
        "owners": incident.pages.owners,
        "tenant_a": sorted(incident.tenant_a),
    }
    (to / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for file in (pair.trace_file, pair.prefill.log, pair.decode.log):
        (to / file.name).write_text(without_paths(file.read_text(errors="replace"), pair))


def without_paths(text: str, pair: FaultyPair) -> str:
    """The same with the machine's folders by what they are."""
    for path, name in (
        (ensure_demo_model(), "<model>"),
        (pair.folder, "<logs>"),
        (ROOT, "<checkout>"),
        (Path.home(), "<home>"),
    ):
        text = text.replace(str(path), name)
    return text
