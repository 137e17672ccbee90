"""Continuous batching on a node that decodes: who waits, who runs, who must give way.

    WAITING ──reserve──▶ TRANSFERRING ──committed──▶ DECODING ──▶ ENDED
       ▲     └─reserve──▶ PREFILLING (colocated) ──▶    │
       └───────────────── preempted ────────────────────┘

First come, first served. A request reserves pages for its whole prompt and then grows page by
page. When no page is free, the youngest one that decodes or prefills gives all of its pages back
and is computed again later; since the numerics do not depend on the batch, to the same bits.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from sekisho.core.errors import Evidence
from sekisho.core.outcome import Kind, Outcome
from sekisho.core.table import BlockTable
from sekisho.engine.batch import Runner
from sekisho.engine.output import Delta, Ended
from sekisho.engine.pages import PageManager, Text
from sekisho.engine.sequence import Phase, Sequence
from sekisho.engine.step import Work, run_step


class Scheduler:
    """Sans-IO: requests come in by `add`, released text is in ``outputs``, drained by the caller.

    Args:
        local_prefill: prompts are computed here. Otherwise each reserved sequence appears in
            ``handoffs``, and the caller reports `committed` or `finish`.
        tokens_max: prompt plus answer that every role can hold.
    """

    def __init__(
        self,
        runner: Runner,
        pages: PageManager,
        *,
        tokens_max: int,
        batch_max: int,
        chunk_tokens: int,
        queue_max: int,
        local_prefill: bool,
    ) -> None:
        self.outputs: list[Delta | Ended] = []
        self.handoffs: list[Sequence] = []
        self.violations: list[Evidence] = []
        self.tokens_max = tokens_max
        self._runner = runner
        self._pages = pages
        self._batch_max = batch_max
        self._chunk_tokens = chunk_tokens
        self._queue_max = queue_max
        self._local_prefill = local_prefill
        self._now = 0.0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._all: dict[int, Sequence] = {}

    # -- what the caller tells

    def add(self, sequence: Sequence) -> None:
        """Queue a request, or end it at once with the reason why it cannot be."""
        self._all[sequence.request] = sequence
        wanted = sequence.prompt_count + sequence.params.max_tokens
        if wanted > self.tokens_max:
            text = f"prompt and max_tokens are {wanted} tokens, the limit is {self.tokens_max}"
            self.finish(sequence, Outcome("context_length_exceeded", text))
        elif len(self._waiting) >= self._queue_max:
            text = f"{len(self._waiting)} requests are waiting, the limit is {self._queue_max}"
            self.finish(sequence, Outcome("queue_full", text))
        else:
            self._waiting.append(sequence)

    def get(self, request: int) -> Sequence | None:
        """The sequence of a request that has not ended."""
        return self._all.get(request)

    def committed(self, sequence: Sequence) -> None:
        """The remote writer's pages are proved and settled."""
        self._start_decoding(sequence)

    def finish(self, sequence: Sequence, outcome: Outcome) -> None:
        """End a request, whatever its phase; the first outcome counts, a second changes nothing.

        The caller has already told the writer of a TRANSFERRING one.
        """
        if not sequence.outcome.settle(outcome):
            return
        if sequence.phase is Phase.WAITING and sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence.table is not None:
            if outcome.kind is Kind.FINISHED:
                self._pages.seal_full(sequence.table)
            self._pages.release(sequence.table)
            sequence.table = None
        sequence.phase = Phase.ENDED
        del self._all[sequence.request]
        self.outputs.append(
            Ended(
                sequence.request,
                outcome.code,
                outcome.message,
                sequence.output_count,
                sequence.cached_tokens,
            )
        )

    def overdue(self, phase: Phase, before: float) -> list[Sequence]:
        """Requests in ``phase`` that have been waiting since before a point in time."""
        return [s for s in self._all.values() if s.phase is phase and s.since < before]

    def counts(self) -> dict[str, int]:
        """Requests waiting and running."""
        return {"waiting": len(self._waiting), "running": len(self._running)}

    @property
    def idle(self) -> bool:
        """Nothing is left to do, now or after somebody else's word."""
        return not self._all

    # -- one step

    def step(self, now: float) -> bool:
        """Admit, run one forward pass, release what was verified; False if there was no work."""
        self._now = now
        self._admit()
        works = self._decode_works() + self._prefill_works()
        if not works:
            return False
        result = run_step(self._runner, self._pages, [work for _, work in works])
        # Condemn before anything is released: a released page could be granted again at once.
        for evidence in result.failed.values():
            self._pages.condemn(evidence)
            self.violations.extend(evidence)
        row = 0
        for sequence, work in works:
            logits = result.logits[row] if work.wants_logits else None
            row += work.wants_logits
            if sequence.request in result.failed:
                kind = result.failed[sequence.request][0].kind
                text = f"a page of this request changed hands: {kind}"
                self.finish(sequence, Outcome("ownership_violation", text))
            elif logits is None:
                self._after_chunk(sequence)
            else:
                self._after_token(sequence, logits)
        return True

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._batch_max:
            sequence = self._waiting[0]
            if sequence.wanted is None:
                sequence.wanted = self._wanted(sequence)
            table = self._pages.reserve(
                sequence.request, sequence.scope, sequence.wanted, remote=not self._local_prefill
            )
            if table is None:
                return
            sequence.wanted = None
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.table = table
            if sequence.output_count == 0:
                sequence.cached_tokens = table.shared * self._pages.layout.page_size
            if table.shared * self._pages.layout.page_size == len(sequence.tokens) - 1:
                self._start_decoding(sequence)
            elif self._local_prefill:
                sequence.phase = Phase.PREFILLING
            else:
                sequence.phase = Phase.TRANSFERRING
                self.handoffs.append(sequence)

    def _wanted(self, sequence: Sequence) -> Text:
        """What it must get pages for. A text that fills its pages needs one more for the next
        token: without it, one that was preempted for want of that page would be, for ever."""
        text = self._pages.text(sequence.scope, sequence.held())
        full = len(text.tokens) % self._pages.layout.page_size == 0
        return text._replace(spare=int(full))

    def _start_decoding(self, sequence: Sequence) -> None:
        sequence.phase = Phase.DECODING
        self._pages.seal_full(_table(sequence))

    def _decode_works(self) -> list[tuple[Sequence, Work]]:
        for sequence in list(self._running):
            if sequence.phase is Phase.DECODING:
                self._ensure_slot(sequence)
        return [
            (sequence, Work(_table(sequence), sequence.tokens[-1:], wants_logits=True))
            for sequence in self._running
            if sequence.phase is Phase.DECODING
        ]

    def _prefill_works(self) -> list[tuple[Sequence, Work]]:
        works, budget = [], self._chunk_tokens
        for sequence in self._running:
            if sequence.phase is Phase.PREFILLING and budget > 0:
                table = _table(sequence)
                end = min(table.length + budget, len(sequence.tokens) - 1)
                chunk = sequence.tokens[table.length : end]
                budget -= len(chunk)
                works.append((sequence, Work(table, chunk, wants_logits=False)))
        return works

    def _ensure_slot(self, sequence: Sequence) -> None:
        while sequence.phase is Phase.DECODING:
            table = _table(sequence)
            if table.length < table.capacity or self._pages.grow(table):
                return
            phases = (Phase.DECODING, Phase.PREFILLING)
            self._preempt([s for s in self._running if s.phase in phases][-1])

    def _preempt(self, sequence: Sequence) -> None:
        self._pages.release(_table(sequence))
        sequence.table = None
        sequence.phase = Phase.WAITING
        sequence.since = self._now
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)

    def _after_chunk(self, sequence: Sequence) -> None:
        if _table(sequence).length == len(sequence.tokens) - 1:
            self._start_decoding(sequence)

    def _after_token(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        try:
            delta, end = sequence.next_token(logits)
        except ValueError as error:
            self.finish(sequence, Outcome("internal_error", str(error)))
            return
        self.outputs.append(delta)
        if end is not None:
            self.finish(sequence, end)


def _table(sequence: Sequence) -> BlockTable:
    if sequence.table is None:
        raise RuntimeError(f"request {sequence.request} has no pages in {sequence.phase}")
    return sequence.table
