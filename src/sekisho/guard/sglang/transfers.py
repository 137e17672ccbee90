"""Prefill's transfers: which are under way, for which lease, and the headers that go with them.

    scheduler      put ─ snapshot of the source headers, source pages pinned, counted
    worker thread          get ─ payload and headers in one batch ─ next get: done, uncounted
    DRAIN                     |- no new write for this lease; DRAINED when none is counted -|

The headers of a chunk are copied into memory of the worker's own and join the batch that carries
its pages, last: two requests that share a source page never share a row.
"""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sekisho.core.errors import check
from sekisho.core.lease import Lease
from sekisho.core.ledger import Pages
from sekisho.core.memory import WORDS, Words
from sekisho.core.page import HEADER_SIZE
from sekisho.guard.keeper import Keeper
from sekisho.guard.sglang.wire import Drain, Drained, Registration

log = logging.getLogger("sekisho.guard")
_REMEMBERED = 1 << 16


@dataclass(eq=False)
class Note:
    """What the guard knows of one chunk: the headers of its source pages, and their pin."""

    room: int
    words: Words
    pin: int


class Transfers:
    """Of one prefill rank. ``send`` sends frames to a host and port.

    Everything may be called from any thread but `snapshot` and `settle_done`.
    """

    def __init__(self, keeper: Keeper, send: Callable[[str, int, list[bytes]], None]) -> None:
        self._keeper = keeper
        self._send = send
        self._lock = threading.Lock()
        self._under_way: dict[int, int] = defaultdict(int)
        self._waiting: dict[int, Drain] = {}
        self._leases: dict[int, dict[str, Lease]] = {}
        self._cancelled: dict[Lease, bool] = {}  # and whether it had been granted here
        self._done: deque[int] = deque()
        self.peers: dict[str, Registration] = {}
        self.here = _Here()

    # -- the scheduler

    def snapshot(self, room: int, pages: Pages) -> Note:
        """A chunk is about to be queued: pin its source pages, keep what their headers say."""
        pin = self._keeper.ledger.pin(pages)
        return Note(room, self._keeper.headers.gather(pages), pin)

    def settle_done(self) -> Pages:
        """Unpin the sources of finished chunks; returns pages that became free."""
        freed = [np.zeros(0, np.intp)]
        while self._done:
            freed.append(self._keeper.ledger.settle(self._done.popleft()))
        return np.concatenate(freed)

    # -- the queue

    def queued(self, note: Note) -> None:
        with self._lock:
            self._under_way[note.room] += 1

    def finished(self, note: Note) -> None:
        """The worker has come back for its next chunk: nothing of this one is in flight."""
        self._done.append(note.pin)
        with self._lock:
            self._under_way[note.room] -= 1
            if self._under_way[note.room] > 0:
                return
            del self._under_way[note.room]
            drain = self._waiting.pop(note.room, None)
            known = drain is not None and self._cancelled.get(drain.lease, False)
        if drain is not None:
            self._drained(drain, known)

    # -- what decode says

    def granted(self, room: int, session: str, lease: Lease) -> None:
        with self._lock:
            self._leases.setdefault(room, {})[session] = lease
            while len(self._leases) > _REMEMBERED:
                del self._leases[next(iter(self._leases))]

    def drain(self, drain: Drain) -> bool:
        """Write no more under this lease, and answer when nothing is in flight. Says whether the
        room is still that lease's, so that SGLang must be told that it failed."""
        with self._lock:
            granted = self._leases.get(drain.room, {})
            own = drain.lease in granted.values()
            known = own or self._cancelled.get(drain.lease, False)
            self._cancelled[drain.lease] = known
            while len(self._cancelled) > _REMEMBERED:
                del self._cancelled[next(iter(self._cancelled))]
            busy = self._under_way.get(drain.room, 0) > 0
            if busy:
                self._waiting[drain.room] = drain
            # Gone, and not only cancelled: what is cancelled is forgotten after a while.
            for session in [s for s, lease in granted.items() if lease == drain.lease]:
                del granted[session]
        if not busy:
            self._drained(drain, known)
        return own

    def lease(self, room: int, session: str) -> Lease | None:
        """The lease to write under, None where there is none or it was cancelled."""
        with self._lock:
            lease = self._leases.get(room, {}).get(session)
            return None if lease in self._cancelled else lease

    def _drained(self, drain: Drain, known: bool) -> None:
        answer = Drained(drain.room, drain.lease, drain.rank, known)
        try:
            self._send(drain.host, drain.port, answer.frames())
        except Exception:  # decode asks again; a transfer thread must not end for it
            log.exception("sekisho: answering a decode server about room %s failed", drain.room)

    # -- the worker threads

    def headers_for(
        self, manager: Any, note: Note, lease: Lease, peer: Registration, destination: Pages
    ) -> list[tuple[int, int, int]]:
        """Blocks (source, destination, bytes) that carry the headers of ``destination``'s pages."""
        count = len(destination)
        check(count <= len(note.words), "more pages to fill than pages that are sent")
        if not count:
            return []
        rows = self.here.rows(manager, self._keeper.ledger.page_count)
        rows[:count] = note.words[:count]
        rows[:count, 1], rows[:count, 2] = lease
        source = rows.ctypes.data
        ends = np.flatnonzero(np.diff(destination) != 1) + 1
        blocks = []
        for part in np.split(np.arange(count), ends):
            start, size = int(part[0]), len(part) * HEADER_SIZE
            address = peer.address + int(destination[start]) * HEADER_SIZE
            blocks.append((source + start * HEADER_SIZE, address, size))
        return blocks


@dataclass
class _Here(threading.local):
    """Of one worker thread: its chunk, the headers that must join its batch, their memory."""

    note: Note | None = None
    chunk: Any = None
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    memory: Words | None = None

    def rows(self, manager: Any, count: int) -> Words:
        if self.memory is None:
            self.memory = np.zeros((count, WORDS), np.uint64)
            address, size = self.memory.ctypes.data, self.memory.nbytes
            manager.engine.batch_register([address], [size])
        return self.memory
