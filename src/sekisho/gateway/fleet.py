"""The node processes behind their sockets; what they say is judged by the `Roster`.

Implements `Backend`.
"""

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.gate.serve_check import check_fleet, refusal, role_of
from sekisho.gateway.backend import Capacity, NodeCapacity
from sekisho.gateway.roster import Roster
from sekisho.node import wire
from sekisho.node.build import NodeConfig
from sekisho.node.messages import Inspect, Loading, Ready, Report, ToGateway, ToNode
from sekisho.node.supervisor import Supervisor

log = logging.getLogger("sekisho.fleet")

# The path of a UNIX socket has at most 107 bytes (unix(7)); the rest is for the node's name.
_RUN_DIR_MAX = 80


class FleetError(Exception):
    """A node cannot start; the node itself has said why on stderr."""


class Fleet:
    """Starts the nodes of ``roles`` and keeps them.

    Args:
        configure: a node's configuration from (role, name, gateway address, own address).
        command: how a node process is started, before its configuration.
        progress: called with (node, what it said while loading).
        window: tokens that every node must hold for one request; None: what the smallest holds.
        model: its name, for the gate.
    """

    def __init__(
        self,
        roles: Sequence[str],
        configure: Callable[[str, str, str, str], NodeConfig],
        command: Sequence[str],
        progress: Callable[[str, Loading | Ready], None],
        window: int | None = None,
        model: str = "",
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
        self._roster = Roster(
            roles,
            self._send,
            self._supervisor.end,
            window,
            lambda nodes: refusal(check_fleet(model, window, nodes)) if window else "",
        )
        self._told = ""
        self._reports: dict[str, asyncio.Future[Report]] = {}
        self._changed = asyncio.Event()
        self._started = False
        self._broken = ""
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
        while len(self._roster.nodes) < len(self._roles):
            if self._broken:
                raise FleetError(self._broken)
            self._changed.clear()
            await self._changed.wait()
        self._started = True

    async def stop(self, grace: float) -> None:
        """Refuse new requests, give those under way ``grace`` seconds, end the nodes."""
        self._roster.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._roster.requests():
                    self._changed.clear()
                    await self._changed.wait()
        for number in self._roster.requests():
            self._roster.end(number, "shutting_down", "the server is shutting down")
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
        for name in self._roster.nodes:
            pending[name] = self._reports.setdefault(name, loop.create_future())
            self._send(name, [Inspect()])
        if pending:
            await asyncio.wait(pending.values())
        return {name: told.result() for name, told in pending.items() if not told.cancelled()}

    # -- Backend

    def tokens_max(self) -> int:
        """See `Roster.tokens_max`."""
        return self._roster.tokens_max()

    def ready(self) -> bool:
        """See `Roster.ready`."""
        return self._roster.ready()

    def refusal(self) -> str:
        """See `Backend.refusal`."""
        return self._roster.refusal

    def capacity(self) -> Capacity:
        """See `Backend.capacity`; a node that is being replaced is left out."""
        nodes = [node for node in self._roster.nodes.values() if not node.retiring]
        there = {node.role for node in nodes}
        return Capacity(
            window=self._roster.window,
            missing=sorted(set(self._roles) - there),
            nodes=[
                NodeCapacity(
                    name=node.name,
                    role=role_of(node.name),
                    pool_tokens=node.ready.page_count * node.ready.page_size,
                    page_size=node.ready.page_size,
                    pages=node.ready.page_count,
                    tokens_max=node.ready.tokens_max,
                )
                for node in nodes
            ],
        )

    async def generate(
        self, scope: str, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[Delta | Ended, None]:
        """See `Backend.generate`."""
        events: asyncio.Queue[Delta | Ended] = asyncio.Queue()
        number = self._roster.open(scope, tokens, params, events.put_nowait)
        try:
            while True:
                event = await events.get()
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            self._roster.close(number)
            self._changed.set()

    # -- private

    def _send(self, name: str, messages: Sequence[ToNode]) -> None:
        # At once: a ROUTER without limit never waits. Not by a plain socket of the same handle:
        # its sends swallow the wake-up that the listener waits for.
        self._socket.send_multipart([name.encode(), wire.encode_to_node(messages)])

    async def _listen(self) -> None:
        while True:
            identity, frame = await self._socket.recv_multipart()
            name = identity.decode()
            try:
                messages = wire.decode_to_gateway(frame)
            except msgspec.DecodeError as error:
                log.error("ignored a word of %s: %s", name, error)
                continue
            for message in messages:
                self._hear(name, message)

    def _hear(self, name: str, message: ToGateway) -> None:
        match message:
            case Loading():
                self._progress(name, message)
            case Ready():
                self._roster.joined(name, message)
                self._progress(name, message)
            case Report():
                told = self._reports.pop(name, None)
                if told is not None and not told.done():
                    told.set_result(message)
            case _:
                self._roster.hear(name, message)
        self._tell_window()
        self._changed.set()

    def _exited(self, name: str, code: int) -> None:
        if not self._started:
            self._broken = f"{name} ended with code {code} before it was ready"
        if (told := self._reports.pop(name, None)) is not None:
            told.cancel()
        self._roster.exited(name)
        self._tell_window()
        self._changed.set()

    def _tell_window(self) -> None:
        """A line when the window is lost, and one when it is held again; before all nodes are
        there, whoever starts the fleet is told instead."""
        told = self._roster.refusal
        quiet = not self._started or self._roster.draining
        if quiet or told == self._told or not self._roster.tokens_max():
            return
        if told:
            log.error("not ready, window = %s: %s", self._roster.window, told)
        else:
            log.warning("every node holds the window of %s again", self._roster.window)
        self._told = told
