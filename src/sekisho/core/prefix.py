"""Prefix reuse within a scope: sealed pages by the digest of the text they end.

A key is the chained token digest, whose root frames scope and model (`page.chain_root`): minted
here from what the server knows, never taken from a client. The pool checks the scope once more
when a page is handed out.

    pool holders of a cached page   | writer's request |
                                       | cache ----------------- evicted
                                            | reader 1 |   | reader 2 |
"""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from sekisho.core.ledger import Pages
from sekisho.core.pool import Pool


class PrefixCache:
    """Keeps pages of ended requests until the pool needs them.

    Eviction takes the least recently used page that nobody else holds; a page that a request
    references is never touched.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        # digest -> (page, serial); oldest first, and of one text the deepest page first
        self._entries: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, digests: list[bytes]) -> int:
        """How many of a request's leading full pages are cached."""
        count = 0
        for digest in digests:
            if digest not in self._entries:
                break
            count += 1
        return count

    def acquire(self, digests: list[bytes], scope: str) -> tuple[Pages, NDArray[np.uint64]]:
        """Hold the pages of ``digests`` (all cached) for a request of ``scope``.

        Returns:
            page indices intp [n] and the lease serials u64 [n] their headers carry; the caller
            drops them like its own.

        Raises:
            LocalOwnershipError: a page is of another scope; nothing is held.
        """
        found = [self._entries[digest] for digest in digests]
        pages = np.array([page for page, _ in found], np.intp)
        serials = np.array([serial for _, serial in found], np.uint64)
        self._pool.hold(pages, serials, scope)
        self._touch(digests)
        return pages, serials

    def publish(
        self, digests: list[bytes], pages: Pages, serials: NDArray[np.uint64], scope: str
    ) -> None:
        """Offer SEALED pages of ``scope`` for reuse; texts that are cached already are kept."""
        new = [i for i, digest in enumerate(digests) if digest not in self._entries]
        self._pool.hold(pages[new], serials[new], scope)
        for i in new:
            self._entries[digests[i]] = (int(pages[i]), int(serials[i]))
        self._touch(digests)

    def evict(self, count: int) -> Pages:
        """Give up to ``count`` unreferenced pages back to the pool; returns those now FREE."""
        chosen: list[bytes] = []
        for digest, (page, _) in self._entries.items():
            if len(chosen) == count:
                break
            if self._pool.holders_of(page) == 1 and self._pool.pins_of(page) == 0:
                chosen.append(digest)
        found = [self._entries.pop(digest) for digest in chosen]
        return self._pool.drop(
            np.array([page for page, _ in found], np.intp),
            np.array([serial for _, serial in found], np.uint64),
        )

    def forget(self, pages: Pages) -> None:
        """Stop offering ``pages``, because what they hold is not to be believed any more."""
        for digest, (page, serial) in list(self._entries.items()):
            if page in pages:
                del self._entries[digest]
                self._pool.drop(np.array([page], np.intp), np.array([serial], np.uint64))

    def _touch(self, digests: list[bytes]) -> None:
        for digest in reversed(digests):
            self._entries.move_to_end(digest)
