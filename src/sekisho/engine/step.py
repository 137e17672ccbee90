"""One forward pass over rows of several requests, and the check that must follow it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sekisho.core.errors import Evidence
from sekisho.core.table import BlockTable
from sekisho.engine.batch import Batch, Runner
from sekisho.engine.pages import PageManager


class Work(NamedTuple):
    """Rows of one request: ``tokens`` come behind the table's ``length``; its pages have room."""

    table: BlockTable
    tokens: Sequence[int]
    wants_logits: bool


class StepResult(NamedTuple):
    """``logits`` fp32 [n, vocab]: one row for each work that wanted them, in order, failed ones
    included. ``failed``: evidence by request; nothing of these may leave the node."""

    logits: NDArray[np.float32]
    failed: dict[int, tuple[Evidence, ...]]


def run_step(runner: Runner, pages: PageManager, works: Sequence[Work]) -> StepResult:
    """Verify before release.

    The pages are compared after the pass and not before: a foreign write that lands while it
    runs shows in a header, and what was computed from it is dropped. Only then do the requests'
    own headers move on, in the words that a foreign header would not leave intact.
    """
    batch = _batch(works)
    logits = runner.forward(batch)
    read = [
        batch.tables[i, : len(work.table.pages)].astype(np.intp) for i, work in enumerate(works)
    ]
    failed = pages.verify([work.table for work in works], read)
    for work in works:
        if work.table.request not in failed:
            work.table.append(work.tokens, pages.memory)
    return StepResult(logits, failed)


def _batch(works: Sequence[Work]) -> Batch:
    lengths = [len(work.tokens) for work in works]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    widest = max(len(work.table.pages) for work in works)
    tables = np.full((len(works), widest), -1, np.int32)
    for i, work in enumerate(works):
        tables[i, : len(work.table.pages)] = work.table.pages
    wanted = [starts[i + 1] - 1 for i, work in enumerate(works) if work.wants_logits]
    return Batch(
        tokens=np.array([token for work in works for token in work.tokens], np.int32),
        positions=np.concatenate(
            [
                np.arange(work.table.length, work.table.length + len(work.tokens), dtype=np.int32)
                for work in works
            ]
        ),
        sequence_starts=starts,
        tables=tables,
        logit_rows=np.array(wanted, np.int32),
    )
