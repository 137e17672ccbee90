"""Transfers through simulated time: the payload lands, then the header, then the word of it.

Implements `sekisho.transport.Transport`. What a strike does to a write is in `write_faults`; what
is written, and until when it may still land, is kept for the checkers.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sekisho.core.lease import Lease
from sekisho.core.memory import WORDS
from sekisho.core.page import HEADER
from sekisho.sim.clock import Clock
from sekisho.sim.model import LAYOUT, NOBODY, Slots, Writer, slots_of
from sekisho.transport import Completion, PageWrite, Status, TransportError

_SPEED = (0.0005, 0.006)  # seconds for the payload of a batch, and again for each further step


@dataclass(eq=False)
class Memory:
    """A node's region. ``open_writes`` and ``open_reads`` count, per page, the writes of others
    into it and out of it that may still touch it."""

    name: str
    page_count: int
    region: NDArray[np.uint8]
    alive: bool = True
    open_writes: Counter[int] = field(default_factory=Counter)
    open_reads: Counter[int] = field(default_factory=Counter)
    half_landed: Counter[int] = field(default_factory=Counter)
    landings: list["Landing"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots: Slots = slots_of(self.region, self.page_count)
        strides = (LAYOUT.page_bytes, 8)
        self.words = np.ndarray((self.page_count, WORDS), "<u8", self.region, strides=strides)

    def restart(self, name: str) -> None:
        """The memory of process ``name`` from now on; what another left in it stays."""
        self.name, self.alive = name, True
        self.open_writes, self.open_reads, self.half_landed = Counter(), Counter(), Counter()


@dataclass(eq=False)
class Write:
    """A submitted batch on its way; a strike changes it before it leaves.

    ``payload_at``, ``header_at``, ``told_at``: simulated seconds. ``doubt_at``: when UNKNOWN is
    told first. ``content`` [n, 16, 4]: slots that were read early; else they are read when they
    land. ``silent``: nobody is told. ``halves``: how many pages' payloads land by half only.
    ``stamp``: the request; pages of its tenant that prefill had in its prefix cache (ordinals below
    ``stamp.shared``) arrive as its own.
    """

    ticket: int
    peer: int
    source: Memory
    target: Memory
    sources: list[int]
    targets: list[int]
    headers: NDArray[np.uint64]
    payload_at: float
    header_at: float
    told_at: float
    status: Status = Status.DONE
    doubt_at: float | None = None
    lands: bool = True
    content: Slots | None = None
    silent: bool = False
    stamp: Writer = NOBODY
    headers_lost: int = 0
    halves: int = 0

    def __post_init__(self) -> None:
        self.lease = Lease(int(self.headers[0, 1]), int(self.headers[0, 2]))
        self.granted = tuple(self.targets), tuple(self.sources)
        self.marks = self.target.open_writes, self.source.open_reads

    @property
    def alive(self) -> bool:
        """It may still land."""
        return self.lands and self.source.alive and self.target.alive


@dataclass(eq=False)
class Landing:
    """Payload or headers of a write, or both, reaching a region once."""

    at: float
    write: Write
    payload: bool
    headers: bool

    def __call__(self) -> None:
        if self.payload:
            _land_payload(self.write)
        if self.headers:
            _land_headers(self.write)
        if self.payload != self.headers:
            change = 1 if self.payload else -1
            for page in self.write.targets:
                self.write.target.half_landed[page] += change
        self.payload = self.headers = False

    @property
    def waits(self) -> bool:
        """A stray write never comes between another's payload and its header: only a payload
        digest would show that."""
        half = self.write.target.half_landed
        return self.payload and self.headers and any(half[page] for page in self.write.targets)


class SimTransport:
    """One node's end. ``strike`` is called with every write that is about to leave, and with the
    one before it; it may change the write and return a second one that follows."""

    name = "simulated"

    def __init__(
        self,
        clock: Clock,
        memories: dict[str, Memory],
        own: Memory,
        seed: str,
        strike: Callable[[Write, Write | None], Write | None],
        wake: Callable[[], None],
    ) -> None:
        self.region = own.region
        self._own = own
        self._clock = clock
        self._memories = memories
        self._random = random.Random(seed)
        self._strike = strike
        self._wake = wake
        self._peers: dict[int, Memory] = {}
        self._tickets = 0
        self._told: list[Completion] = []
        self._open: dict[int, Write] = {}
        self._previous: Write | None = None

    def endpoint(self) -> str:
        return self._own.name

    def connect(self, endpoint: str) -> int:
        memory = self._memories.get(endpoint)
        if memory is None or not memory.alive:
            raise TransportError(f"{endpoint} cannot be reached")
        number = len(self._peers) + 1
        self._peers[number] = memory
        return number

    def disconnect(self, peer: int) -> None:
        for write in [write for write in self._open.values() if write.peer == peer]:
            write.lands = False
            write.status = Status.FAILED

    def submit(self, peer: int, pages: Sequence[PageWrite]) -> int:
        self._tickets += 1
        low, high = _SPEED
        steps = [low + self._random.random() * (high - low) for _ in range(3)]
        at = np.cumsum([self._clock.now, *steps])
        write = Write(
            ticket=self._tickets,
            peer=peer,
            source=self._own,
            target=self._peers[peer],
            sources=[page.source_page for page in pages],
            targets=[page.target_page for page in pages],
            headers=np.frombuffer(b"".join(p.header for p in pages), "<u8").reshape(-1, WORDS),
            payload_at=float(at[1]),
            header_at=float(at[2]),
            told_at=float(at[3]),
        )
        self._open[write.ticket] = write
        self._mark(write, 1)
        second = self._strike(write, self._previous)
        self._previous = write
        self._launch(write)
        if second is not None:
            self._launch(second)
        return write.ticket

    def poll(self) -> list[Completion]:
        told, self._told = self._told, []
        return told

    def close(self) -> None:
        """The process is dead: nothing of it lands any more."""
        self._own.alive = False
        for write in self._open.values():
            self._mark(write, -1)
        self._open.clear()

    # -- private

    def _mark(self, write: Write, change: int) -> None:
        for pages, marks in zip(write.granted, write.marks, strict=True):
            for page in pages:
                marks[page] += change

    def _launch(self, write: Write) -> None:
        clock = self._clock
        if write.doubt_at is not None:
            clock.at(write.doubt_at, lambda: self._tell(write, Status.UNKNOWN))
        if write.lands:
            if write.payload_at == write.header_at:
                parts = [(write.header_at, True, True)]
            else:
                parts = [(write.payload_at, True, False), (write.header_at, False, True)]
            for when, payload, headers in parts:
                landing = Landing(when, write, payload, headers)
                write.target.landings.append(landing)
                clock.at(when, partial(self._land, landing))
        if not write.silent:
            clock.at(write.told_at, lambda: self._end(write))

    def _land(self, landing: Landing) -> None:
        if landing.waits:
            landing.at = self._clock.now + _SPEED[1]
            self._clock.at(landing.at, lambda: self._land(landing))
        else:
            landing()

    def _tell(self, write: Write, status: Status) -> None:
        if write.ticket in self._open:
            self._told.append(Completion(write.ticket, status, "simulated"))
            self._wake()

    def _end(self, write: Write) -> None:
        if write.ticket not in self._open:
            return
        status = write.status if write.target.alive else Status.FAILED
        self._tell(write, status)
        del self._open[write.ticket]
        self._mark(write, -1)


def land_until(memory: Memory, when: float) -> None:
    """Everything that reaches ``memory`` by ``when`` lands now, in order."""
    if not memory.landings:
        return
    due = sorted((each for each in memory.landings if each.at <= when), key=lambda each: each.at)
    for landing in due:
        if not landing.waits:
            landing()
    memory.landings = [each for each in memory.landings if each.payload or each.headers]


def land_whole(memory: Memory) -> None:
    """From now on what is on its way lands at once, with its header: between the two, the pages
    have a new owner's process, which no transport that we know of would still write to."""
    payloads = {each.write for each in memory.landings if each.payload}
    for landing in memory.landings:
        landing.payload = landing.headers and landing.write in payloads


def _land_payload(write: Write) -> None:
    if not write.alive:
        return
    content = write.source.slots[write.sources] if write.content is None else write.content
    cached = header_fields(write.headers)["ordinal"] < write.stamp.shared
    if cached.any():
        content = content.copy()
        same = cached[:, None] & (content[:, :, 3] == write.stamp.tenant)
        content[:, :, 2][same] = write.stamp.request
    whole = len(write.targets) - write.halves
    write.target.slots[write.targets[:whole]] = content[:whole]
    for row in range(whole, len(write.targets)):
        half = LAYOUT.page_size // 2
        write.target.slots[write.targets[row], :half] = content[row, :half]


def _land_headers(write: Write) -> None:
    if write.alive:
        kept = len(write.targets) - write.headers_lost
        write.target.words[write.targets[:kept]] = write.headers[:kept]


def header_fields(headers: NDArray[np.uint64]) -> NDArray[np.void]:
    """The headers [n, 8] of a write as records, a view: changing a field changes the header."""
    return headers.reshape(-1).view(HEADER)
