"""All checkers of a run behind one door, with the names they need to judge by."""

from collections.abc import Sequence

from sekisho.core.errors import Evidence
from sekisho.core.lease import Lease
from sekisho.core.table import BlockTable
from sekisho.engine.output import Delta, Ended
from sekisho.node.decode import DecodeNode
from sekisho.node.prefill import PrefillNode
from sekisho.sim.checkers import FoundError
from sekisho.sim.checkers.conservation import Conservation
from sekisho.sim.checkers.interference import Interference
from sekisho.sim.checkers.liveness import Liveness
from sekisho.sim.checkers.ownership import Ownership
from sekisho.sim.checkers.truth import Truth
from sekisho.sim.clock import Clock
from sekisho.sim.model import PAGE_SIZE
from sekisho.sim.process import Process
from sekisho.sim.scenario import Scenario
from sekisho.sim.transport import Memory, Write


class Judges:
    """Passes on what happened; keeps what the table of faults shows."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self.ownership = Ownership()
        self.conservation = Conservation(clock)
        self.interference = Interference()
        self.liveness = Liveness()
        self.truth = Truth(healthy=not scenario.strikes and not scenario.events)
        self.halted = 0
        self.evidence_of: dict[int, str] = {}
        self._shape = scenario.shape
        self._requests: dict[Lease, int] = {}
        self._asked: dict[int, tuple[int, int]] = {}

    # -- names

    def request_of(self, lease: Lease) -> int | None:
        """The request that a node opened a lease for."""
        return self._requests.get(lease)

    def asked(self, request: int, prompt: int, count: int) -> None:
        """A request of so many tokens got its number."""
        self._asked[request] = prompt, count

    def servable(self, prompt: int, count: int) -> bool:
        """Every role can hold it."""
        return all(self._fits(role, prompt, count) for role in ("decode", "prefill"))

    def _fits(self, role: str, prompt: int, count: int) -> bool:
        """Decode must hold the whole, prefill the prompt but its last token."""
        if role == "decode":
            return prompt + count <= self._shape.decode_pages * PAGE_SIZE
        return prompt - 1 <= self._shape.prefill_pages * PAGE_SIZE

    # -- what happens on nodes

    def granted(self, process: Process, table: BlockTable, pages: Sequence[int]) -> None:
        self._requests[table.lease] = table.request
        self.conservation.granted(process.memory, table, pages)

    def released(self, process: Process, table: BlockTable) -> None:
        self.conservation.released(process.memory, table)

    def read(self, process: Process, request: int, pages: list[int]) -> None:
        self.ownership.read(process.name, request, pages)

    def committed(self, process: Process, table: BlockTable) -> None:
        owner = process.pages.writer_of(int(table.pages[-1]))
        self.ownership.committed(process.name, table, owner, process.memory.slots)

    def left(self, output: Delta | Ended) -> None:
        self.ownership.left(output)

    def step_done(self, process: Process) -> None:
        self.ownership.step_done()
        self.conservation.step_done(process.memory, process.pool)
        node, counts = process.node, process.node.counts()
        for request in waiting(node):
            fits = self._fits(process.role, *self._asked[request])
            self.truth.admitted(process.name, request, fits)
        self.truth.queued(process.name, counts["waiting"], self._queue_limit(process))

    def raised(self, process: Process, error: Exception, halts: bool) -> None:
        """A node raised: it halts, which is right only where the node itself was made wrong."""
        if not halts:
            raise FoundError(
                "halt", f"{process.name} raised {type(error).__name__}: {error}"
            ) from error
        self.halted += 1

    def gone(self, memory: Memory) -> None:
        self.conservation.gone(memory)

    def late(self, write: Write) -> None:
        """A write was reported as done and will still land."""
        for page in write.targets:
            self.conservation.late[write.target.name, page] = write

    def disproved(self, lease: Lease) -> None:
        self.conservation.disproved.add(lease)

    def evidence(self, found: Evidence) -> None:
        self.evidence_of.setdefault(found.request, found.kind)

    # -- private

    def _queue_limit(self, process: Process) -> int:
        # A preempted request waits again, in front of those that the limit is for.
        more = self._shape.batch_max if isinstance(process.node, DecodeNode) else 0
        return self._shape.queue_max + more


def waiting(node: DecodeNode | PrefillNode) -> list[int]:
    """The requests that wait for pages of this node."""
    if isinstance(node, PrefillNode):
        return [job.offer.request for job in node._queue]
    return [sequence.request for sequence in node._scheduler._waiting]
