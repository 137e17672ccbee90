"""The simulated cluster: the production roster and nodes, joined by simulated channels.

What is real: `core`, scheduler, nodes, roster, stream check. What is simulated: time, processes and
their parent, channels, memory regions, transfers, the model, the clients.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from sekisho.core.errors import Evidence, LocalOwnershipError, RemoteOwnershipError
from sekisho.core.handoff import AbortOffer, Answer, Complete, Offer
from sekisho.core.lease import Lease
from sekisho.core.table import BlockTable
from sekisho.engine.batch import Batch
from sekisho.engine.output import Delta, Ended
from sekisho.gateway.roster import Roster
from sekisho.node.decode import DecodeNode
from sekisho.node.messages import Abort, Generate, Join, PeerDead, PeerUp, Ready, ToNode
from sekisho.node.prefill import PrefillNode
from sekisho.sim import channel_faults, defences
from sekisho.sim.atlas import ATLAS
from sekisho.sim.checkers import FoundError
from sekisho.sim.clock import Clock, Network
from sekisho.sim.judges import Judges
from sekisho.sim.model import LAYOUT
from sekisho.sim.process import Process, build, new_memory
from sekisho.sim.scenario import Scenario
from sekisho.sim.strikes import Strikes
from sekisho.sim.transport import Memory, Write, land_whole

_GATEWAY = "gateway"
_START_S, _NOTICE_S, _TICK_S = 0.05, 0.01, 1.0


class Cluster:
    """Nodes, their parent and the channels; the clients are `sim.run`'s.

    ``trace`` gets a line for everything that happens, for ``sekisho sim replay``.
    """

    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None) -> None:
        self.clock = Clock()
        self.judges = Judges(scenario, self.clock)
        self.strikes = Strikes(scenario.strikes)
        self.memories: dict[str, Memory] = {}
        self.processes: dict[str, Process] = {}
        self.tenants: dict[str, int] = {}
        self.said: dict[int, Ended] = {}
        self.seed = scenario.seed
        self.forgetful: list[str] = []
        """Roles whose cache keys leave the tenant out."""
        self.handoffs = 0
        self._scenario = scenario
        self._tell = trace
        self._network = Network(self.clock, scenario.seed)
        self._generations: dict[str, int] = {}
        self._kept: dict[str, Memory] = {}
        shape = scenario.shape
        roles = ["prefill"] * shape.prefill + ["decode"] * shape.decode
        self.roster = Roster(sorted(set(roles)), self._to_node, self._end)
        for tenant in sorted({ask.tenant for ask in scenario.asks}):
            self.tenants[tenant] = len(self.tenants) + 1
        for slot in [
            *(f"prefill-{i}" for i in range(shape.prefill)),
            *(f"decode-{i}" for i in range(shape.decode)),
        ]:
            self._start(slot)

    def _trace(self, line: str) -> None:
        if self._tell is not None:
            self._tell(f"{self.clock.now:10.4f}  {line}")

    # -- the parent of the processes

    def kill(self, process: Process, keep_memory: bool = False) -> None:
        """The process is gone at once; its parent learns of it a little later."""
        if not process.alive:
            return
        self._trace(f"{process.name} dies")
        process.alive = False
        process.memory.alive = keep_memory
        if keep_memory:
            land_whole(process.memory)
        if process.transport is not None:
            process.transport.close()
        self.judges.gone(process.memory)
        if keep_memory:
            self._kept[process.slot] = process.memory
        else:
            del self.memories[process.name]
        del self.processes[process.name]
        self.clock.after(_NOTICE_S, lambda: self.roster.exited(process.name))
        self.clock.after(_NOTICE_S + _START_S, lambda: self._start(process.slot))

    def in_slot(self, slot: str) -> Process | None:
        """The living process of a slot."""
        return next((p for p in self.processes.values() if p.slot == slot), None)

    def _start(self, slot: str) -> None:
        generation = self._generations[slot] = self._generations.get(slot, 0) + 1
        name, shape = f"{slot}.{generation}", self._scenario.shape
        pages = shape.decode_pages if slot.startswith("decode") else shape.prefill_pages
        memory = self._kept.pop(slot, None)
        if memory is None:
            memory = new_memory(name, pages)
        memory.restart(name)
        self.memories[name] = memory
        incarnation = defences.incarnation(self._scenario, slot, generation)
        process = build(self, name, shape, memory, self._scenario.seed, incarnation)
        defences.remove(self._scenario.without, process)
        self.processes[name] = process
        held = process.pages
        pool = held.pool.page_count, held.layout.page_size
        ready = Ready(held.tokens_max, name, "simulated", "stand-in", True, [], *pool)
        self._network.send(name, _GATEWAY, lambda: self.roster.joined(name, ready))

    def _end(self, name: str) -> None:
        self._trace(f"the parent ends {name}")
        process = self.processes.get(name)
        if process is not None:
            self.clock.after(_NOTICE_S, lambda: self.kill(process))

    # -- channels

    def _to_node(self, name: str, messages: Sequence[ToNode]) -> None:
        self._network.send(_GATEWAY, name, lambda: self._at_node(name, list(messages)))

    def _at_node(self, name: str, messages: list[ToNode]) -> None:
        process = self.processes.get(name)
        if process is None:
            return
        for message in messages:
            self._trace(f"{name} hears {type(message).__name__}")
            if not self._guarded(process, partial(self._hear, process, message)):
                return
        self._drain(process)
        self.wake(process)

    def _hear(self, process: Process, message: ToNode) -> None:
        node = process.node
        match message:
            case Generate() if isinstance(node, DecodeNode):
                node.generate(message, process.now)
            case Abort() if isinstance(node, DecodeNode):
                node.abort(message)
            case PeerUp(name=peer) if isinstance(node, DecodeNode):
                self._join(process, node, peer)
            case PeerDead(name=peer):
                if isinstance(node, DecodeNode):
                    node.prefill_dead(peer)
                else:
                    node.peer_dead(peer)

    def _join(self, process: Process, node: DecodeNode, peer: str) -> None:
        join = Join(process.name, LAYOUT.fingerprint)
        self._network.send(process.name, peer, lambda: self._at_prefill(process.name, peer, join))
        node.prefill_up(peer)

    def _at_prefill(self, source: str, name: str, message: Join | Offer | AbortOffer) -> None:
        process = self.processes.get(name)
        if process is None or not isinstance(process.node, PrefillNode):
            return
        node = process.node
        self._trace(f"{name} hears {type(message).__name__} of {source}")
        self._guarded(process, lambda: node.receive(source, message, process.now))
        self._drain(process)
        self.wake(process)

    def at_decode(self, source: str, name: str, message: Answer) -> None:
        process = self.processes.get(name)
        if process is None or not isinstance(process.node, DecodeNode):
            return
        node, known = process.node, len(process.node.violations)
        self._trace(f"{name} hears {type(message).__name__} of {source}")
        self._guarded(process, lambda: node.answer(source, message))
        if isinstance(message, Complete):
            self.handoffs += 1
            if len(node.violations) > known:
                self.judges.disproved(message.lease)
        self._drain(process)
        self.wake(process)

    # -- a process at work

    def wake(self, process: Process) -> None:
        """It has something to do as soon as it is not busy."""
        self._schedule(process, max(self.clock.now, process.busy_until))

    def _schedule(self, process: Process, when: float) -> None:
        if process.next_at is None or when < process.next_at:
            process.next_at = when
            self.clock.at(when, lambda: self._fire(process, when))

    def _fire(self, process: Process, when: float) -> None:
        if process.next_at != when or not process.alive:
            return
        process.next_at = None
        if process.busy_until > self.clock.now:  # it was frozen meanwhile
            self._schedule(process, process.busy_until)
            return
        process.busy_until = self.clock.now + process.step_seconds()
        worked: list[bool] = []
        if not self._guarded(process, lambda: worked.append(process.node.step(process.now))):
            return
        self._drain(process)
        self.judges.step_done(process)
        if worked and worked[0]:
            self._schedule(process, process.busy_until)
        elif not process.node.idle:
            self._schedule(process, self.clock.now + _TICK_S)

    def _guarded(self, process: Process, work: Callable[[], object]) -> bool:
        """Do ``work`` as the node's loop would: a peer's broken word is ignored, anything else
        that is raised ends the process. Says whether it still lives."""
        try:
            work()
        except RemoteOwnershipError as error:
            self._trace(f"{process.name} ignores a word: {error}")
        except FoundError:
            raise
        except Exception as error:
            self._trace(f"{process.name} raises {type(error).__name__}: {error}")
            self.judges.raised(process, error, halts=self._may_halt(error))
            self.kill(process)
        return process.alive

    def _may_halt(self, error: Exception) -> bool:
        """A bug was injected into the node itself, and it stopped instead of going on."""
        return bool(self.forgetful) and isinstance(error, LocalOwnershipError)

    def _drain(self, process: Process) -> None:
        """Everything that the node says goes on its way."""
        node, name = process.node, process.name
        if isinstance(node, DecodeNode):
            for peer, message in node.to_prefill:
                self._send_to_prefill(process, peer, message)
            node.to_prefill.clear()
            for output in node.to_gateway():
                if isinstance(output, Delta | Ended):
                    self.judges.left(output)
                if isinstance(output, Ended):
                    self.said[output.request] = output
                if self._tell is not None:
                    self._trace(f"{name} says {output}")
                self._network.send(name, _GATEWAY, partial(self.roster.hear, name, output))
        else:
            for peer, answer in node.outbox:
                self._send_to_decode(process, peer, answer)
            node.outbox.clear()
            for notice in node.to_gateway():
                self._network.send(name, _GATEWAY, partial(self.roster.hear, name, notice))
        self._evidence(node.violations)

    def _evidence(self, found: list[Evidence]) -> None:
        for evidence in found:
            self._trace(f"evidence {evidence}")
            self.judges.evidence(evidence)
        found.clear()

    def _send_to_prefill(self, process: Process, peer: str, message: Offer | AbortOffer) -> None:
        for changed, extra in channel_faults.to_prefill(self, message):
            self._network.send(
                process.name,
                peer,
                partial(self._at_prefill, process.name, peer, changed),
                extra,
            )

    def _send_to_decode(self, process: Process, peer: str, answer: Answer) -> None:
        for changed, extra in channel_faults.to_decode(self, process, peer, answer):
            self._network.send(
                process.name,
                peer,
                partial(self.at_decode, process.name, peer, changed),
                extra,
            )

    # -- what the processes ask and tell (see `process.Host`)

    def tamper(self, process: Process, batch: Batch) -> None:
        channel_faults.step(self, process, batch)

    def wrong(self, process: Process, request: int, pages: list[int]) -> None:
        self.judges.read(process, request, pages)

    def granted(self, process: Process, table: BlockTable, pages: Sequence[int]) -> None:
        self.judges.granted(process, table, pages)

    def released(self, process: Process, table: BlockTable) -> None:
        self.judges.released(process, table)

    def committed(self, process: Process, table: BlockTable) -> None:
        self.judges.committed(process, table)

    def preempted(self, request: int) -> None:
        for name in {ask.fault for ask in self._scenario.asks if ask.fault}:
            if ATLAS[name].effect == "preempt":
                self.strikes.fire(name, request)

    def sealing(self, process: Process, table: BlockTable) -> None:
        channel_faults.source(self, process, table)

    def key_scope(self, process: Process, scope: str) -> str:
        return channel_faults.key_scope(self, process, scope)

    def struck(self, process: Process, write: Write, previous: Write | None) -> Write | None:
        request = self.judges.request_of(write.lease)
        if request is not None:
            write.stamp = process.pages.of_request[request]
        return channel_faults.write(self, write, previous)

    def other_lease(self, process: Process, peer: str, lease: Lease) -> Lease | None:
        """Another lease under which ``process`` still owes ``peer`` an answer."""
        node = process.node
        known = node._peers.get(peer) if isinstance(node, PrefillNode) else None
        return (
            min((other for other in known.leases if other != lease), default=None)
            if known
            else None
        )

    # -- at the end

    def busy(self) -> Iterable[str]:
        """Nodes that still have something to do."""
        return [name for name, process in self.processes.items() if not process.node.idle]
