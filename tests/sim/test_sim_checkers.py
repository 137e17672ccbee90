"""Each checker finds what was planted for it, and lets the rest pass."""

from dataclasses import replace

import numpy as np
import pytest

from sekisho.core.lease import Lease
from sekisho.core.page import chain_root
from sekisho.core.pool import Pool
from sekisho.core.table import BlockTable
from sekisho.engine.output import Delta, Ended
from sekisho.sim.checkers import FoundError
from sekisho.sim.checkers.conservation import Conservation
from sekisho.sim.checkers.interference import Interference
from sekisho.sim.checkers.liveness import Liveness
from sekisho.sim.checkers.ownership import Ownership
from sekisho.sim.checkers.truth import Truth
from sekisho.sim.client import Answer
from sekisho.sim.clock import Clock
from sekisho.sim.model import LAYOUT, Writer, answer
from sekisho.sim.process import new_memory
from sekisho.sim.scenario import Ask
from sekisho.sim.transport import Write

ASK = Ask(at=0.0, tenant="t", tokens=[1, 2, 3], count=4)
RIGHT = answer(ASK.tokens, 4)
SERVED = Answer(0, "t", number=5, status=200, finish="length", tokens=RIGHT, billed=4, ended=True)
SAID = Ended(5, "length", "", 4, 0)


def table(request: int, serial: int) -> BlockTable:
    return BlockTable(LAYOUT, request, Lease(1, serial), chain_root("t", "m"))


# -- ownership


def test_a_wrong_read_is_a_finding_only_when_its_token_leaves() -> None:
    judge = Ownership()
    judge.read("d", 5, [3])
    judge.left(Delta(6, 0, [1], "", []))
    judge.left(Ended(5, "ownership_violation", "", 0, 0))
    judge.step_done()
    judge.left(Delta(5, 0, [1], "", []))
    judge.read("d", 5, [3])
    with pytest.raises(FoundError, match=r"request 5 read page\(s\) \[3\] of d"):
        judge.left(Delta(5, 1, [1], "", []))


@pytest.mark.parametrize(
    ("slot", "value", "found"),
    [((0, 3, 3), 2, True), ((0, 3, 2), 8, False), ((1, 4, 2), 8, True), ((1, 5, 2), 8, False)],
    ids=["cached of another tenant", "cached of the same", "own of another", "beyond the end"],
)
def test_a_commit_over_slots_of_others(slot: tuple[int, int, int], value: int, found: bool) -> None:
    memory = new_memory("d", 2)
    memory.slots[:, :, 2:] = 7, 1
    memory.slots[slot] = value
    full = table(7, 2)
    full.adopt(np.array([0]), np.array([1], np.uint64), [bytes(16)])
    full.expect(np.array([1]), 21, [1] * 5, [bytes(16)])
    judge = Ownership()
    if found:
        with pytest.raises(FoundError, match="not written for it"):
            judge.committed("d", full, Writer(7, 1, 1), memory.slots)
    else:
        judge.committed("d", full, Writer(7, 1, 1), memory.slots)


# -- conservation


def test_a_page_is_granted_only_when_nobody_can_touch_it() -> None:
    judge, memory = Conservation(Clock()), new_memory("d", 4)
    judge.granted(memory, table(1, 1), [0, 1])
    with pytest.raises(FoundError, match="page 1 of d is held under"):
        judge.granted(memory, table(2, 2), [1])
    memory.open_writes[2] = 1
    with pytest.raises(FoundError, match="under an open write"):
        judge.granted(memory, table(2, 2), [2])
    memory.open_reads[3] = 1
    with pytest.raises(FoundError, match="while it is sent from"):
        judge.granted(memory, table(2, 2), [3])


def test_a_lease_is_used_once() -> None:
    judge, memory = Conservation(Clock()), new_memory("d", 4)
    judge.granted(memory, table(1, 1), [0])
    judge.granted(memory, table(1, 1), [1])
    with pytest.raises(FoundError, match="was used before, by"):
        judge.granted(memory, table(2, 1), [2])
    with pytest.raises(FoundError, match="was used before, by"):
        judge.granted(new_memory("d2", 4), table(1, 1), [2])


@pytest.mark.parametrize("caught", [True, False])
@pytest.mark.parametrize("landed", [True, False])
def test_a_writer_that_was_caught_is_not_believed(caught: bool, landed: bool) -> None:
    clock = Clock()
    judge, memory = Conservation(clock), new_memory("d", 4)
    headers = np.zeros((1, 8), np.uint64)
    headers[0, 1:3] = 1, 9
    write = Write(1, 1, new_memory("p", 4), memory, [0], [0], headers, 1.0, 1.0, 0.5)
    judge.late["d", 0] = write
    if caught:
        judge.disproved.add(write.lease)
    if landed:
        clock.at(2.0, lambda: None)
        clock.next()
    if caught and not landed:
        with pytest.raises(FoundError, match="its writer was caught lying"):
            judge.granted(memory, table(1, 1), [0])
    else:
        judge.granted(memory, table(1, 1), [0])
    judge.gone(memory)
    judge.granted(memory, table(1, 1), [0])


