"""Transports: whole pages from this process's region into a peer's."""

from typing import NamedTuple

from sekisho.transport.base import Completion, PageWrite, Status, Transport, TransportError
from sekisho.transport.memory import MemoryTransport
from sekisho.transport.mooncake import MooncakeTransport

__all__ = [
    "Completion",
    "Created",
    "MemoryTransport",
    "MooncakeTransport",
    "PageWrite",
    "Status",
    "Transport",
    "TransportError",
    "create_transport",
]


class Created(NamedTuple):
    """A transport, and, if it is not the one preferred, why; for the caller to say."""

    transport: Transport
    fallback_reason: str


def create_transport(
    kind: str,
    page_bytes: int,
    page_count: int,
    host: str = "127.0.0.1",
    protocol: str = "tcp",
    device: str = "",
) -> Created:
    """A transport of ``kind``: ``memory``, ``mooncake``, or ``auto``, which is mooncake if it
    starts here and memory otherwise. The last three arguments are Mooncake's.

    Raises:
        ValueError: an unknown kind, or an argument that `MemoryTransport` or
            `MooncakeTransport` refuses.
        TransportError: that transport cannot start.
    """
    if kind not in ("auto", "memory", "mooncake"):
        raise ValueError(f"transport {kind!r} is not auto, memory or mooncake")
    if kind == "memory":
        return Created(MemoryTransport(page_bytes, page_count), "")
    try:
        return Created(MooncakeTransport(page_bytes, page_count, host, protocol, device), "")
    except TransportError as error:
        if kind == "mooncake":
            raise
        return Created(MemoryTransport(page_bytes, page_count), str(error))
