"""A foreign write that lands in the middle of `BlockTable.append`: what it changed stays visible.

The comparison and the write of a header are two steps, between which another process's transport
may write. So the second must not touch what `append` does not change, whatever the first has seen.
"""

from typing import Any

import numpy as np
import pytest

from sekisho.core.lease import Lease
from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout, chain_root
from sekisho.core.table import BlockTable, verify

LAYOUT = PageLayout(16, 1, 1, 4, 2, "m")


class Raced(np.ndarray[Any, Any]):
    """A header in memory into which ``word`` is written as soon as it has been compared."""

    word = 0

    def tobytes(self, order: Any = "C") -> bytes:
        seen = super().tobytes(order)
        self[self.word] ^= np.uint64(1)
        return seen


@pytest.mark.parametrize("count", [1, 16], ids=["page stays open", "page becomes full"])
@pytest.mark.parametrize(
    ("word", "kind"),
    [(0, "layout"), (1, "foreign"), (2, "foreign"), (6, "corrupt"), (7, "corrupt")],
)
def test_what_lands_between_comparing_and_writing_is_not_covered_up(
    word: int, kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = PageMemory(np.zeros(LAYOUT.page_bytes, np.uint8), LAYOUT, 1)
    table = BlockTable(LAYOUT, 1, Lease(77, 5), chain_root("a", "m"))
    table.open(np.array([0], np.intp), memory)
    plain = memory.words
    monkeypatch.setattr(Raced, "word", word)
    memory.words = plain.view(Raced)
    table.append(list(range(count)), memory)
    memory.words = plain
    assert memory.words[0, word] != table.words[0, word]
    assert [item.kind for item in verify(memory, [table])[1]] == [kind]
