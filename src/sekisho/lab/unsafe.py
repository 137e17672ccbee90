"""The unsafe engine: production classes, with the smallest method replaced that a defect needs.

Nothing else of ``sekisho`` imports this module, no setting names it, and it refuses a policy that
serves tenants. What is not replaced here runs as in ``sekisho serve``: scheduler, model, sampler,
reservation, chunks, writes, transport, release.

One thing differs from the engine of the incident: there, prefill also sampled the first token, from
the placeholder. Here decode computes the last token of the prompt itself, as it always does, and
attends to the same pages for it.
"""

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sekisho.core.errors import Evidence
from sekisho.core.handoff import Complete, Offer, Reject, TakeHandoff
from sekisho.core.ledger import Pages
from sekisho.core.memory import PageMemory
from sekisho.core.outcome import Outcome, OutcomeCell
from sekisho.core.page import PageLayout, payload_digest
from sekisho.core.pool import Pool
from sekisho.core.table import BlockTable
from sekisho.engine.batch import Runner
from sekisho.engine.pages import Text
from sekisho.engine.policy import POLICIES, Policy
from sekisho.engine.scheduler import Scheduler
from sekisho.engine.sequence import Sequence
from sekisho.engine.tokenizer import Tokenizer
from sekisho.lab.erasing import ErasingPages, zero
from sekisho.lab.results import PageView
from sekisho.lab.switches import Switches
from sekisho.node.decode import DecodeNode
from sekisho.node.prefill import PrefillNode
from sekisho.transport import Transport

PLACEHOLDER = 0  # the token id that SGLang puts in the place of a prompt it refuses
OWNERS = {"tenant-a": "A", "tenant-b": "B"}
_WAIT_S = 600.0


class LabError(RuntimeError):
    """The lab was asked for something that it must not do; one line."""


def lab_policy(switches: Switches) -> Policy:
    """Isolation ``off`` without reuse, and of the rest what ``switches`` restore."""
    return POLICIES["off"]._replace(
        checks=switches.compares or switches.guards("step-check"),
        payload_digests=switches.guards("payload-digest"),
        reuse=False,
        scrub=switches.guards("scrub-on-free"),
    )


class LabMemory(PageMemory):
    """Defect ``no-erase``: not even the headers of granted pages are blanked."""

    def __init__(
        self, buffer: NDArray[np.uint8], layout: PageLayout, page_count: int, switches: Switches
    ) -> None:
        super().__init__(buffer, layout, page_count)
        self._keeps = not switches.erases

    def blank(self, pages: Pages) -> None:
        if not self._keeps:
            super().blank(pages)

    def scrub(self, pages: Pages) -> None:
        super().blank(pages)
        zero(self, pages)


class LabPages(ErasingPages):
    """Pages of an engine with ``switches``, and a record of whose bytes lie in them.

    ``before`` and ``after`` are, by request, the views of a table that another node fills: as
    reserved, and as handed to the first decode step. ``left``: who used a page last, and the
    digest of what he left.

    Raises:
        LabError: the policy serves tenants.
    """

    memory: LabMemory

    def __init__(self, memory: LabMemory, pool: Pool, policy: Policy, switches: Switches) -> None:
        if policy.tenants:
            raise LabError("the lab's engine is unsafe on purpose and never serves tenants")
        super().__init__(memory, pool, policy)
        self.switches = switches
        self.erases = switches.erases
        self.before: dict[int, list[PageView]] = {}
        self.after: dict[int, list[PageView]] = {}
        self.left: dict[int, tuple[str, bytes]] = {}

    def reserve(self, request: int, scope: str, text: Text, remote: bool) -> BlockTable | None:
        table = super().reserve(request, scope, text, remote)
        if table is not None and remote:
            self.before[request] = self._view(table)
        return table

    def verify(
        self, tables: Many[BlockTable], read: Many[Pages] | None = None
    ) -> dict[int, tuple[Evidence, ...]]:
        """The check of every step, if it is restored."""
        return super().verify(tables, read) if self.switches.guards("step-check") else {}

    def prove(self, table: BlockTable) -> tuple[Evidence, ...]:
        """The check at the hand-off, whether or not that of the steps is restored."""
        if self.policy.payload_digests:
            table.expect_payloads(self.memory, table.shared)
        return super().verify([table]).get(table.request, ())

    def checksum(self, table: BlockTable, page_count: int) -> tuple[Evidence, ...]:
        """Of the first ``page_count`` own pages: is the payload the one its header was made for?"""
        if not self.policy.payload_digests:
            return ()
        table.expect_payloads(self.memory, table.shared)
        found = []
        for page in table.pages[table.shared :][:page_count].tolist():
            want, have = self.memory.words[page, 6:8], self.memory.digest_words(page)
            if not np.array_equal(want, have):
                texts = want.tobytes().hex(), have.tobytes().hex()
                found.append(Evidence("corrupt", table.request, page, *texts))
        return tuple(found)

    def seal_full(self, table: BlockTable) -> None:
        if table.request in self.before and table.request not in self.after:
            self.after[table.request] = self._view(table)
        super().seal_full(table)

    def release(self, table: BlockTable) -> None:
        for page in table.pages.tolist():
            # Whoever had the page before counts, where this request wrote nothing.
            if self._owner(page, table) == OWNERS.get(self._scope(table), "other"):
                digest = payload_digest(self.memory.payload(page))
                self.left[page] = (self._scope(table), digest)
        super().release(table)

    def _view(self, table: BlockTable) -> list[PageView]:
        views = []
        for ordinal, page in enumerate(table.pages.tolist()):
            header = self.memory.words[page]
            expected = bool(np.array_equal(header, table.words[ordinal]))
            filled = int(header[3]) >> 32
            views.append(PageView(ordinal, page, self._owner(page, table), filled, expected))
        return views

    def _owner(self, page: int, table: BlockTable) -> str:
        payload = self.memory.payload(page)
        if not payload.any():
            return "empty"
        scope, digest = self.left.get(page, ("", b""))
        if digest != payload_digest(payload):
            scope = self._scope(table)
        return OWNERS.get(scope, "other")

    def _scope(self, table: BlockTable) -> str:
        return self._scopes[table.lease.serial]


