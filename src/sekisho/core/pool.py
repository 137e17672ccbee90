"""The pool: a ledger that also chooses the pages, the one free longest first."""

import numpy as np

from sekisho.core.errors import check
from sekisho.core.lease import Lease
from sekisho.core.ledger import Ledger, PageEvent, Pages, State


class Pool(Ledger):
    """The ledger of ``page_count`` pages, and the ring of those that are FREE.

    Args, and errors: as of `Ledger`.
    """

    def __init__(self, page_count: int, incarnation: int) -> None:
        super().__init__(page_count, incarnation)
        # Oldest first: the page that has been free longest is reused first.
        self._ring = np.arange(page_count, dtype=np.int32)
        self._ring_start = 0

    def ledger_bytes(self) -> int:
        """Bytes of the per-page arrays."""
        return super().ledger_bytes() + self._ring.nbytes

    def grant(self, lease: Lease, count: int) -> Pages:
        """``count`` FREE pages become LEASED to ``lease``, each with one holder."""
        self._check_open(lease)
        check(count > 0, f"count {count} must be above 0")
        check(count <= self.free_count, f"{count} pages asked for, {self.free_count} free")
        pages = self._ring_view(count)
        self._ring_start = (self._ring_start + count) % self.page_count
        self._give(lease, pages)
        return pages

    def claim(self, lease: Lease, pages: Pages) -> None:
        """Never: a pool chooses its pages itself (`grant`)."""
        check(False, "a pool chooses its pages itself")

    def check_integrity(self) -> None:
        """Recount everything; raise `LocalOwnershipError` naming the law that is broken."""
        super().check_integrity()
        free = np.sort(self._ring_view(self.free_count))
        check(
            np.array_equal(free, np.flatnonzero(self._state == State.FREE)),
            "the free ring is not the set of free pages",
        )

    def _free(self, pages: Pages, event: PageEvent) -> Pages:
        start = (self._ring_start + self.free_count) % self.page_count
        head = min(pages.size, self.page_count - start)
        self._ring[start : start + head] = pages[:head]
        self._ring[: pages.size - head] = pages[head:]
        return super()._free(pages, event)

    def _ring_view(self, count: int) -> Pages:
        end = self._ring_start + count
        parts = self._ring[self._ring_start : end], self._ring[: max(0, end - self.page_count)]
        return np.concatenate(parts).astype(np.intp)
