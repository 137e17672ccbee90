"""What a node does with its pages, told to the checkers as it happens."""

from collections.abc import Sequence
from typing import Protocol

from sekisho.core.memory import PageMemory
from sekisho.core.pool import Pages, Pool
from sekisho.core.table import BlockTable
from sekisho.engine.pages import PageManager, Text
from sekisho.engine.policy import Policy
from sekisho.sim.model import NOBODY, Writer


class Watch(Protocol):
    """Who listens to one node's pages."""

    def granted(self, table: BlockTable, scope: str, pages: Sequence[int]) -> None:
        """Pages were taken from the free ones for a request."""
        ...

    def released(self, table: BlockTable) -> None:
        """The request gave its pages back."""
        ...

    def sealing(self, table: BlockTable) -> None:
        """Full pages are about to become immutable, and on a prefill node to be sent."""
        ...

    def key_scope(self, scope: str) -> str:
        """The scope that a cache key is made with."""
        ...


class WatchedPages(PageManager):
    """The production page manager; every grant and release is told to ``watch``."""

    def __init__(
        self,
        memory: PageMemory,
        pool: Pool,
        policy: Policy,
        watch: Watch,
        tenants: dict[str, int],
    ) -> None:
        super().__init__(memory, pool, policy)
        self._watch = watch
        self._tenants = tenants
        self._owners: dict[int, Writer] = {}
        self.of_request: dict[int, Writer] = {}
        """The latest table of each request."""
        self._present = [NOBODY] * pool.page_count

    def writer_of(self, page: int) -> Writer:
        """The request that took this page last."""
        return self._present[page]

    @property
    def cached(self) -> int:
        """Pages that the prefix cache holds."""
        return len(self._cache)

    def text(self, scope: str, tokens: Sequence[int]) -> Text:
        return super().text(self._watch.key_scope(scope), tokens)

    def seal_full(self, table: BlockTable) -> None:
        self._watch.sealing(table)
        super().seal_full(table)

    def reserve(self, request: int, scope: str, text: Text, remote: bool) -> BlockTable | None:
        table = super().reserve(request, scope, text, remote)
        if table is not None:
            owner = Writer(request, self._tenants.get(scope, 0), table.shared)
            self._owners[table.lease.serial] = self.of_request[request] = owner
            self._grant(table, table.pages[table.shared :], scope)
        return table

    def grow(self, table: BlockTable) -> bool:
        grown = super().grow(table)
        if grown:
            self._grant(table, table.pages[-1:], self._scopes[table.lease.serial])
        return grown

    def release(self, table: BlockTable) -> None:
        super().release(table)
        self._watch.released(table)
        del self._owners[table.lease.serial]

    def _grant(self, table: BlockTable, pages: Pages, scope: str) -> None:
        taken, owner = pages.tolist(), self._owners[table.lease.serial]
        for page in taken:
            self._present[page] = owner
        self._watch.granted(table, scope, taken)
