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
