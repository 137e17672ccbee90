"""The nodes as the gateway sees them: who is ready, who answers which request, who died.

Implements `Backend`. All messages of a request come from the one decode node it was given to; a
word about it from any other node is an error in the log and never text for a client.
"""

import asyncio
import contextlib
import itertools
import logging
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.node import wire
from sekisho.node.build import NodeConfig
from sekisho.node.messages import (
    Abort,
    Distrust,
    Generate,
    Inspect,
    Loading,
    PeerDead,
    PeerUp,
    Ready,
    Report,
    ToGateway,
    ToNode,
)
from sekisho.node.supervisor import Supervisor

log = logging.getLogger("sekisho.fleet")

# The path of a UNIX socket has at most 107 bytes (unix(7)); the rest is for the node's name.
_RUN_DIR_MAX = 80


class FleetError(Exception):
    """A node cannot start; the node itself has said why on stderr."""


@dataclass(eq=False)
class _Node:
    name: str
    ready: Ready | None = None
    retiring: bool = False
    requests: set[int] = field(default_factory=set)
    report: asyncio.Future[Report] | None = None

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


@dataclass(eq=False)
class _Request:
    node: _Node
    prefill: _Node | None
    events: asyncio.Queue[Delta | Ended] = field(default_factory=asyncio.Queue)


