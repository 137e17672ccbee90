"""The guard in a vLLM worker: headers beside the blocks, compared before tokens leave.

    prepare   rows of the block table are those that the scheduler vouches for, else repaired
    bind      headers of blocks that were handed out are blanked, before any transfer begins
    forward
    save      headers of every row once more, then the ones that this step earned
    arrivals  what a transfer brought is this prompt, whole; then decode's own headers

Two arrays of headers: the side-car, which the inner connector moves with the blocks and anybody
may write, and a private copy of what it must be. A difference is a write that nobody was granted.
"""

from typing import Any

import numpy as np
import torch

from sekisho.core.errors import Evidence
from sekisho.core.ledger import Pages
from sekisho.core.memory import Headers
from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.guard.sockets import unread
from sekisho.guard.vllm.headers import differences
from sekisho.guard.vllm.messages import Found, Load, Row, StepMeta, WorkerMeta
from sekisho.guard.vllm.witness import Witness

Tensor = torch.Tensor


class Worker:
    """Of one worker process. ``witness``: decode's, for connectors that read.

    Attributes:
        tensor: the side-car, uint8 [block_count, 64], in the host's memory.
    """

    def __init__(
        self, layout: PageLayout, block_count: int, witness: Witness | None = None
    ) -> None:
        self.layout = layout
        self._witness = witness
        self.tensor = torch.zeros((block_count, HEADER_SIZE), dtype=torch.uint8)
        self.headers = Headers(self.tensor.numpy().reshape(-1), layout, block_count, HEADER_SIZE)
        self._must = Headers(
            np.zeros(block_count * HEADER_SIZE, np.uint8), layout, block_count, HEADER_SIZE
        )
        self._loads: dict[str, Load] = {}
        self._begun: set[str] = set()
        self._meta: StepMeta | None = None
        self._found: Found = {}
        self._landed: dict[str, int] = {}
        self._in_doubt: dict[str, int] = {}
        self._quiet: dict[str, int] = {}

    # -- before the forward pass

    def check_rows(self, meta: StepMeta, runner: Any) -> None:
        """``runner`` has prepared its inputs: what attention will read, and where it will write.

        A row that leads elsewhere is repaired, and so are the slots that its tokens go to; its
        request loses the token.
        """
        batch = runner.input_batch
        table = batch.block_table.block_tables[0]
        count = batch.num_reqs
        given = table.get_device_tensor(count)
        have = given.cpu().numpy()
        lengths = table.num_blocks_per_row
        first = runner.query_start_loc.np
        for i, name in enumerate(batch.req_ids[:count]):
            row = meta.rows.get(name)
            if row is None or name in meta.doomed:
                self._doom(name, "step", (Evidence("row", 0, -1, "a vouched row", "none"),))
                row = np.zeros(len(have[i]), np.int32)  # vLLM's own padding block
            elif lengths[i] == len(row) and np.array_equal(have[i, : len(row)], row):
                continue
            else:
                self._doom(name, "step", _row_evidence(row, have[i, : lengths[i]]))
            self._repair(runner, table, i, row, slice(int(first[i]), int(first[i + 1])))

    def _repair(self, runner: Any, table: Any, i: int, row: Row, tokens: slice) -> None:
        """Row and slots of request ``i`` of the batch, as they should have been."""
        table.get_numpy_array()[i, : len(row)] = row
        given = table.get_device_tensor(i + 1)
        given[i, : len(row)] = torch.as_tensor(row).to(given)
        start = int(runner.input_batch.num_computed_tokens_cpu[i])
        positions = np.arange(start, start + tokens.stop - tokens.start)
        size = table.block_size
        slots = row[positions // size].astype(np.int64) * size + positions % size
        target = table.slot_mapping.gpu
        target[tokens] = torch.as_tensor(slots).to(target)

    def bind(self, meta: StepMeta) -> None:
        self._meta = meta
        if len(meta.fresh):
            fresh = meta.fresh.astype(np.intp)
            self.headers.blank(fresh)
            self._must.blank(fresh)
        self._loads |= meta.loads
        # What had arrived before the writer was over is written when it is read.
        if meta.settling and not unread():
            self._quiet.update(dict.fromkeys(meta.settling, 1))

    # -- after it

    def after_forward(self) -> None:
        """Every header of every row of this step, and then the headers of what it wrote."""
        meta = self._meta
        if meta is None:
            return
        self._check_headers(meta)
        if not len(meta.blocks):
            return
        blocks, words = meta.blocks.astype(np.intp), meta.words
        failed = self._found.keys() | meta.doomed
        if failed:
            sound = np.array([name not in failed for name in meta.names], bool)
            blocks, words = blocks[sound], words[sound]
        self._must.words[blocks] = words
        self.headers.words[blocks] = words

    def _check_headers(self, meta: StepMeta) -> None:
        if not meta.rows:
            return
        rows = list(meta.rows.values())
        pages = np.concatenate(rows).astype(np.intp)
        have, want = self.headers.gather(pages), self._must.gather(pages)
        if np.array_equal(have, want):
            return
        ends = np.cumsum([len(row) for row in rows]).tolist()
        for name, row, end in zip(meta.rows, rows, ends, strict=True):
            part = slice(end - len(row), end)
            evidence = differences(pages[part], want[part], have[part])
            if evidence:
                self._doom(name, "release", evidence)

    # -- what transfers brought

    def failed(self, blocks: set[int], names: set[str]) -> None:
        """The inner connector could not fill these; it may say so before the transfer is over."""
        for name, load in self._loads.items():
            if name in names or not blocks.isdisjoint(load.blocks.tolist()):
                load.failed = True

    def reads(self, name: str) -> None:
        """The inner connector reads, and begins to for ``name``."""
        self._begun.add(name)

    def witnessed(self, names: set[str]) -> set[str]:
        """Of ``names`` and of those before, the ones that need no witness any more."""
        if self._witness is None:
            return names
        out = set()
        for name in names:
            load = self._loads.get(name)
            if load is None or load.failed or not load.source:
                out.add(name)
            else:
                self._witness.ask(name, load.source, load.workers)
        for name, held in self._witness.take().items():
            self._loads[name].lapsed = not held
            out.add(name)
        return out

    def arrived(self, names: set[str]) -> set[str]:
        """The inner connector says that these are over; returns those that fail."""
        failing = set()
        for name in names & self._loads.keys():
            load = self._loads.pop(name)
            in_doubt = load.failed and self._may_write(name)
            self._begun.discard(name)
            if in_doubt:
                self._in_doubt[name] = 1
                continue
            self._landed[name] = 1
            evidence = self._compare(load)
            if evidence:
                self._doom(name, "arrival", evidence)
                failing.add(name)
        return failing

    def _may_write(self, name: str) -> bool:
        """Whether the load of ``name``, which failed, may have anything under way: where decode
        reads, not before it has begun to."""
        return self._witness is None or name in self._begun

    def _compare(self, load: Load) -> tuple[Evidence, ...]:
        if load.failed:
            return (Evidence("load", 0, -1, "a read", "none was begun"),)
        if load.lapsed:
            return (Evidence("load", 0, -1, "blocks that prefill holds", "it let go of them"),)
        evidence = differences(
            load.blocks, load.expected, self.headers.gather(load.blocks), any_serial=True
        )
        if not evidence:
            self._must.words[load.blocks] = load.own
            self.headers.words[load.blocks] = load.own
        return evidence

    def _doom(self, name: str, at: str, evidence: tuple[Evidence, ...]) -> None:
        self._found.setdefault(name, (at, evidence))

    def report(self, inner: Any = None) -> WorkerMeta | None:
        """What is new since the last report, with the inner connector's own; None if nothing is."""
        out = WorkerMeta(inner, self._found, self._landed, self._in_doubt, self._quiet)
        self._found, self._landed, self._in_doubt, self._quiet = {}, {}, {}, {}
        new = out.found or out.landed or out.in_doubt or out.quiet
        return out if new or inner is not None else None


def _row_evidence(want: Row, have: Row) -> tuple[Evidence, ...]:
    if len(want) != len(have):
        return (Evidence("length", 0, -1, f"{len(want)} blocks", f"{len(have)} blocks"),)
    wrong: Pages = np.flatnonzero(want != have)[:16]
    return tuple(
        Evidence("row", 0, int(have[i]), f"block {want[i]} at {i}", f"block {have[i]}")
        for i in wrong
    )


_worker: Worker | None = None


def active() -> Worker | None:
    """The guard of this worker process, once it has begun."""
    return _worker


def begin(worker: Worker) -> None:
    """From here on vLLM's functions of this process lead through ``worker``."""
    global _worker  # noqa: PLW0603  # one worker a process, and vLLM's functions are global
    _worker = worker
