"""Pages between machines (or processes) through the Mooncake Transfer Engine.

Every page goes as two writes: its payload, and, once the engine has said that this payload has
landed, its header. Up to `WINDOW` writes are under way to each peer, so payloads move while the
headers of earlier pages do.

From the engine's answers (`sekisho.transport.mooncake_engine`) follows what a ticket is: DONE
when every header has landed; FAILED when all its writes are over and what is missing was never
sent; UNKNOWN when a write was lost, or when a peer with open writes has made no progress for
`STALL_S`. A ticket that is UNKNOWN for a stall becomes DONE if the peer goes on. One that is
UNKNOWN for a lost write ends as FAILED at `disconnect`, that is, when the peer is known to be
dead. After a kill of the receiver the engine gives up all its writes within about a second.

The engine listens on every interface, whatever address it is given, and whoever reaches its
ports can write into the region: run it inside the trust domain only.
"""

import contextlib
import json
import mmap
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sekisho.core.page import HEADER_SIZE
from sekisho.transport.base import Completion, PageWrite, Status, TransportError
from sekisho.transport.mooncake_engine import LANDED, LOST, load_engine, start_engine
from sekisho.transport.region import check_memory, check_shape, check_writes, read_endpoint

WINDOW = 32
"""Writes under way to one peer. The engine's own queue fails what waits above about 1,024."""
MAX_PEERS = 256
STALL_S = 10.0
CONNECT_S = 10.0
CLOSE_S = 5.0

_NAP_S = 0.0002
_LONG_NAP_S = 0.01
_SWEEP = 8  # open writes looked at in one pass: the engine finishes roughly in order
_SLOT = HEADER_SIZE


@dataclass(slots=True)
class _Ticket:
    number: int
    left: int
    """Pages not yet over."""
    lost: bool = False
    unsent: bool = False
    told: bool = False
    """UNKNOWN has been reported."""


@dataclass(slots=True)
class _Write:
    """One engine write under way; ``slot`` is the address of a header, 0 for a payload."""

    handle: int
    ticket: _Ticket
    page: PageWrite
    slot: int


@dataclass(slots=True)
class _Peer:
    segment: str
    base: int
    page_count: int
    slots: list[int]
    waiting: deque[tuple[_Ticket, PageWrite]] = field(default_factory=deque)
    flying: deque[_Write] = field(default_factory=deque)
    tickets: dict[int, _Ticket] = field(default_factory=dict)
    progress: float = 0.0
    gone: bool = False


class _Command(NamedTuple):
    """Write ``pages`` for ``ticket``; without a ticket: the peer is dead."""

    peer: _Peer
    ticket: _Ticket | None
    pages: tuple[PageWrite, ...] = ()