class Fleet:
    """Starts the nodes of ``roles`` and keeps them.

    Args:
        configure: a node's configuration from (role, name, gateway address, own address).
        command: how a node process is started, before its configuration.
        progress: called with (node, what it said while loading).
    """

    def __init__(
        self,
        roles: Sequence[str],
        configure: Callable[[str, str, str, str], NodeConfig],
        command: Sequence[str],
        progress: Callable[[str, Loading | Ready], None],
    ) -> None:
        self._roles = list(roles)
        self._progress = progress
        # ipc sockets in a folder of our own (mode 0700): no other user can speak to a node.
        self._run_dir = tempfile.TemporaryDirectory(prefix="sekisho-")
        self._address = f"ipc://{self._run_dir.name}/gateway"
        self._supervisor = Supervisor(
            command,
            lambda role, name: configure(
                role, name, self._address, f"ipc://{Path(self._run_dir.name) / name}"
            ),
            self._exited,
        )
        self._numbers = itertools.count(1)
        self._nodes: dict[str, _Node] = {}
        self._requests: dict[int, _Request] = {}
        self._changed = asyncio.Event()
        self._started = False
        self._broken = ""
        self._draining = False
        self._listener: asyncio.Task[None] | None = None

    # -- life

    async def start(self) -> None:
        """Start every node and wait until all are ready.

        Raises:
            FleetError: a node ended instead, or the folder for temporary files has a long name.
        """
        if len(self._run_dir.name.encode()) > _RUN_DIR_MAX:
            raise FleetError(f"TMPDIR is too long for sockets: {self._run_dir.name}")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.sndhwm = 0  # a ROUTER that reaches its limit drops
        self._socket.bind(self._address)
        self._listener = asyncio.create_task(self._listen())
        self._supervisor.start(self._roles)
        while sum(node.ready is not None for node in self._nodes.values()) < len(self._roles):
            if self._broken:
                raise FleetError(self._broken)
            self._changed.clear()
            await self._changed.wait()
        self._started = True

    async def stop(self, grace: float) -> None:
        """Refuse new requests, give those under way ``grace`` seconds, end the nodes."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._requests:
                    self._changed.clear()
                    await self._changed.wait()
        for number in list(self._requests):
            self._end(number, "shutting_down", "the server is shutting down")
        await self._supervisor.stop()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
            self._context.destroy(linger=0)
        self._run_dir.cleanup()

    def pids(self) -> dict[str, int]:
        """Process ids of the nodes, by name."""
        return self._supervisor.pids()

    async def inspect(self) -> dict[str, Report]:
        """Let every ready node recount its pool; nodes that die meanwhile are left out."""
        loop = asyncio.get_running_loop()
        pending: dict[str, asyncio.Future[Report]] = {}
        for node in self._nodes.values():
            if node.ready is not None:
                node.report = pending[node.name] = node.report or loop.create_future()
                self._send(node, [Inspect()])
        if pending:
            await asyncio.wait(pending.values())
        return {name: told.result() for name, told in pending.items() if not told.cancelled()}

    # -- Backend

    def tokens_max(self) -> int:
        """Prompt plus answer that the smallest node can hold; 0 while a role has no node."""
        usable = self._usable()
        if {node.role for node in usable} != set(self._roles):
            return 0
        return min(node.ready.tokens_max for node in usable if node.ready is not None)

    def ready(self) -> bool:
        """Every role has a node, every node's checks are active, and nothing is draining."""
        usable = self._usable()
        guarded = all(node.ready is not None and node.ready.tenants for node in usable)
        return guarded and self.tokens_max() > 0 and not self._draining

    async def generate(
        self, scope: str, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[Delta | Ended, None]:
        """See `Backend.generate`."""
        number = next(self._numbers)
        decode = self._least_busy("decode", "colocated")
        prefill = self._least_busy("prefill")
        if not self.ready() or decode is None:
            yield Ended(number, "not_ready", "the nodes are not ready", 0, 0)
            return
        request = self._requests[number] = _Request(decode, prefill)
        for node in filter(None, (decode, prefill)):
            node.requests.add(number)
        name = prefill.name if prefill is not None else ""
        self._send(decode, [Generate(number, scope, tokens, params, name)])
        try:
            while True:
                event = await request.events.get()
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            if self._forget(number):
                self._send(decode, [Abort(number)])

    # -- private

    def _usable(self) -> list[_Node]:
        return [n for n in self._nodes.values() if n.ready is not None and not n.retiring]

    def _least_busy(self, *roles: str) -> _Node | None:
        nodes = [node for node in self._usable() if node.role in roles]
        return min(nodes, key=lambda node: len(node.requests), default=None)

    def _send(self, node: _Node, messages: Sequence[ToNode]) -> None:
        # At once: a ROUTER without limit never waits. Not by a plain socket of the same handle:
        # its sends swallow the wake-up that the listener waits for.
        self._socket.send_multipart([node.name.encode(), wire.encode_to_node(messages)])

    async def _listen(self) -> None:
        while True:
            identity, frame = await self._socket.recv_multipart()
            node = self._nodes.setdefault(identity.decode(), _Node(identity.decode()))
            try:
                messages = wire.decode_to_gateway(frame)
            except msgspec.DecodeError as error:
                log.error("ignored a word of %s: %s", node.name, error)
                continue
            for message in messages:
                self._hear(node, message)

    def _hear(self, node: _Node, message: ToGateway) -> None:
        match message:
            case Delta() | Ended():
                request = self._requests.get(message.request)
                if request is None:
                    return  # given up here; its abort is on the way
                if request.node is not node:
                    log.error("%s speaks of request %d of another", node.name, message.request)
                    return
                request.events.put_nowait(message)
                if isinstance(message, Ended):
                    self._forget(message.request)
            case Loading():
                self._progress(node.name, message)
            case Ready():
                node.ready = message
                self._introduce(node)
                self._progress(node.name, message)
                self._changed.set()
            case Report():
                if node.report is not None and not node.report.done():
                    node.report.set_result(message)
                node.report = None
            case Distrust(name=name):
                self._retire(name)

    def _introduce(self, node: _Node) -> None:
        for other in self._nodes.values():
            for decode, prefill in ((node, other), (other, node)):
                roles = (decode.role, prefill.role)
                if roles == ("decode", "prefill") and decode.ready and prefill.ready:
                    self._send(decode, [PeerUp(prefill.name, prefill.ready.address)])

    def _retire(self, name: str) -> None:
        """Stop giving work to a node that was caught, and replace it when what it has ends."""
        node = self._nodes.get(name)
        if node is not None and not node.retiring:
            log.error("%s claimed writes that are not there: it is replaced", name)
            node.retiring = True
            self._end_if_retired(node)

    def _end_if_retired(self, node: _Node) -> None:
        if node.retiring and not node.requests:
            self._supervisor.end(node.name)

    def _exited(self, name: str, code: int) -> None:
        node = self._nodes.pop(name, None)
        if not self._started:
            self._broken = f"{name} ended with code {code} before it was ready"
        self._changed.set()
        if node is None:
            return
        if node.report is not None:
            node.report.cancel()
        for number in [n for n, r in self._requests.items() if r.node is node]:
            self._end(number, "node_lost", "the node that answered this request died")
        for other in self._nodes.values():
            self._send(other, [PeerDead(name)])

    def _end(self, number: int, code: str, message: str) -> None:
        request = self._requests[number]
        request.events.put_nowait(Ended(number, code, message, 0, 0))
        self._forget(number)

    def _forget(self, number: int) -> bool:
        """The request needs no node any more; says whether it did until now."""
        request = self._requests.pop(number, None)
        if request is None:
            return False
        for node in filter(None, (request.node, request.prefill)):
            node.requests.discard(number)
            self._end_if_retired(node)
        self._changed.set()
        return True
