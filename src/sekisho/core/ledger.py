"""The ledger: which page is whose, and when it may be used again.

A page has *holders* (block tables and the prefix cache) and *pins* (reads and writes of other
processes that have not reached a terminal state). Its life, drawn as intervals:

    holders   |--- request ---|                      |- next request …
                     |--- prefix cache ---|
    pins        |---------- remote write ------|
    state     | LEASED | SEALED           | Q  | FREE | LEASED …

* only a SEALED page may get a second holder, and only one of the same scope;
* the last holder gone, pins left: QUARANTINED; the last pin gone: FREE;
* there is no other way to FREE, and no clock anywhere: time never frees a page.

Per page the ledger keeps 33 bytes in NumPy arrays, so that a request of 65,536 pages is granted,
checked and dropped in a few vectorised passes.
"""

import enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sekisho.core.errors import check
from sekisho.core.lease import Lease, LeaseMint

Pages: TypeAlias = NDArray[np.intp]


class State(enum.IntEnum):
    FREE = 0
    LEASED = 1
    SEALED = 2
    QUARANTINED = 3


class PageEvent(enum.Enum):
    GRANT = "grant"
    SEAL = "seal"
    LAST_HOLDER_GONE = "last holder gone"
    LAST_HOLDER_GONE_PINNED = "last holder gone, pinned"
    LAST_PIN_GONE = "last pin gone"


# The whole life of a page. What is not here is illegal.
PAGE_TRANSITIONS: dict[PageEvent, dict[State, State]] = {
    PageEvent.GRANT: {State.FREE: State.LEASED},
    PageEvent.SEAL: {State.LEASED: State.SEALED},
    PageEvent.LAST_HOLDER_GONE: {State.LEASED: State.FREE, State.SEALED: State.FREE},
    PageEvent.LAST_HOLDER_GONE_PINNED: {
        State.LEASED: State.QUARANTINED,
        State.SEALED: State.QUARANTINED,
    },
    PageEvent.LAST_PIN_GONE: {State.QUARANTINED: State.FREE},
}

_ILLEGAL = 255
_NEXT = {
    event: np.array([row.get(state, _ILLEGAL) for state in State], np.uint8)
    for event, row in PAGE_TRANSITIONS.items()
}


