"""What one forward pass works on, and the two runners' common shape."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of several sequences, flattened; row ``r`` of sequence ``s`` attends to all earlier
    positions of ``s`` and to itself.

    Attributes:
        tokens: int32 [rows], token ids.
        positions: int32 [rows]; rows of one sequence are consecutive and increasing.
        sequence_starts: int32 [sequences + 1], row offsets.
        tables: int32 [sequences, pages_max], page indices by ordinal, padded with -1.
        logit_rows: int32 [outputs], the rows whose logits are wanted, increasing.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequence_starts: NDArray[np.int32]
    tables: NDArray[np.int32]
    logit_rows: NDArray[np.int32]


class Runner(Protocol):
    """Runs the model over pages of one pool. Two exist: the native kernels and plain torch.

    The bits of a row's result depend on that row's own sequence alone: not on the other rows,
    nor on how the prefill was cut into chunks, nor on whether a prefix came from the cache.
    """

    name: str

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Write K and V of every row into its page, return logits [outputs, vocab] in fp32."""
        ...


def validate_batch(batch: Batch, vocab_size: int, page_size: int, page_count: int) -> None:
    """Raise ValueError, naming the field, unless a runner can run ``batch`` safely."""
    for name, ndim in (
        ("tokens", 1),
        ("positions", 1),
        ("sequence_starts", 1),
        ("tables", 2),
        ("logit_rows", 1),
    ):
        array = getattr(batch, name)
        if array.dtype != np.int32 or array.ndim != ndim or not array.flags.c_contiguous:
            raise ValueError(f"{name}: must be int32, contiguous, with {ndim} dimension(s)")
    rows = len(batch.tokens)
    starts, positions, tables = batch.sequence_starts, batch.positions, batch.tables
    if rows == 0:
        raise ValueError("tokens: empty")
    if not _within(batch.tokens, vocab_size):
        raise ValueError(f"tokens: an id is not in 0..{vocab_size - 1}")
    if len(positions) != rows or positions.min() < 0:
        raise ValueError(f"positions: must be {rows} numbers of at least 0")
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != rows or (starts[1:] <= starts[:-1]).any():
        raise ValueError(f"sequence_starts: must increase from 0 to {rows}")
    falls = np.diff(positions) <= 0
    falls[starts[1:-1] - 1] = False
    if falls.any():
        raise ValueError("positions: must increase within a sequence")
    if len(tables) != len(starts) - 1:
        raise ValueError(f"tables: must have {len(starts) - 1} rows")
    used = positions[starts[1:] - 1] // page_size + 1
    if used.max() > tables.shape[1]:
        raise ValueError(f"tables: {used.max()} pages are needed, {tables.shape[1]} are named")
    named = tables[np.arange(tables.shape[1]) < used[:, None]]
    if not _within(named, page_count):
        raise ValueError(f"tables: a page is not in 0..{page_count - 1}")
    wanted = batch.logit_rows
    if not _within(wanted, rows) or (np.diff(wanted) <= 0).any():
        raise ValueError(f"logit_rows: must increase within 0..{rows - 1}")


def _within(values: NDArray[np.int32], limit: int) -> bool:
    return values.size == 0 or bool(values.min() >= 0 and values.max() < limit)
