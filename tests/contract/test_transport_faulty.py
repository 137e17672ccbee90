"""The faults do what their names say, over real transports, and keep to the three words."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from transport_peer import open_transport

from sekisho.transport import Completion, PageWrite, Status, Transport
from sekisho.transport.faulty import Fault, FaultPlan, FaultyTransport

PAGE = 4096 + 64
COUNT = 8
LEASE = slice(8, 24)
pytestmark = pytest.mark.timeout(120)


class Rig:
    """A faulty sender whose every page holds its index + 1, and a receiver in this process."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open: list[Transport] = []

    def start(self, plan: FaultPlan) -> FaultyTransport:
        inner = open_transport(self._kind, PAGE, COUNT)
        receiver = open_transport(self._kind, PAGE, COUNT)
        self._open += [inner, receiver]
        self.there = receiver.region.reshape(COUNT, PAGE)
        self.faulty = FaultyTransport(inner, plan)
        self.here = self.faulty.region.reshape(COUNT, PAGE)
        self.here[:] = np.arange(1, COUNT + 1, dtype=np.uint8)[:, None]
        self.peer = self.faulty.connect(receiver.endpoint())
        return self.faulty

    def one(self, fault: Fault, delay: int | None = None) -> FaultyTransport:
        return self.start(FaultPlan(at={0: fault}, delay=delay))

    def written(self) -> list[int]:
        return [int(index) for index in np.flatnonzero(self.there.any(axis=1))]

    def wait(self, count: int = 1) -> list[Completion]:
        """The next ``count`` completions."""
        found: list[Completion] = []
        deadline = time.monotonic() + 30.0
        while len(found) < count:
            assert time.monotonic() < deadline
            found += self.faulty.poll()
        return found

    def wait_written(self, pages: list[int]) -> None:
        deadline = time.monotonic() + 30.0
        while self.written() != pages:
            assert time.monotonic() < deadline
            self.faulty.poll()

    def flush(self) -> None:
        """Wait for all earlier writes: a sound submit of page 0 goes the same way."""
        self.wait_for(self.faulty.submit(self.peer, batch(0)))

    def wait_for(self, ticket: int) -> None:
        while ticket not in {completion.ticket for completion in self.wait()}:
            pass

    def close(self) -> None:
        for transport in self._open:
            transport.close()


@pytest.fixture(params=["memory", "mooncake"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.close()


def batch(*pages: int) -> list[PageWrite]:
    return [PageWrite(page, page, bytes([page + 1]) * 64) for page in pages]


def test_without_a_fault_it_is_the_inner_transport(rig: Rig) -> None:
    faulty = rig.start(FaultPlan())
    first, second = (faulty.submit(rig.peer, batch(page)) for page in (3, 5))
    assert {done[:2] for done in rig.wait(2)} == {(first, Status.DONE), (second, Status.DONE)}
    assert rig.written() == [3, 5]
    assert faulty.fired == []
    faulty.close()
    assert faulty.region.size == 0


def test_fail_writes_nothing(rig: Rig) -> None:
    faulty = rig.one(Fault.FAIL)
    ticket = faulty.submit(rig.peer, batch(2, 3))
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.FAILED)]
    rig.flush()
    assert rig.written() == [0]
    assert faulty.fired == [(0, Fault.FAIL)]


def test_lie_says_done_and_writes_nothing(rig: Rig) -> None:
    ticket = rig.one(Fault.LIE).submit(rig.peer, batch(2, 3))
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.DONE)]
    rig.flush()
    assert rig.written() == [0]


@pytest.mark.parametrize(("sent", "landed"), [((1, 2, 3), [1]), ((4,), [])])
def test_short_leaves_out_the_last_pages(
    rig: Rig, sent: tuple[int, ...], landed: list[int]
) -> None:
    ticket = rig.one(Fault.SHORT).submit(rig.peer, batch(*sent))
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.DONE)]
    assert rig.written() == landed


def test_late_lands_after_done_when_released(rig: Rig) -> None:
    faulty = rig.one(Fault.LATE)
    ticket = faulty.submit(rig.peer, batch(2))
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.DONE)]
    rig.flush()
    assert rig.written() == [0]
    faulty.release()
    rig.wait_written([0, 2])
    assert faulty.poll() == []


def test_late_lands_after_its_polls(rig: Rig) -> None:
    faulty = rig.one(Fault.LATE, delay=3)
    faulty.submit(rig.peer, batch(2))
    assert len(faulty.poll()) == 1
    faulty.poll()
    time.sleep(0.05)
    assert rig.written() == []
    rig.wait_written([2])


def test_duplicate_overwrites_the_next_owner(rig: Rig) -> None:
    faulty = rig.one(Fault.DUPLICATE)
    first = faulty.submit(rig.peer, batch(2))
    rig.wait_for(first)
    owner = faulty.submit(rig.peer, [PageWrite(5, 2, b"B" * 64)])
    rig.wait_for(owner)
    assert rig.there[2, :64].tobytes() == b"B" * 64
    faulty.release()
    rig.flush()
    deadline = time.monotonic() + 30.0
    while rig.there[2].tobytes() != b"\x03" * PAGE:
        assert time.monotonic() < deadline
    assert faulty.poll() == []


def test_unknown_is_followed_by_done(rig: Rig) -> None:
    faulty = rig.one(Fault.UNKNOWN)
    ticket = faulty.submit(rig.peer, batch(2))
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.UNKNOWN)]
    rig.flush()
    assert rig.written() == [0]
    faulty.release()
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.DONE)]
    assert rig.written() == [0, 2]


def test_unknown_of_a_dead_peer_ends_failed(rig: Rig) -> None:
    faulty = rig.one(Fault.UNKNOWN)
    ticket = faulty.submit(rig.peer, batch(2))
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.UNKNOWN)]
    faulty.disconnect(rig.peer)
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.FAILED)]
    faulty.release()
    time.sleep(0.05)
    assert rig.written() == []


def test_foreign_carries_another_lease(rig: Rig) -> None:
    ticket = rig.one(Fault.FOREIGN).submit(rig.peer, batch(2))
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.DONE)]
    wanted = np.full(PAGE, 3, np.uint8)
    wanted[LEASE] = 0xFF ^ 3
    assert (rig.there[2] == wanted).all()


@pytest.mark.parametrize(
    ("sent", "landed"), [((2, 3, 4), [1, 2, 3]), ((0, 1), [0, 2]), ((0,), [1])]
)
def test_misdirected_hits_a_page_that_was_not_offered(
    rig: Rig, sent: tuple[int, ...], landed: list[int]
) -> None:
    ticket = rig.one(Fault.MISDIRECTED).submit(rig.peer, batch(*sent))
    assert [done[:2] for done in rig.wait()] == [(ticket, Status.DONE)]
    assert rig.written() == landed


def test_a_seed_fixes_the_faults() -> None:
    rates = {Fault.LIE: 0.25, Fault.LATE: 0.25}
    plan = FaultPlan(at={0: Fault.FAIL}, rates=rates, seed=1)
    drawn = [plan.pick(index) for index in range(400)]
    assert drawn[0] is Fault.FAIL
    assert drawn == [FaultPlan({0: Fault.FAIL}, rates, 1).pick(index) for index in range(400)]
    assert drawn != [FaultPlan({0: Fault.FAIL}, rates, 2).pick(index) for index in range(400)]
    assert set(drawn[1:]) == {Fault.LIE, Fault.LATE, None}
    assert 60 < drawn.count(Fault.LIE) < 140
    assert 60 < drawn.count(Fault.LATE) < 140