class Ledger:
    """Who holds which of ``page_count`` pages. Every refused call raises and changes nothing.

    Which FREE pages a lease gets is the caller's choice: inside another engine, that engine's
    allocator; in our own nodes, `Pool`.

    Args:
        page_count: 1 to 2**31-1.
        incarnation: u64 above 0, drawn anew by the caller for every pool.

    Raises:
        LocalOwnershipError: from every method, on a call that the rules above forbid.
    """

    def __init__(self, page_count: int, incarnation: int) -> None:
        check(0 < page_count < 2**31, f"page_count {page_count} is not in 1..2**31-1")
        self.page_count = page_count
        self._mint = LeaseMint(incarnation)
        self._state = np.zeros(page_count, np.uint8)
        self._serial = np.zeros(page_count, np.uint64)
        self._scope = np.zeros(page_count, np.int32)
        self._holders = np.zeros(page_count, np.int32)
        self._pins = np.zeros(page_count, np.int32)
        self._mark = np.zeros(page_count, np.int32)
        self._order = np.arange(page_count, dtype=np.int32)
        self._counts = [page_count, 0, 0, 0]
        self._scopes: dict[str, int] = {}
        self._lease_scope: dict[int, int] = {}
        self._grants: dict[int, Pages] = {}
        self._grant_last = 0

    # -- queries

    @property
    def incarnation(self) -> int:
        return self._mint.incarnation

    @property
    def free_count(self) -> int:
        return self._counts[State.FREE]

    def counts(self) -> dict[str, int]:
        """Pages by state; the values always add up to ``page_count``."""
        return {state.name.lower(): self._counts[state] for state in State}

    def ledger_bytes(self) -> int:
        """Bytes of the per-page arrays."""
        arrays = (self._state, self._serial, self._scope, self._holders, self._pins)
        scratch = (self._mark, self._order)
        return sum(array.nbytes for array in (*arrays, *scratch))

    def state_of(self, page: int) -> State:
        return State(int(self._state[page]))

    def states_of(self, pages: Pages) -> NDArray[np.uint8]:
        """`State` of each page, as numbers."""
        return self._state[pages]

    def pages_in(self, state: State) -> Pages:
        """All pages in ``state``, ascending."""
        return np.flatnonzero(self._state == state)

    def holders_of(self, page: int) -> int:
        return int(self._holders[page])

    def pins_of(self, page: int) -> int:
        return int(self._pins[page])

    def serials_of(self, pages: Pages) -> NDArray[np.uint64]:
        """The lease serial each page was last granted under, 0 where never."""
        return self._serial[pages]

    # -- leases and pages

    def open_lease(self, scope: str) -> Lease:
        """A new lease of ``scope`` for one request; `close_lease` when the request has ended."""
        check(scope != "", "scope is empty")
        lease = self._mint.next()
        self._lease_scope[lease.serial] = self._scopes.setdefault(scope, len(self._scopes) + 1)
        return lease

    def close_lease(self, lease: Lease) -> None:
        """No page is ever granted under ``lease`` again."""
        self._check_open(lease)
        del self._lease_scope[lease.serial]

    def claim(self, lease: Lease, pages: Pages) -> None:
        """These FREE pages become LEASED to ``lease``, each with one holder."""
        self._check_open(lease)
        self._check_pages(pages)
        self._give(lease, pages)

    def _give(self, lease: Lease, pages: Pages) -> None:
        self._move(pages, PageEvent.GRANT)
        self._serial[pages] = lease.serial
        self._scope[pages] = self._lease_scope[lease.serial]
        self._holders[pages] = 1

    def seal(self, pages: Pages, lease: Lease) -> None:
        """Pages of ``lease`` are full: nobody writes them again, and they may be shared."""
        self._check_pages(pages)
        check(bool((self._serial[pages] == lease.serial).all()), "a page is not of this lease")
        check(bool((self._pins[pages] == 0).all()), "a page with a writer cannot be sealed")
        self._move(pages, PageEvent.SEAL)

    def hold(self, pages: Pages, serials: NDArray[np.uint64], scope: str) -> None:
        """One more holder for SEALED pages of the same scope, still under the same leases."""
        holders = self._check_held(pages, serials)
        check(bool((self._state[pages] == State.SEALED).all()), "only sealed pages are shared")
        same = self._scope[pages] == self._scopes.get(scope, 0)
        check(bool(same.all()), "a page belongs to another scope")
        self._holders[pages] = holders + 1

    def drop(self, pages: Pages, serials: NDArray[np.uint64]) -> Pages:
        """One holder less; returns the pages that became FREE by it.

        The serials make the drop of a page that has a new owner an error instead of a double free.
        """
        left = self._check_held(pages, serials) - 1
        self._holders[pages] = left
        gone = pages[left == 0]
        pinned = self._pins.take(gone) > 0
        if pinned.any():
            self._move(gone[pinned], PageEvent.LAST_HOLDER_GONE_PINNED)
            gone = gone[~pinned]
        return self._free(gone, PageEvent.LAST_HOLDER_GONE)

    # -- reads and writes of other processes

    def pin(self, pages: Pages) -> int:
        """Another process may read or write these held pages until `settle` of the result."""
        self._check_pages(pages)
        check(bool((self._holders[pages] > 0).all()), "only held pages are pinned")
        self._pins[pages] += 1
        self._grant_last += 1
        self._grants[self._grant_last] = pages.copy()
        return self._grant_last

    def settle(self, grant: int) -> Pages:
        """That process has provably ended with these pages; returns those that became FREE."""
        check(grant in self._grants, f"grant {grant} is not open")
        pages = self._grants.pop(grant)
        self._pins[pages] -= 1
        done = (self._pins[pages] == 0) & (self._state[pages] == State.QUARANTINED)
        return self._free(pages[done], PageEvent.LAST_PIN_GONE)

    # -- conservation

    def check_integrity(self) -> None:
        """Recount everything; raise `LocalOwnershipError` naming the law that is broken."""
        counted = np.bincount(self._state, minlength=len(State)).tolist()
        check(counted == self._counts, f"counts {self._counts} are not the pages' {counted}")
        held, pinned = self._holders > 0, self._pins > 0
        live = (self._state == State.LEASED) | (self._state == State.SEALED)
        check(np.array_equal(live, held), "held pages are not the leased and sealed ones")
        quarantined = self._state == State.QUARANTINED
        check(np.array_equal(quarantined, ~held & pinned), "quarantine is not: pinned, not held")
        pins = np.zeros(self.page_count, np.int32)
        for pages in self._grants.values():
            pins[pages] += 1
        check(np.array_equal(pins, self._pins), "pins are not the open grants")

    # -- private

    def _check_open(self, lease: Lease) -> None:
        known = lease.incarnation == self.incarnation and lease.serial in self._lease_scope
        check(known, f"lease {lease} is not open in this pool")

    def _check_pages(self, pages: Pages) -> None:
        inside = pages.size == 0 or (int(pages.min()) >= 0 and int(pages.max()) < self.page_count)
        check(inside, "page index out of range")
        order = self._order[: pages.size]
        self._mark[pages] = order
        check(bool((self._mark.take(pages) == order).all()), "a page is named twice")

    def _check_held(self, pages: Pages, serials: NDArray[np.uint64]) -> NDArray[np.int32]:
        """The number of holders of each page, all above 0."""
        self._check_pages(pages)
        check(len(serials) == len(pages), "one serial a page")
        same = self._serial.take(pages) == serials
        check(bool(same.all()), "a page is now of another lease")
        holders = self._holders.take(pages)
        check(bool((holders > 0).all()), "a page has no holder")
        return holders

    def _move(self, pages: Pages, event: PageEvent) -> None:
        before = self._state.take(pages)
        after = _NEXT[event].take(before)
        check(bool((after != _ILLEGAL).all()), f"illegal for a page here: {event.value}")
        self._state[pages] = after
        gained = np.bincount(after, minlength=4) - np.bincount(before, minlength=4)
        self._counts = [old + int(more) for old, more in zip(self._counts, gained, strict=True)]

    def _free(self, pages: Pages, event: PageEvent) -> Pages:
        self._move(pages, event)
        return pages
