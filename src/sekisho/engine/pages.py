"""Pages of requests: reserve, grow, prove, release. The only user of pool and prefix cache."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sekisho.core.errors import Evidence
from sekisho.core.ledger import Pages
from sekisho.core.memory import PageMemory
from sekisho.core.page import chain, chain_root
from sekisho.core.pool import Pool
from sekisho.core.prefix import PrefixCache
from sekisho.core.table import BlockTable, verify
from sekisho.engine.policy import Policy

_NOTHING: Pages = np.zeros(0, np.intp)
_NO_PREFIX = _NOTHING, np.zeros(0, np.uint64)


class Text(NamedTuple):
    """Tokens that need pages, and their digests: hashed once, however long they wait for room.
    ``spare`` pages must be left free for what follows them."""

    tokens: Sequence[int]
    root: bytes
    digests: list[bytes]
    spare: int = 0


class PageManager:
    """One node's pool, its memory and its prefix cache, under one policy.

    A request's own pages, as intervals:

        reserve/grow            seal_full                 release
        | LEASED, being filled  | SEALED, published -------------- cache -> evict
                                | last page, partly filled | FREE (or quarantined while pinned)
    """

    def __init__(self, memory: PageMemory, pool: Pool, policy: Policy) -> None:
        self.layout = memory.layout
        self.memory = memory
        self.pool = pool
        self.policy = policy
        self._cache = PrefixCache(pool)
        self._scopes: dict[int, str] = {}
        self.condemned = False
        """Some pages will never be granted again: the pool should be replaced."""
        self._suspect: set[int] = set()

    @property
    def tokens_max(self) -> int:
        """Tokens that one request can hold when it has the whole pool."""
        return self.pool.page_count * self.layout.page_size

    def text(self, scope: str, tokens: Sequence[int]) -> Text:
        """``tokens`` as `reserve` wants them, for requests of ``scope`` alone."""
        root = chain_root(scope, self.layout.model)
        return Text(tokens, root, chain(root, tokens, self.layout.page_size))

    def reserve(self, request: int, scope: str, text: Text, remote: bool) -> BlockTable | None:
        """Pages for ``text``, the cached prefix first; None while the pool is too full.

        ``remote``: another process fills the rest (the table expects them complete); otherwise
        this one does (the table starts after the prefix and grows by `BlockTable.append`).
        """
        size = self.layout.page_size
        tokens, root, digests, spare = text
        full = digests[: len(tokens) // size]
        matched = full[: self._cache.match(full)] if self.policy.reuse else []
        prefix, serials = self._cache.acquire(matched, scope) if matched else _NO_PREFIX
        need = len(digests) - len(matched)
        if not self._make_room(need + spare):
            if matched:
                self._scrub(self.pool.drop(prefix, serials))
            return None
        lease = self.pool.open_lease(scope)
        self._scopes[lease.serial] = scope
        table = BlockTable(self.layout, request, lease, root)
        if matched:
            table.adopt(prefix, serials, matched)
        own = self.pool.grant(lease, need) if need else _NOTHING
        if remote and need:
            self.memory.blank(own)
            tail = list(tokens[len(full) * size :])
            table.expect(own, len(tokens), tail, digests[len(matched) :])
        elif need:
            table.open(own, self.memory)
        return table

    def grow(self, table: BlockTable) -> bool:
        """One more page for ``table``, whose pages are full; False while the pool is too full."""
        if not self._make_room(1):
            return False
        table.open(self.pool.grant(table.lease, 1), self.memory)
        return True

    def verify(
        self, tables: Sequence[BlockTable], read: Sequence[Pages] | None = None
    ) -> dict[int, tuple[Evidence, ...]]:
        """Evidence by request, as `core.table.verify`; empty under isolation ``off``.

        A request whose row was given a wrong page has written its new slot there too, and no
        header shows that. So whoever holds a page that is evidence against another fails with it.
        """
        if not self.policy.checks:
            return {}
        found = verify(self.memory, tables, read)
        suspect = {item.page for evidence in found.values() for item in evidence}
        suspect |= self._suspect
        if suspect:
            for table in tables:
                reached = suspect.intersection(table.pages.tolist())
                if reached and table.request not in found:
                    found[table.request] = tuple(
                        Evidence("reached", table.request, page, str(table.lease), "another's row")
                        for page in sorted(reached)
                    )
        return found

    def prove(self, table: BlockTable) -> tuple[Evidence, ...]:
        """Check what a remote writer filled: headers, and by policy the payloads."""
        if not self.policy.checks:
            return ()
        if self.policy.payload_digests:
            table.expect_payloads(self.memory, table.shared)
        return self.verify([table]).get(table.request, ())

    def seal_full(self, table: BlockTable) -> None:
        """Full own pages that were just verified become immutable, and by policy reusable."""
        full = table.length // self.layout.page_size
        start, table.sealed = table.sealed, max(table.sealed, full)
        pages, serials = table.pages[start:full], table.serials[start:full]
        if not len(pages):
            return
        self.pool.seal(pages, table.lease)
        if self.policy.reuse:
            digests = [table.digest_at(ordinal) for ordinal in range(start, full)]
            self._cache.publish(digests, pages, serials, self._scopes[table.lease.serial])

    def release(self, table: BlockTable) -> None:
        """The request is done with all its pages; pinned ones stay until settled."""
        self._scrub(self.pool.drop(table.pages, table.serials))
        self.pool.close_lease(table.lease)
        del self._scopes[table.lease.serial]

    def settle(self, grant: int) -> None:
        """A remote reader or writer of pages has provably ended."""
        self._scrub(self.pool.settle(grant))

    def condemn(self, evidence: Sequence[Evidence]) -> None:
        """Somebody unknown writes these pages: pin them for the life of the pool, so that they
        end in quarantine and are never granted again; the node asks to be replaced. Call before
        `release`.

        A page that a wrong row pointed to may be free: nobody holds it, and it is written anew
        by whoever is granted it.
        """
        self.condemned = True
        named = sorted({item.page for item in evidence})
        pages = np.array([page for page in named if self.pool.holders_of(page)], np.intp)
        self._suspect.update(pages.tolist())
        self.pool.pin(pages)
        self._cache.forget(pages)

    def _make_room(self, count: int) -> bool:
        lacking = count - self.pool.free_count
        if lacking > 0:
            self._scrub(self._cache.evict(lacking))
        return self.pool.free_count >= count

    def _scrub(self, freed: Pages) -> None:
        if self.policy.scrub:
            self.memory.scrub(freed)
