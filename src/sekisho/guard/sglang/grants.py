"""What prefill may still write into this decode server, and how the guard learns that it ended.

    grant opened    `send_metadata`
    settled         a whole commit · DRAINED from every prefill rank · its process is gone
    meanwhile       pages and metadata slot stay pinned; time alone never frees them

A request that ends before its grant is settled is *abandoned*: a thread asks its prefill ranks to
drain, again and again, and looks whether they still exist. Asking again is all that time does.
"""

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sekisho.core.errors import check
from sekisho.core.lease import Lease
from sekisho.guard.keeper import Holding, Keeper
from sekisho.guard.sglang.wire import Drain, Drained
from sekisho.guard.sockets import gone, unread

log = logging.getLogger("sekisho.guard")

ASK_EVERY_S = 0.5


@dataclass(eq=False)
class Grant:
    """``pin`` is of the ledger; ``ranks``: SGLang's addresses of the prefill ranks that may
    write; ``over``: the places in it of those that have drained, or are gone."""

    room: int
    holding: Holding
    pin: int
    slot: int | None
    ranks: list[dict[str, Any]]
    manager: Any
    abandoned: bool = False
    slot_waits: Any = None
    asked: int = 0
    over: set[int] = field(default_factory=set)

    @property
    def lease(self) -> Lease:
        return self.holding.lease


class Grants:
    """The open grants of one decode rank. ``put_back`` gets pages that became free.

    All but `heard` and the thread run in the scheduler.
    """

    def __init__(self, keeper: Keeper, put_back: Any) -> None:
        self._keeper = keeper
        self._put_back = put_back
        self._by_room: dict[int, Grant] = {}
        self._slots: dict[int | None, Grant] = {}
        self._ended: deque[Grant] = deque()
        self._lock = threading.Lock()
        threading.Thread(target=self._ask, name="sekisho-drain", daemon=True).start()

    def open(self, receiver: Any, holding: Holding, slot: int | None) -> None:
        """Prefill is about to be told of the pages that ``holding`` expects to be filled.

        Raises:
            LocalOwnershipError: an open grant has this room; one's commit would end the other's.
        """
        ranks = list(receiver.bootstrap_infos or ())
        room = receiver.bootstrap_room
        check(room not in self._by_room, f"bootstrap_room {room} is in use")
        pin = self._keeper.ledger.pin(holding.table.pages)
        grant = Grant(room, holding, pin, slot, ranks, receiver.kv_mgr)
        with self._lock:
            self._by_room[room] = grant
        if slot is not None:
            self._slots[slot] = grant

    def lease_of(self, room: int) -> Lease | None:
        """The lease under which ``room`` may be written (any thread)."""
        grant = self._by_room.get(room)
        return None if grant is None else grant.lease

    def settle(self, room: int) -> None:
        """Everything granted for ``room`` was written, and found whole."""
        grant = self._by_room.get(room)
        if grant is not None:
            self._end(grant)

    def abandon(self, holding: Holding) -> None:
        """The request has ended; if its writer has not, it is asked to."""
        for grant in list(self._by_room.values()):
            if grant.holding is holding:
                grant.abandoned = True

    def holds_slot(self, slots: Any, slot: int) -> bool:
        """Whether a metadata slot that is given back must wait; it is given back later then."""
        grant = self._slots.get(slot)
        if grant is None:
            return False
        grant.slot_waits = slots
        return True

    def tick(self) -> None:
        """Settle what has been found to be over."""
        while self._ended:
            self._end(self._ended.popleft())

    def heard(self, answer: Drained) -> None:
        """A prefill rank says that nothing is in flight (SGLang's receiving thread).

        One that was never granted the lease has taken the place of one that is gone, like `gone`.
        """
        if not answer.known and unread():
            return  # it is asked again
        with self._lock:
            grant = self._by_room.get(answer.room)
            if grant is None or grant.lease != answer.lease:
                return
            self._over(grant, answer.rank)

    def open_count(self) -> int:
        return len(self._by_room)

    def _end(self, grant: Grant) -> None:
        with self._lock:
            if self._by_room.get(grant.room) is not grant:
                return
            del self._by_room[grant.room]
        self._put_back(self._keeper.ledger.settle(grant.pin))
        if self._slots.get(grant.slot) is grant:
            del self._slots[grant.slot]
            if grant.slot_waits is not None:
                grant.slot_waits.free(grant.slot)

    # -- the thread

    def _ask(self) -> None:
        while True:
            threading.Event().wait(ASK_EVERY_S)
            with self._lock:
                open_now = [g for g in self._by_room.values() if g.abandoned]
            # One that is gone now was gone for every grant of this round: a dead host that takes a
            # second to say nothing holds up the others once.
            is_gone = functools.cache(gone)
            for grant in open_now:
                try:
                    self._ask_one(grant, is_gone)
                except Exception:
                    log.exception("sekisho: asking prefill to drain room %s failed", grant.room)

    def _ask_one(self, grant: Grant, is_gone: Callable[[str, int], bool]) -> None:
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        grant.asked += 1
        manager = grant.manager
        back = manager.local_ip, int(manager.rank_port)
        for rank, info in enumerate(grant.ranks):
            host, port = info["rank_ip"], int(info["rank_port"])
            if rank in grant.over:
                continue
            if grant.asked > 1 and is_gone(host, port):
                log.warning("sekisho: prefill rank %s:%s is gone; its grant is over", host, port)
                with self._lock:
                    self._over(grant, rank)
                continue
            with contextlib.suppress(Exception):
                sock, lock = CommonKVReceiver._connect_to_bootstrap_server(info)
                with lock:
                    sock.send_multipart(Drain(grant.room, grant.lease, *back, rank).frames())

    def _over(self, grant: Grant, rank: int) -> None:
        """Under the lock: ``rank`` writes no more; the last one ends the grant."""
        grant.over.add(rank)
        if grant.over >= set(range(len(grant.ranks))):
            self._ended.append(grant)