class _Request:
    """Prefill's record of a prompt above its pool, as the engine of the incident kept it: the
    verdict in one field, and `finished` reads another. With ``one_outcome`` they are one cell."""

    def __init__(self, offer: Offer, one_outcome: bool) -> None:
        self.offer = offer
        self.to_finish = OutcomeCell()
        self.finish_reason = self.to_finish if one_outcome else OutcomeCell()

    def abort(self, outcome: Outcome, placeholder: Text) -> None:
        """Refuse the request by making a short one of it."""
        self.to_finish.settle(outcome)
        self.offer = replace(
            self.offer,
            tokens=list(placeholder.tokens),
            token_digest=placeholder.digests[-1],
            pages=self.offer.pages[: len(placeholder.digests)],
        )

    def finished(self) -> bool:
        return self.finish_reason.value is not None


class UnsafePrefill(PrefillNode):
    """Defects ``placeholder`` and ``finished``; all that follows them is production code, which
    here computes, sends and truthfully reports one page."""

    def __init__(self, runner: Runner, pages: LabPages, transport: Transport) -> None:
        super().__init__(
            runner,
            pages,
            transport,
            tokens_max=pages.tokens_max,
            chunk_tokens=1024,
            queue_max=4,
            wait_max=_WAIT_S,
        )
        self._switches = pages.switches

    def _offer(self, peer: str, offer: Offer, now: float) -> None:
        switches = self._switches
        fits = len(offer.tokens) <= self.tokens_max
        if fits or not switches.has("placeholder") or switches.guards("admission"):
            super()._offer(peer, offer, now)
            return
        request = _Request(offer, switches.guards("one-outcome"))
        _, text = self._refusal(peer, offer)
        verdict = Outcome("context_length_exceeded", text)
        request.abort(verdict, self._pages.text(offer.scope, [PLACEHOLDER]))
        pending = request.to_finish.value is not None
        if request.finished() if switches.has("finished") else pending:
            self.outbox.append((peer, Reject(offer.lease, verdict.code, verdict.message)))
        else:
            super()._offer(peer, request.offer, now)


class _Credulous(TakeHandoff):
    """Defect ``no-compare``: whatever the counts say, it is complete."""

    def __init__(self, offer: Offer, pages: LabPages, table: BlockTable) -> None:
        super().__init__(offer, pages.layout.page_size, lambda: ())
        self._pages = pages
        self._table = table

    def _compare(self, message: Complete) -> tuple[Evidence, ...]:
        return self._pages.checksum(self._table, message.page_count)


class UnsafeDecode(DecodeNode):
    """A decode node that admits up to ``tokens_max`` tokens and, by ``no-compare``, believes."""

    def __init__(
        self,
        runner: Runner,
        pages: LabPages,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        tokens_max: int,
    ) -> None:
        scheduler = Scheduler(
            runner,
            pages,
            tokens_max=tokens_max,
            batch_max=4,
            chunk_tokens=1024,
            queue_max=4,
            local_prefill=False,
        )
        super().__init__(scheduler, pages, tokenizer, vocab_size=vocab_size, wait_max=_WAIT_S)
        self._lab_pages = pages

    def _offer(self, sequence: Sequence) -> None:
        super()._offer(sequence)
        table = sequence.table
        taking = self._takings.get(table.lease) if table is not None else None
        if table is not None and taking is not None and not self._lab_pages.switches.compares:
            taking.take = _Credulous(taking.take.offer, self._lab_pages, table)
