"""What a node does with its pages, told to the checkers as it happens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sekisho.core.ledger import Pages
from sekisho.core.memory import PageMemory
from sekisho.core.table import BlockTable
from sekisho.engine.pages import PageManager, Text
from sekisho.engine.policy import Policy
from sekisho.sim.model import NOBODY, Writer

if TYPE_CHECKING:
    from sekisho.sim.process import Host, Process


class WatchedPages(PageManager):
    """The production page manager; every grant and release is told to ``host``, as
    ``process``'s."""

    def __init__(
        self, memory: PageMemory, policy: Policy, host: "Host", process: "Process"
    ) -> None:
        super().__init__(memory, process.pool, policy)
        self._host = host
        self._process = process
        self._owners: dict[int, Writer] = {}
        self.of_request: dict[int, Writer] = {}
        """The latest table of each request."""
        self._present = [NOBODY] * process.pool.page_count

    def writer_of(self, page: int) -> Writer:
        """The request that took this page last."""
        return self._present[page]

    @property
    def cached(self) -> int:
        """Pages that the prefix cache holds."""
        return len(self._cache)

    def text(self, scope: str, tokens: Sequence[int]) -> Text:
        return super().text(self._host.key_scope(self._process, scope), tokens)

    def seal_full(self, table: BlockTable) -> None:
        self._host.sealing(self._process, table)
        super().seal_full(table)

    def reserve(self, request: int, scope: str, text: Text, remote: bool) -> BlockTable | None:
        table = super().reserve(request, scope, text, remote)
        if table is not None:
            owner = Writer(request, self._host.tenants.get(scope, 0), table.shared)
            self._owners[table.lease.serial] = self.of_request[request] = owner
            self._grant(table, table.pages[table.shared :])
        return table

    def grow(self, table: BlockTable) -> bool:
        grown = super().grow(table)
        if grown:
            self._grant(table, table.pages[-1:])
        return grown

    def release(self, table: BlockTable) -> None:
        super().release(table)
        self._host.released(self._process, table)
        del self._owners[table.lease.serial]

    def _grant(self, table: BlockTable, pages: Pages) -> None:
        taken, owner = pages.tolist(), self._owners[table.lease.serial]
        for page in taken:
            self._present[page] = owner
        self._host.granted(self._process, table, taken)
