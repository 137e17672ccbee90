"""What every transport checks alike: the shape of a region, memory for it, writes, endpoints."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sekisho.core.page import HEADER_SIZE
from sekisho.transport.base import PageWrite, TransportError


def check_shape(page_bytes: int, page_count: int) -> None:
    """Raise ValueError unless a page holds a header and at least one byte of payload."""
    if page_bytes <= HEADER_SIZE:
        raise ValueError(f"page_bytes {page_bytes} must be above {HEADER_SIZE}")
    if page_count < 1:
        raise ValueError(f"page_count {page_count} must be above 0")


def check_memory(byte_count: int) -> None:
    """Raise TransportError unless the machine has ``byte_count`` bytes to give.

    The kernel would overcommit, and end the process when the pages are first touched.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if available < byte_count:
                raise TransportError(
                    f"the region needs {byte_count} bytes of memory, {available} are available"
                )


def check_writes(pages: Sequence[PageWrite], source_count: int, target_count: int) -> None:
    """Raise ValueError, naming the field, if a write is outside a region or ill-formed."""
    if not pages:
        raise ValueError("pages is empty")
    for write in pages:
        if not 0 <= write.source_page < source_count:
            raise ValueError(f"source_page {write.source_page} is not in 0..{source_count - 1}")
        if not 0 <= write.target_page < target_count:
            raise ValueError(f"target_page {write.target_page} is not in 0..{target_count - 1}")
        if len(write.header) != HEADER_SIZE:
            raise ValueError(f"header has {len(write.header)} bytes, not {HEADER_SIZE}")


def read_endpoint(
    endpoint: str, kind: str, page_bytes: int, numbers: Sequence[str], texts: Sequence[str] = ()
) -> dict[str, Any]:
    """The parts of a peer's endpoint: ``numbers`` (0 or more), ``texts`` and ``page_count``.

    Raises:
        TransportError: not an endpoint of this ``kind``, or its pages have another size.
    """
    try:
        parts = json.loads(endpoint)
    except ValueError as error:
        raise TransportError(f"not an endpoint: {error}") from None
    if not isinstance(parts, dict) or parts.get("kind") != kind:
        found = parts.get("kind") if isinstance(parts, dict) else None
        raise TransportError(f"the peer's transport is {found!r}, this one is {kind!r}")
    for name in ("page_bytes", "page_count", *numbers):
        if type(parts.get(name)) is not int or parts[name] < 0:
            raise TransportError(f"bad {name} in the peer's endpoint")
    for name in texts:
        if type(parts.get(name)) is not str:
            raise TransportError(f"bad {name} in the peer's endpoint")
    if parts["page_bytes"] != page_bytes:
        raise TransportError(f"the peer's page_bytes is {parts['page_bytes']}, here {page_bytes}")
    return parts
