"""The loops of a node process: sockets on one side, the sans-IO node on the other.

A decode node speaks first to a prefill node (`Join`), over one ordered connection each way, so
that an answer never overtakes another and an abort never overtakes its offer.
"""

import logging
import time
from collections.abc import Sequence

import msgspec
import zmq

from sekisho.core.errors import Evidence, RemoteOwnershipError
from sekisho.node import wire
from sekisho.node.build import NodeConfig, Parts
from sekisho.node.decode import DecodeNode
from sekisho.node.messages import (
    Abort,
    Generate,
    Inspect,
    Join,
    PeerDead,
    PeerUp,
    Ready,
    Report,
    ToGateway,
)
from sekisho.node.prefill import PrefillNode

log = logging.getLogger("sekisho.node")

_IDLE_MS = 1000
_POLL_MS = 1  # while writes are under way: their completions come without a socket event


class GatewayLine:
    """The connection to the gateway; a DEALER whose identity is the node's name."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", config: NodeConfig) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.identity = config.name.encode()
        self.socket.connect(config.gateway)

    def send(self, messages: Sequence[ToGateway]) -> None:
        """One frame, if there is anything to say."""
        if messages:
            self.socket.send(wire.encode(list(messages)))

    def ready(self, config: NodeConfig, parts: Parts, address: str) -> None:
        """Say what this node can do."""
        name = parts.transport.name if parts.transport is not None else "none"
        self.send(
            [
                Ready(
                    parts.tokens_max,
                    address,
                    name,
                    parts.runner.name,
                    parts.pages.policy.tenants,
                    parts.notes,
                    parts.pages.pool.page_count,
                    parts.pages.layout.page_size,
                )
            ]
        )


class DecodeLoop:
    """Runs a decode or colocated node until its process is ended."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        line: GatewayLine,
        config: NodeConfig,
        parts: Parts,
        node: DecodeNode,
    ) -> None:
        self._context = context
        self._line = line
        self._config = config
        self._parts = parts
        self._node = node
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(line.socket, zmq.POLLIN)

    def run(self) -> None:
        """Forever: step, say, listen."""
        self._line.ready(self._config, self._parts, "")
        was_idle = True
        while True:
            busy = self._node.step(time.monotonic())
            self._say()
            ready = dict(self._poller.poll(0 if busy else _IDLE_MS))
            if self._line.socket in ready:
                for frame in _frames(self._line.socket):
                    self._hear(frame[-1])
            for name, socket in list(self._peers.items()):
                if socket in ready:
                    for frame in _frames(socket):
                        self._answer(name, frame[-1])
            if self._node.idle and not was_idle:
                self._parts.pages.pool.check_integrity()
            was_idle = self._node.idle

    def _say(self) -> None:
        self._line.send(self._node.to_gateway())
        for peer, message in self._node.to_prefill:
            if peer in self._peers:
                self._peers[peer].send(wire.encode_to_prefill(message))
        self._node.to_prefill.clear()
        report_evidence(self._node.violations)

    def _hear(self, frame: bytes) -> None:
        for message in wire.decode_to_node(frame):
            match message:
                case Generate():
                    self._node.generate(message, time.monotonic())
                case Abort():
                    self._node.abort(message)
                case PeerUp(name=name, address=address):
                    self._connect(name, address)
                case PeerDead(name=name):
                    self._node.prefill_dead(name)
                    socket = self._peers.pop(name, None)
                    if socket is not None:
                        self._poller.unregister(socket)
                        socket.close(linger=0)
                case Inspect():
                    self._line.send([report(self._parts, self._node.counts())])

    def _connect(self, name: str, address: str) -> None:
        transport = self._parts.transport
        if transport is None or name in self._peers:
            return
        socket = self._context.socket(zmq.DEALER)
        socket.identity = self._config.name.encode()
        socket.connect(address)
        self._peers[name] = socket
        self._poller.register(socket, zmq.POLLIN)
        join = Join(transport.endpoint(), self._parts.pages.layout.fingerprint)
        socket.send(wire.encode_to_prefill(join))
        self._node.prefill_up(name)

    def _answer(self, peer: str, frame: bytes) -> None:
        try:
            self._node.answer(peer, wire.decode_to_decode(frame))
        except (RemoteOwnershipError, msgspec.DecodeError) as error:
            log.error("ignored a word of %s: %s", peer, error)


class PrefillLoop:
    """Runs a prefill node until its process is ended."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        line: GatewayLine,
        config: NodeConfig,
        parts: Parts,
        node: PrefillNode,
    ) -> None:
        self._line = line
        self._config = config
        self._parts = parts
        self._node = node
        self._socket = context.socket(zmq.ROUTER)
        self._socket.sndhwm = 0  # a ROUTER that reaches its limit drops: an answer must not be
        self._socket.bind(config.address)
        self._poller = zmq.Poller()
        self._poller.register(line.socket, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)

    def run(self) -> None:
        """Forever: step, say, listen."""
        self._line.ready(self._config, self._parts, self._config.address)
        was_idle = True
        while True:
            busy = self._node.step(time.monotonic())
            for peer, message in self._node.outbox:
                self._socket.send_multipart([peer.encode(), wire.encode_to_decode(message)])
            self._node.outbox.clear()
            self._line.send(self._node.to_gateway())
            report_evidence(self._node.violations)
            wait = 0 if busy else _POLL_MS if self._node.transferring else _IDLE_MS
            ready = dict(self._poller.poll(wait))
            if self._line.socket in ready:
                for frame in _frames(self._line.socket):
                    self._hear(frame[-1])
            if self._socket in ready:
                for frame in _frames(self._socket):
                    self._offered(frame[0].decode(), frame[-1])
            if self._node.idle and not was_idle:
                self._parts.pages.pool.check_integrity()
            was_idle = self._node.idle

    def _hear(self, frame: bytes) -> None:
        for message in wire.decode_to_node(frame):
            match message:
                case PeerDead(name=name):
                    self._node.peer_dead(name)
                case Inspect():
                    self._line.send([report(self._parts, self._node.counts())])
                case _:
                    log.error("a prefill node has no use for %s", type(message).__name__)

    def _offered(self, peer: str, frame: bytes) -> None:
        try:
            self._node.receive(peer, wire.decode_to_prefill(frame), time.monotonic())
        except (RemoteOwnershipError, msgspec.DecodeError) as error:
            log.error("ignored a word of %s: %s", peer, error)


def report(parts: Parts, requests: dict[str, int]) -> Report:
    """A recount of the pool; raises `LocalOwnershipError` where the pages do not add up."""
    parts.pages.pool.check_integrity()
    return Report(parts.pages.pool.counts(), requests)


def report_evidence(violations: list[Evidence]) -> None:
    """Evidence goes to the log, ids and numbers only, and is then forgotten here."""
    for evidence in violations:
        log.error("ownership violation %s", evidence)
    violations.clear()


def _frames(socket: "zmq.Socket[bytes]") -> list[list[bytes]]:
    """Everything that has arrived on a socket, without waiting."""
    frames = []
    while True:
        try:
            frames.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return frames