def test_pages_must_add_up_at_every_step_and_at_the_end() -> None:
    judge, memory, pool = Conservation(Clock()), new_memory("d", 4), Pool(4, 1)
    judge.step_done(memory, pool)
    judge.settled(memory, pool, cached=0)
    lease = pool.open_lease("t")
    pages = pool.grant(lease, 2)
    with pytest.raises(FoundError, match=r"d ended with .*'leased': 2"):
        judge.settled(memory, pool, cached=0)
    pool.seal(pages, lease)
    judge.settled(memory, pool, cached=2)
    with pytest.raises(FoundError, match="d ended with"):
        judge.settled(memory, pool, cached=1)
    pool._counts[0] += 1
    with pytest.raises(FoundError, match="is not 4 pages"):
        judge.step_done(memory, pool)


# -- interference


def test_every_token_is_the_one_that_the_prompt_alone_gives() -> None:
    judge = Interference()
    for count in range(5):
        judge.ended(replace(SERVED, tokens=RIGHT[:count]), ASK)
    wrong = [*RIGHT[:2], (RIGHT[2] + 1) % 256]
    with pytest.raises(FoundError, match="token 2 is"):
        judge.ended(replace(SERVED, tokens=wrong), ASK)


def test_a_run_alone_is_the_measure_where_there_is_a_temperature() -> None:
    judge = Interference()
    judge.compare("t", [SERVED], [replace(SERVED, tokens=RIGHT[:2])])
    judge.compare("u", [SERVED], [replace(SERVED, tokens=[0])])
    judge.compare("t", [SERVED], [])
    with pytest.raises(FoundError, match="ask 0 of t differs"):
        judge.compare("t", [SERVED], [replace(SERVED, tokens=[*RIGHT[:3], RIGHT[3] ^ 1])])


# -- liveness


def test_all_must_end_drain_and_come_back() -> None:
    judge = Liveness()
    judge.settled([SERVED], [], 0)
    judge.serving(True)
    for answers, busy, quarantined, told in (
        ([replace(SERVED, ended=False)], [], 0, "never ended"),
        ([SERVED], ["d"], 0, "still busy"),
        ([SERVED], [], 3, "stay in quarantine"),
    ):
        with pytest.raises(FoundError, match=told):
            judge.settled(answers, busy, quarantined)
    with pytest.raises(FoundError, match="ready again"):
        judge.serving(False)


# -- truth


FAILED = Answer(0, "t", number=5, status=500, code="ownership_violation", ended=True)
CUT = replace(FAILED, status=200, tokens=RIGHT[:2])


def test_honest_answers_pass() -> None:
    judge = Truth(healthy=False)
    judge.ended(SERVED, ASK, SAID, servable=True)
    judge.ended(FAILED, ASK, Ended(5, "ownership_violation", "", 0, 0), servable=True)
    judge.ended(CUT, ASK, None, servable=True)
    gone = replace(FAILED, status=499, code="client_gone")
    judge.ended(gone, ASK, SAID, servable=True)
    Truth(healthy=True).ended(gone, ASK, None, servable=True)


@pytest.mark.parametrize(
    ("given", "said", "servable", "told"),
    [
        (SERVED, None, True, "its node said nothing"),
        (SERVED, Ended(5, "transfer_failed", "", 4, 0), True, "its node said transfer_failed"),
        (SERVED, SAID, False, "was served although a role cannot hold it"),
        (replace(SERVED, tokens=RIGHT[:3], billed=3), SAID, True, "was served 3 of 4 tokens"),
        (replace(SERVED, billed=5), SAID, True, "is billed 5 for 4 tokens"),
        (replace(FAILED, billed=1), None, True, "and is billed 1 tokens"),
        (replace(CUT, finish="stop"), None, True, "shows finish stop"),
        (replace(FAILED, status=200), None, True, "got 200 and nothing"),
        (FAILED, SAID, True, "finished with length and was told ownership_violation"),
        (CUT, None, False, "was begun although a role cannot hold it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lie_is_found(given: Answer, said: Ended | None, servable: bool, told: str) -> None:
    with pytest.raises(FoundError, match=told):
        Truth(healthy=False).ended(given, ASK, said, servable)


def test_nothing_healthy_is_called_failed() -> None:
    with pytest.raises(FoundError, match="although nothing was broken"):
        Truth(healthy=True).ended(FAILED, ASK, None, servable=True)


def test_limits_are_what_they_say() -> None:
    judge = Truth(healthy=True)
    judge.queued("d", 5, 5)
    judge.admitted("p", 1, servable=True)
    with pytest.raises(FoundError, match="6 requests wait on d, the limit is 5"):
        judge.queued("d", 6, 5)
    with pytest.raises(FoundError, match="p admitted request 1, which it cannot hold"):
        judge.admitted("p", 1, servable=False)
