"""Ownership: no slot is read that was not written for this request.

Knows who wrote each slot from the slots themselves (`sim.model`), never from a header or a table.

Not verified: that the right request wrote the right *text* (`interference` does); slots that the
stand-in model never reads; a wrong slot that the same request wrote at another place.
"""

import numpy as np

from sekisho.core.table import BlockTable
from sekisho.engine.output import Delta, Ended
from sekisho.sim.checkers import FoundError
from sekisho.sim.model import PAGE_SIZE, Slots, Writer


class Ownership:
    """Two moments: when a hand-off is committed, and when a token leaves its node."""

    name = "ownership"

    def __init__(self) -> None:
        self._wrong: dict[int, str] = {}

    def read(self, node: str, request: int, pages: list[int]) -> None:
        """A row of ``request`` read slots of ``pages`` that were not written for it. That is no
        finding yet: the step's token may still be dropped."""
        self._wrong[request] = f"read page(s) {pages[:8]} of {node}, written for another"

    def left(self, output: Delta | Ended) -> None:
        """An output of the step just done leaves the node."""
        if isinstance(output, Delta) and output.request in self._wrong:
            text = self._wrong[output.request]
            raise FoundError(
                self.name, f"request {output.request} {text}, and its token was released"
            )

    def step_done(self) -> None:
        """What was read wrongly was dropped."""
        self._wrong.clear()

    def committed(self, node: str, table: BlockTable, owner: Writer, slots: Slots) -> None:
        """A request starts to decode over ``table``."""
        read = slots[table.pages].reshape(-1, 4)[: table.length]
        wrong = read[:, 2] != owner.request
        own = table.shared * PAGE_SIZE
        wrong[:own] = read[:own, 3] != owner.tenant
        if wrong.any():
            at = np.unique(np.flatnonzero(wrong) // PAGE_SIZE)
            pages = table.pages[at].tolist()
            raise FoundError(
                self.name,
                f"request {table.request} was committed on {node} over page(s) {pages[:8]}, "
                "not written for it",
            )