class MooncakeTransport:
    """Implements `Transport` with one engine and one thread that drives it.

    Args:
        page_bytes: size of a page with its header, bytes.
        page_count: pages in the local region.
        host: name or address under which peers reach this machine.
        protocol: ``tcp`` or ``rdma``.
        device: RDMA devices, comma separated; empty for all.

    Raises:
        ValueError: a page without payload, no page, or another protocol.
        TransportError: no memory, or Mooncake, a library of it, or the RDMA device is missing.
    """

    name = "mooncake"

    def __init__(
        self,
        page_bytes: int,
        page_count: int,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
    ) -> None:
        check_shape(page_bytes, page_count)
        if protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol {protocol!r} is not tcp or rdma")
        self._page_bytes = page_bytes
        self._page_count = page_count
        self._refused_is_unsent = protocol == "tcp"
        engine_class, self._version = load_engine(protocol)
        region_bytes = page_bytes * page_count
        side_bytes = _SLOT * (1 + MAX_PEERS * WINDOW)
        check_memory(region_bytes + side_bytes)
        try:
            # populated at once: registration would pin it anyway
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self._memory = np.frombuffer(
                mmap.mmap(-1, region_bytes + side_bytes, flags=flags), np.uint8
            )
        except OSError as error:
            raise TransportError(f"no region of {region_bytes} bytes: {error}") from error
        self.region = self._memory[:region_bytes]
        # behind the region: a nonce that says who we are, then the slots of outgoing headers
        self._base = int(self._memory.ctypes.data)
        self._identity = self._base + region_bytes
        self._nonce = secrets.token_bytes(_SLOT)
        self._store(self._identity, self._nonce)
        first = self._identity + _SLOT
        self._slots = list(range(first, first + _SLOT * MAX_PEERS * WINDOW, _SLOT))
        self._engine = start_engine(
            engine_class, host, protocol, device, self._base, self._memory.nbytes
        )
        name = f"[{host}]" if ":" in host else host
        self._segment = f"{name}:{self._engine.get_rpc_port()}"
        self._peers: dict[int, _Peer] = {}
        self._peer_serial = 0
        self._ticket_serial = 0
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._completions: deque[Completion] = deque()
        self._driven: list[_Peer] = []
        self._closing = False
        self._broken = ""
        self._worker = threading.Thread(target=self._run, name="sekisho-mooncake", daemon=True)
        self._worker.start()

    def endpoint(self) -> str:
        """JSON: kind, engine version, segment, base and identity addresses, nonce, sizes."""
        self._check_open()
        return json.dumps(
            {
                "kind": self.name,
                "engine": self._version,
                "segment": self._segment,
                "base": self._base,
                "identity": self._identity,
                "nonce": self._nonce.hex(),
                "page_bytes": self._page_bytes,
                "page_count": self._page_count,
            }
        )

    def connect(self, endpoint: str) -> int:
        """As `Transport.connect`; reads the peer's nonce, to refuse another process that has
        come to listen on the same port. A dead peer is refused at once; one that is stopped can
        block the call for about a minute, the engine's handshake."""
        self._check_open()
        numbers, texts = ("base", "identity"), ("segment", "nonce", "engine")
        parts = read_endpoint(endpoint, self.name, self._page_bytes, numbers, texts)
        # refuse rather than downgrade: the meaning of "landed" depends on the version
        if parts["engine"] != self._version:
            raise TransportError(f"the peer's engine is {parts['engine']}, here {self._version}")
        if len(self._slots) < WINDOW:
            raise TransportError(f"more than {MAX_PEERS} peers")
        slots = [self._slots.pop() for _ in range(WINDOW)]
        identity = self._read(parts["segment"], parts["identity"], slots[0])
        if identity.hex() != parts["nonce"]:
            self._slots.extend(slots)
            what = "is not the process of the endpoint" if identity else "cannot be reached"
            raise TransportError(f"{parts['segment']} {what}")
        self._peer_serial += 1
        peer = _Peer(parts["segment"], parts["base"], parts["page_count"], slots)
        self._peers[self._peer_serial] = peer
        return self._peer_serial

    def disconnect(self, peer: int) -> None:
        with contextlib.suppress(KeyError):
            self._commands.put(_Command(self._peers.pop(peer), None))

    def submit(self, peer: int, pages: Sequence[PageWrite]) -> int:
        """As `Transport.submit`.

        Raises:
            ValueError: ``peer`` or a field of ``pages`` is bad; nothing was written.
            TransportError: the transport is closed or broken.
        """
        self._check_open()
        if peer not in self._peers:
            raise ValueError(f"peer {peer} is not connected")
        target = self._peers[peer]
        check_writes(pages, self._page_count, target.page_count)
        self._ticket_serial += 1
        ticket = _Ticket(self._ticket_serial, len(pages))
        self._commands.put(_Command(target, ticket, tuple(pages)))
        return ticket.number

    def poll(self) -> list[Completion]:
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._completions.popleft())
        return found

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._commands.put(None)
        self._worker.join()
        # ends the engine's threads: nothing reads or writes the memory from here on
        self._engine = None
        self._peers.clear()
        self._memory = self.region = np.empty(0, np.uint8)

    def _check_open(self) -> None:
        if self._closing:
            raise TransportError("the transport is closed")
        if self._broken:
            raise TransportError(f"the transport is broken: {self._broken}")

    def _store(self, address: int, data: bytes) -> None:
        at = address - self._base
        self._memory[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def _read(self, segment: str, address: int, slot: int) -> bytes:
        """One slot of a peer's memory, through the local ``slot``; empty if unreachable."""
        handle = self._engine.batch_transfer_async_read(segment, [slot], [address], [_SLOT])
        status = 0 if handle else LOST
        deadline = time.monotonic() + CONNECT_S
        while status not in (LANDED, LOST):
            if time.monotonic() > deadline:
                # the slot is given up with it: the read may still land there
                raise TransportError(f"{segment} does not answer")
            time.sleep(_NAP_S)
            status = self._engine.transfer_check_status(handle)
        at = slot - self._base
        return self._memory[at : at + _SLOT].tobytes() if status == LANDED else b""

    # below: the worker thread, the only one that touches a peer's queues

    def _run(self) -> None:
        try:
            while self._obey(self._nap()):
                for peer in self._driven:
                    self._advance(peer)
                self._driven = [peer for peer in self._driven if peer.flying]
            self._wind_down()
        except Exception as error:  # told to the caller by submit, and to open tickets here
            self._broken = f"{type(error).__name__}: {error}"
            self._obey(0.0)
            for peer in self._driven:
                self._tell_unknown(peer, self._broken)

    def _obey(self, wait: float | None) -> bool:
        """Take the commands that have come, wait for the first one; False to end."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get(timeout=wait)
                if command is None:
                    return False
                peer = command.peer
                if (ticket := command.ticket) is None:
                    peer.gone = True
                else:
                    if not peer.flying:
                        peer.progress = time.monotonic()
                    peer.tickets[ticket.number] = ticket
                    peer.waiting.extend((ticket, page) for page in command.pages)
                if peer not in self._driven:
                    self._driven.append(peer)
                wait = 0.0
        return True

    def _nap(self) -> float | None:
        if not self._driven:
            return None
        latest = max(peer.progress for peer in self._driven)
        return _NAP_S if time.monotonic() - latest < 0.1 else _LONG_NAP_S

    def _advance(self, peer: _Peer) -> None:
        self._sweep(peer)
        while peer.waiting and (len(peer.flying) < WINDOW or peer.gone):
            ticket, page = peer.waiting.popleft()
            self._start(peer, ticket, page, 0)
        if peer.gone and not peer.flying:
            for ticket in peer.tickets.values():
                self._complete(ticket, Status.FAILED, "disconnected")
            peer.tickets.clear()
            self._slots.extend(peer.slots)
            peer.slots = []
        elif peer.tickets and time.monotonic() - peer.progress > STALL_S:
            self._tell_unknown(peer, f"no progress for {STALL_S:g} s")

    def _sweep(self, peer: _Peer) -> None:
        kept: list[_Write] = []
        while peer.flying and len(kept) < _SWEEP:
            write = peer.flying.popleft()
            status = self._engine.transfer_check_status(write.handle)
            if status not in (LANDED, LOST):
                kept.append(write)
                continue
            peer.progress = time.monotonic()
            if write.slot:
                peer.slots.append(write.slot)
            if status == LOST:
                write.ticket.lost = True
                self._page_over(peer, write.ticket)
            elif write.slot:
                self._page_over(peer, write.ticket)
            else:
                slot = peer.slots.pop()
                self._store(slot, write.page.header)
                self._start(peer, write.ticket, write.page, slot)
        peer.flying.extendleft(reversed(kept))

    def _start(self, peer: _Peer, ticket: _Ticket, page: PageWrite, slot: int) -> None:
        """Begin the write of a payload, or of the header in ``slot``."""
        handle = 0
        # the rest of a ticket that can no longer be whole is not sent
        wanted = not (peer.gone or ticket.lost or ticket.unsent)
        if wanted:
            target = peer.base + page.target_page * self._page_bytes
            source = self._base + page.source_page * self._page_bytes + HEADER_SIZE
            size = self._page_bytes - HEADER_SIZE
            handle = (
                self._engine.transfer_submit_write(peer.segment, slot, target, HEADER_SIZE)
                if slot
                else self._engine.transfer_submit_write(
                    peer.segment, source, target + HEADER_SIZE, size
                )
            )
        if handle:
            peer.flying.append(_Write(handle, ticket, page, slot))
            return
        if slot:
            peer.slots.append(slot)
        if wanted and not self._refused_is_unsent:
            ticket.lost = True
        ticket.unsent = True
        self._page_over(peer, ticket)

    def _page_over(self, peer: _Peer, ticket: _Ticket) -> None:
        ticket.left -= 1
        if ticket.left:
            return
        if ticket.lost:
            # stays open until the peer goes on or is disconnected
            if not ticket.told:
                ticket.told = True
                self._complete(ticket, Status.UNKNOWN, "a write ended without an answer")
            return
        del peer.tickets[ticket.number]
        status = Status.FAILED if ticket.unsent else Status.DONE
        self._complete(ticket, status, "refused by the engine" if ticket.unsent else "")

    def _tell_unknown(self, peer: _Peer, detail: str) -> None:
        for ticket in peer.tickets.values():
            if not ticket.told:
                ticket.told = True
                self._complete(ticket, Status.UNKNOWN, detail)

    def _complete(self, ticket: _Ticket, status: Status, detail: str) -> None:
        self._completions.append(Completion(ticket.number, status, detail))

    def _wind_down(self) -> None:
        """Let the writes under way end, for a bounded time; begin no other."""
        deadline = time.monotonic() + CLOSE_S
        for peer in self._driven:
            peer.gone = True
        while any(peer.flying for peer in self._driven) and time.monotonic() < deadline:
            for peer in self._driven:
                self._advance(peer)
            time.sleep(_NAP_S)
