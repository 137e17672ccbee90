"""What travels between the guard's scheduler half and its worker half, with vLLM's own messages.

They stand where vLLM expects its ``KVConnectorMetadata``, ``KVConnectorWorkerMetadata`` and
``KVConnectorHandshakeMetadata``, of which it asks only what is here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sekisho.core.errors import Evidence
from sekisho.core.ledger import Pages
from sekisho.core.memory import WORDS, Words

Row = NDArray[np.int32]


NO_ROW: Row = np.zeros(0, np.int32)
_NO_WORDS: Words = np.zeros((0, WORDS), np.uint64)


@dataclass
class Load:
    """A transfer that decode asks for.

    ``blocks``: intp [n], to be filled. ``expected``: u64 [n, 8], what their headers must be
    afterwards, whatever the serial. ``own``: u64 [n, 8], what decode writes there then.
    ``failed``: the inner connector said so. ``source``: prefill's request, where it is to be asked
    whether it held what was read; ``workers``: where; ``lapsed``: it did not.
    """

    blocks: Pages
    expected: Words
    own: Words
    failed: bool = False
    source: str = ""
    workers: tuple[str, ...] = ()
    lapsed: bool = False


@dataclass
class StepMeta:
    """From scheduler to worker, once a step.

    Attributes:
        inner: the inner connector's own.
        fresh: blocks handed out since the last step; whatever they carry is nobody's any more.
        rows: by request of this step, the blocks that its attention may be given.
        blocks, words, names: headers to write after the forward pass, and for which request.
        loads: transfers that begin now, by request.
        doomed: requests of this step of which no token may leave.
        settling: requests whose load failed and whose writer is over; what it had sent may still
            wait in a socket of the worker's.
    """

    inner: Any
    fresh: Row = field(default_factory=lambda: NO_ROW)
    rows: dict[str, Row] = field(default_factory=dict)
    blocks: Row = field(default_factory=lambda: NO_ROW)
    words: Words = field(default_factory=lambda: _NO_WORDS)
    names: list[str] = field(default_factory=list)
    loads: dict[str, Load] = field(default_factory=dict)
    doomed: set[str] = field(default_factory=set)
    settling: set[str] = field(default_factory=set)

    def __reduce__(self) -> tuple[Callable[..., "StepMeta"], tuple[Any, ...]]:
        """vLLM pickles it for every step, and bytes take a third of the time of arrays."""
        fresh, blocks, words = self.fresh.tobytes(), self.blocks.tobytes(), self.words.tobytes()
        rows = {name: row.tobytes() for name, row in self.rows.items()}
        more = self.names, self.loads, self.doomed, self.settling
        return _received, (self.inner, fresh, rows, blocks, words, *more)


def _received(
    inner: Any, fresh: bytes, rows: dict[str, bytes], blocks: bytes, words: bytes, *more: Any
) -> StepMeta:
    return StepMeta(
        inner,
        np.frombuffer(fresh, np.int32),
        {name: np.frombuffer(row, np.int32) for name, row in rows.items()},
        np.frombuffer(blocks, np.int32),
        np.frombuffer(words, np.uint64).reshape(-1, WORDS),
        *more,
    )


Found = dict[str, tuple[str, tuple[Evidence, ...]]]
"""Where a check failed, and why, by request."""


@dataclass
class WorkerMeta:
    """From the workers back. ``landed`` and ``in_doubt``: how many workers say so of a load;
    ``quiet``: how many have nothing left to read."""

    inner: Any
    found: Found
    landed: dict[str, int]
    in_doubt: dict[str, int]
    quiet: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: "WorkerMeta") -> "WorkerMeta":
        inner = self.inner if other.inner is None else other.inner
        if self.inner is not None and other.inner is not None:
            inner = self.inner.aggregate(other.inner)
        return WorkerMeta(
            inner,
            other.found | self.found,
            _sum(self.landed, other.landed),
            _sum(self.in_doubt, other.in_doubt),
            _sum(self.quiet, other.quiet),
        )


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in one | other}


@dataclass
class Handshake:
    """From each worker to the scheduler at start: the inner one's, and where to ask for a drain."""

    inner: Any
    drain: str
