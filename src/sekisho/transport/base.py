"""The contract of every transport: pages into a peer's pool, header after payload.

A transport moves whole pages, ``[ header 64 B | payload ]``, from the local region into a peer's
region. The payload comes from the local page; the header is given by the caller, because the
receiver's lease is not the sender's. Contract, tested over every implementation:

* memory is registered once, when the region is allocated;
* of a submitted batch, no header is written before that same page's payload has landed;
* a completion is one of three words, told apart: ``DONE`` (all of it landed), ``FAILED`` (not
  all landed, and nothing of this ticket will land any more), ``UNKNOWN`` (it may still land:
  the ticket stays open, and DONE or FAILED follows if and when it becomes known);
* time alone never turns UNKNOWN into FAILED.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class TransportError(Exception):
    """A peer cannot be reached, or a region cannot be allocated or attached."""


class Status(enum.Enum):
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


class PageWrite(NamedTuple):
    """One page to send: page indices in the local and in the peer's region, and the header."""

    source_page: int
    target_page: int
    header: bytes


class Completion(NamedTuple):
    """What became of a ticket. ``detail`` is for the log: no payload, no prompt text."""

    ticket: int
    status: Status
    detail: str


class Transport(Protocol):
    """One per node process. Not thread-safe: the node's loop is the only caller."""

    name: str
    region: NDArray[np.uint8]
    """The registered local memory, uint8 [page_count * page_bytes], zeroed, page-aligned."""

    def endpoint(self) -> str:
        """Where peers reach this region; opaque text, valid until `close`."""
        ...

    def connect(self, endpoint: str) -> int:
        """Attach to a peer's region, return a peer number for `submit`.

        Raises:
            TransportError: unreachable, other kind of transport, or another page size.
        """
        ...

    def disconnect(self, peer: int) -> None:
        """Forget a peer that is known to be dead. Its open tickets end as FAILED once no write
        of this process is under way any more."""
        ...

    def submit(self, peer: int, pages: Sequence[PageWrite]) -> int:
        """Start writing, return a ticket at once. The source pages must stay unchanged until
        the ticket is DONE or FAILED."""
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call; never blocks."""
        ...

    def close(self) -> None:
        """Stop writing and release the memory. Idempotent."""
        ...
