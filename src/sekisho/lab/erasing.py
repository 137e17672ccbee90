"""Pages that are zeroed when they are granted: a defence of the lab, and one of the prices."""

from sekisho.core.ledger import Pages
from sekisho.core.memory import PageMemory
from sekisho.core.table import BlockTable
from sekisho.engine.pages import PageManager, Text


def zero(memory: PageMemory, pages: Pages) -> None:
    """Erase the payloads of ``pages``; their headers stay."""
    for page in pages.tolist():
        memory.payload(page)[:] = 0


class ErasingPages(PageManager):
    """The production page manager, which zeroes what it grants while ``erases``."""

    erases = True

    def reserve(self, request: int, scope: str, text: Text, remote: bool) -> BlockTable | None:
        table = super().reserve(request, scope, text, remote)
        if table is not None and self.erases:
            zero(self.memory, table.pages[table.shared :])
        return table

    def grow(self, table: BlockTable) -> bool:
        grown = super().grow(table)
        if grown and self.erases:
            zero(self.memory, table.pages[-1:])
        return grown
