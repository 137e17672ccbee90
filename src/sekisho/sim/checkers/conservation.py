"""Conservation and reuse: pages add up, none is granted while somebody may still touch it, and no
lease is ever used twice.

Keeps its own books of holders from the grants and releases it is told of, and knows from the
simulated transport which writes are under way.

Not verified: that the pool's inner arrays agree (`Pool.check_integrity` does, in tests and on idle
nodes); pages that only the prefix cache holds, except that they are all accounted for at the end.
"""

from collections.abc import Sequence

from sekisho.core.lease import Lease
from sekisho.core.pool import Pool
from sekisho.core.table import BlockTable
from sekisho.sim.checkers import FoundError
from sekisho.sim.clock import Clock
from sekisho.sim.transport import Memory, Write


class Conservation:
    """One for all nodes of a run."""

    name = "conservation"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[tuple[str, int], Lease] = {}
        self._leases: dict[Lease, tuple[str, int]] = {}
        self.disproved: set[Lease] = set()
        """Leases whose writer claimed what was not there: it is not believed to have ended."""
        self.late: dict[tuple[str, int], Write] = {}
        """Pages that a write will still reach although it was reported as done."""

    def granted(self, memory: Memory, table: BlockTable, pages: Sequence[int]) -> None:
        """``pages`` of a node were taken from its free ones."""
        owner = memory.name, table.request
        if self._leases.setdefault(table.lease, owner) != owner:
            raise FoundError(self.name, f"lease {table.lease} was used before, by {owner}")
        for page in pages:
            key = memory.name, page
            if memory.open_writes[page] > 0:
                raise FoundError(
                    self.name, f"page {page} of {memory.name} was granted under an open write"
                )
            if memory.open_reads[page] > 0:
                raise FoundError(
                    self.name, f"page {page} of {memory.name} was granted while it is sent from"
                )
            if self._caught_writing(key):
                raise FoundError(
                    self.name,
                    f"page {page} of {memory.name} was granted again; its writer was caught lying "
                    "and still writes",
                )
            if key in self._held:
                raise FoundError(
                    self.name, f"page {page} of {memory.name} is held under {self._held[key]}"
                )
            self._held[key] = table.lease

    def _caught_writing(self, key: tuple[str, int]) -> bool:
        late = self.late.get(key)
        if late is None or late.lease not in self.disproved:
            return False
        return late.alive and late.header_at > self._clock.now

    def released(self, memory: Memory, table: BlockTable) -> None:
        for page in table.pages[table.shared :].tolist():
            self._held.pop((memory.name, page), None)

    def gone(self, memory: Memory) -> None:
        """The node is dead, and its pool with it."""
        for key in [key for key in self._held if key[0] == memory.name]:
            del self._held[key]
        for key in [key for key in self.late if key[0] == memory.name]:
            del self.late[key]

    def step_done(self, memory: Memory, pool: Pool) -> None:
        counts = pool.counts()
        if sum(counts.values()) != memory.page_count or min(counts.values()) < 0:
            raise FoundError(self.name, f"{memory.name}: {counts} is not {memory.page_count} pages")

    def settled(self, memory: Memory, pool: Pool, cached: int) -> None:
        """Nothing is under way any more: each page is free, or the prefix cache's."""
        counts = pool.counts()
        expected = {"free": memory.page_count - cached, "sealed": cached}
        found = {name: count for name, count in counts.items() if count or name in expected}
        if found != expected:
            raise FoundError(self.name, f"{memory.name} ended with {found}, expected {expected}")
