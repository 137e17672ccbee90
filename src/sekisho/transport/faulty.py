"""A transport that breaks its word in chosen ways: for tests and the simulator only.

No command can reach it. Each `Fault` is one that somebody reported of a system in production;
a plan says which submit suffers which. Delayed writes land after a number of polls and not
after a time, so that a run repeats exactly, or when the test says `FaultyTransport.release`.
"""

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sekisho.transport.base import Completion, PageWrite, Status, Transport


class Fault(enum.StrEnum):
    """What goes wrong with one submit, and a public report of it."""

    FAIL = "fail"
    """Nothing is written, FAILED (InferenceX#1944, vllm-ascend#5660)."""
    SHORT = "short"
    """The last half of the pages, rounded up, is never written, DONE (sglang#30233,
    vllm#50754)."""
    LATE = "late"
    """DONE at once, written later (sglang#24527, sglang#32564, mooncake#2086)."""
    DUPLICATE = "duplicate"
    """Written, DONE, and written again later, perhaps into a page that has a new owner
    (sglang#24580: its order of two writes; a replayed write)."""
    LIE = "lie"
    """Nothing is written, DONE (TensorRT-LLM#19545, vllm#52234)."""
    UNKNOWN = "unknown"
    """UNKNOWN at once, written later, then DONE (sglang#38961: a time-out is no end)."""
    FOREIGN = "foreign"
    """Every header carries another lease, DONE (sglang#17430, dynamo#14018)."""
    MISDIRECTED = "misdirected"
    """The last page lands in a page that was not offered, DONE (tt-metal#56324,
    sglang#31471)."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which submit, counted from 0, suffers which fault.

    ``at`` decides for the submits it names. For the others, each fault has the probability
    ``rates`` gives it; what is drawn depends on ``seed`` and on the submit's index alone.
    ``delay`` is in polls; None leaves delayed writes to `FaultyTransport.release`.
    """

    at: Mapping[int, Fault] = field(default_factory=dict)
    rates: Mapping[Fault, float] = field(default_factory=dict)
    seed: int = 0
    delay: int | None = None

    def pick(self, index: int) -> Fault | None:
        if index in self.at:
            return self.at[index]
        draw = random.Random(f"{self.seed}:{index}").random()
        for fault, rate in self.rates.items():
            if draw < rate:
                return fault
            draw -= rate
        return None


@dataclass(slots=True)
class _Delayed:
    """A write to come; ``ticket`` is 0 if its completion is not to be told."""

    peer: int
    pages: tuple[PageWrite, ...]
    ticket: int
    due: int | None


class FaultyTransport:
    """Implements `Transport` over ``inner``, with the faults of ``plan``.

    A delayed write reads its source pages when it lands, as an adapter would: if they have a new
    owner by then, it is the new owner's content that goes out (vllm#52360). A batch that covers
    the peer's whole region cannot be misdirected: ValueError.
    """

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self.name = inner.name
        self.region: NDArray[np.uint8] = inner.region
        self.fired: list[tuple[int, Fault]] = []
        """Index and fault of every submit that suffered one, for the log of a failed run."""
        self._inner = inner
        self._plan = plan
        self._submits = 0
        self._polls = 0
        self._told: list[Completion] = []
        self._delayed: list[_Delayed] = []
        # ticket of the inner transport -> ours, 0 for a write nobody shall hear of
        self._ours: dict[int, int] = {}

    def endpoint(self) -> str:
        return self._inner.endpoint()

    def connect(self, endpoint: str) -> int:
        return self._inner.connect(endpoint)

    def disconnect(self, peer: int) -> None:
        self._inner.disconnect(peer)
        for write in [write for write in self._delayed if write.peer == peer]:
            self._delayed.remove(write)
            if write.ticket:
                self._tell(write.ticket, Status.FAILED)

    def submit(self, peer: int, pages: Sequence[PageWrite]) -> int:
        fault = self._plan.pick(self._submits)
        if fault is not None:
            self.fired.append((self._submits, fault))
        self._submits += 1
        ticket = self._submits
        pages = tuple(pages)
        match fault:
            case Fault.FAIL:
                self._tell(ticket, Status.FAILED)
            case Fault.LIE:
                self._tell(ticket, Status.DONE)
            case Fault.SHORT:
                if kept := pages[: len(pages) // 2]:
                    self._write(peer, kept, ticket)
                else:
                    self._tell(ticket, Status.DONE)
            case Fault.LATE:
                self._tell(ticket, Status.DONE)
                self._delay(peer, pages, 0)
            case Fault.UNKNOWN:
                self._tell(ticket, Status.UNKNOWN)
                self._delay(peer, pages, ticket)
            case Fault.DUPLICATE:
                self._write(peer, pages, ticket)
                self._delay(peer, pages, 0)
            case Fault.FOREIGN:
                self._write(peer, tuple(_foreign(page) for page in pages), ticket)
            case Fault.MISDIRECTED:
                self._write(peer, _misdirected(pages), ticket)
            case None:
                self._write(peer, pages, ticket)
        return ticket

    def poll(self) -> list[Completion]:
        self._polls += 1
        self._land([w for w in self._delayed if w.due is not None and w.due <= self._polls])
        for done in self._inner.poll():
            ticket = self._ours[done.ticket]
            if done.status is not Status.UNKNOWN:
                del self._ours[done.ticket]
            if ticket:
                self._told.append(done._replace(ticket=ticket))
        told, self._told = self._told, []
        return told

    def release(self) -> None:
        """Let every delayed write land now."""
        self._land(list(self._delayed))

    def close(self) -> None:
        self._delayed.clear()
        self._inner.close()
        self.region = self._inner.region

    def _tell(self, ticket: int, status: Status) -> None:
        self._told.append(Completion(ticket, status, "injected"))

    def _write(self, peer: int, pages: tuple[PageWrite, ...], ticket: int) -> None:
        self._ours[self._inner.submit(peer, pages)] = ticket

    def _delay(self, peer: int, pages: tuple[PageWrite, ...], ticket: int) -> None:
        delay = self._plan.delay
        due = None if delay is None else self._polls + delay
        self._delayed.append(_Delayed(peer, pages, ticket, due))

    def _land(self, writes: list[_Delayed]) -> None:
        for write in writes:
            self._delayed.remove(write)
            self._write(write.peer, write.pages, write.ticket)


def _foreign(page: PageWrite) -> PageWrite:
    """The same page under a lease that differs in every bit (bytes 8 to 24 of the header)."""
    lease = bytes(byte ^ 0xFF for byte in page.header[8:24])
    return page._replace(header=page.header[:8] + lease + page.header[24:])


def _misdirected(pages: tuple[PageWrite, ...]) -> tuple[PageWrite, ...]:
    """The last page goes just below, or else just above, all pages of the batch."""
    targets = [page.target_page for page in pages]
    elsewhere = min(targets) - 1 if min(targets) > 0 else max(targets) + 1
    return (*pages[:-1], pages[-1]._replace(target_page=elsewhere))
