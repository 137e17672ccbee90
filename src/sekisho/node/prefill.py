"""What a prefill node does with offers: compute chunk by chunk, send page runs meanwhile.

    offer ─▶ queue ─▶ reserve ─▶ chunk, verify, seal, send ─▶ … ─▶ last page sent ─▶ Complete
    own pages      | LEASED ──────── SEALED/FREE at once: pinned by each write until it is over |

Sans-IO but for the transport: messages come in by `receive`, answers wait in ``outbox``.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from sekisho.core.errors import Evidence, RemoteOwnershipError
from sekisho.core.handoff import (
    AbortOffer,
    Answer,
    Effect,
    GiveHandoff,
    Offer,
    Reject,
    Send,
)
from sekisho.core.lease import Lease
from sekisho.core.memory import ORDINAL_WORD, make_headers
from sekisho.core.table import BlockTable
from sekisho.engine.batch import Runner
from sekisho.engine.pages import PageManager, Text
from sekisho.engine.step import Work, run_step
from sekisho.node.messages import Condemned, Join
from sekisho.transport import PageWrite, Status, Transport, TransportError


@dataclass(eq=False)
class _Job:
    """One admitted offer. ``sent``: ordinals below it are submitted, or decode has them."""

    peer: str
    offer: Offer
    give: GiveHandoff
    text: Text
    sent: int
    since: float
    table: BlockTable | None = None


@dataclass(eq=False)
class _Peer:
    """A decode node: its number in the transport, or why it has none; the last lease's serial."""

    number: int = -1
    refusal: str = ""
    offered: int = 0
    leases: set[Lease] = field(default_factory=set)


class PrefillNode:
    """Owns the queue of offers and the writes under way."""

    def __init__(
        self,
        runner: Runner,
        pages: PageManager,
        transport: Transport,
        *,
        tokens_max: int,
        chunk_tokens: int,
        queue_max: int,
        wait_max: float,
    ) -> None:
        self.outbox: list[tuple[str, Answer]] = []
        self.violations: list[Evidence] = []
        self.tokens_max = tokens_max
        self._runner = runner
        self._pages = pages
        self._transport = transport
        self._chunk_tokens = chunk_tokens
        self._queue_max = queue_max
        self._wait_max = wait_max
        self._peers: dict[str, _Peer] = {}
        self._jobs: dict[Lease, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._tickets: dict[int, tuple[_Job, int]] = {}
        self._condemned = False

    # -- what comes in

    def receive(self, peer: str, message: Join | Offer | AbortOffer, now: float) -> None:
        """A decode node's word.

        Raises:
            RemoteOwnershipError: a lease is offered twice; nothing was changed.
        """
        match message:
            case Join():
                self._peers[peer] = self._join(message)
            case Offer():
                self._offer(peer, message, now)
            case AbortOffer(lease=lease):
                job = self._jobs.get(lease)
                # An unknown lease has had its one answer already, on the same ordered channel.
                if job is not None:
                    self._apply(job, job.give.abort())

    def peer_dead(self, peer: str) -> None:
        """That decode node's process has ended: stop writing to it."""
        gone = self._peers.pop(peer, None)
        if gone is None:
            return
        if gone.number >= 0:
            self._transport.disconnect(gone.number)
        for lease in list(gone.leases):
            job = self._jobs[lease]
            self._apply(job, job.give.broken("the decode node died"))

    def to_gateway(self) -> list[Condemned]:
        """What the gateway must know, once."""
        told, self._condemned = self._condemned, self._pages.condemned
        return [Condemned()] if self._condemned and not told else []

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._tickets

    @property
    def transferring(self) -> bool:
        """Completions are to be polled for."""
        return bool(self._tickets)

    def counts(self) -> dict[str, int]:
        """Offers waiting and running, writes under way."""
        counts = {"waiting": len(self._queue), "running": len(self._running)}
        return {**counts, "transferring": len(self._tickets)}

    # -- one step

    def step(self, now: float) -> bool:
        """Collect completions, admit, compute one batch of chunks, send what became full."""
        self._collect()
        self._refuse_overdue(now - self._wait_max)
        self._admit()
        works = self._works()
        if not works:
            return False
        result = run_step(self._runner, self._pages, [work for _, work in works])
        for evidence in result.failed.values():
            self._pages.condemn(evidence)
            self.violations.extend(evidence)
        for job, _ in works:
            if job.offer.request in result.failed:
                self._apply(job, job.give.broken("a source page changed hands"))
            else:
                self._send(job)
        return True

    # -- private

    def _join(self, join: Join) -> _Peer:
        if join.layout != self._pages.layout.fingerprint:
            return _Peer(refusal="model or page layout differ between prefill and decode")
        try:
            return _Peer(self._transport.connect(join.endpoint))
        except TransportError as error:
            return _Peer(refusal=str(error))

    def _offer(self, peer: str, offer: Offer, now: float) -> None:
        known = self._peers.get(peer)
        if known is not None:
            # Leases grow, and offers keep their order: so one that comes again is known for good,
            # and not only until its job is forgotten.
            if offer.lease.serial <= known.offered:
                raise RemoteOwnershipError(f"{offer.lease} is offered twice")
            known.offered = offer.lease.serial
        code, reason = self._refusal(peer, offer)
        text = self._pages.text(offer.scope, [] if code else offer.tokens)
        if not code and text.digests[-1] != offer.token_digest:
            code, reason = "ownership_violation", "the offer's tokens are not the ones it names"
        if code:
            self.outbox.append((peer, Reject(offer.lease, code, reason)))
            return
        job = _Job(peer, offer, GiveHandoff(offer), text, offer.first_ordinal, now)
        self._jobs[offer.lease] = job
        self._peers[peer].leases.add(offer.lease)
        self._queue.append(job)

    def _refusal(self, peer: str, offer: Offer) -> tuple[str, str]:
        """Outcome code and reason, judged on the offer's original length; empty: admitted."""
        known = self._peers.get(peer, _Peer(refusal="offer before join"))
        layout = self._pages.layout
        if known.refusal:
            return "transfer_failed", known.refusal
        if len(offer.tokens) > self.tokens_max:
            text = f"prefill holds {self.tokens_max} tokens, the request needs {len(offer.tokens)}"
            return "context_length_exceeded", text
        if len(self._queue) >= self._queue_max:
            text = f"{len(self._queue)} offers are waiting, the limit is {self._queue_max}"
            return "queue_full", text
        pages = layout.pages_for(len(offer.tokens)) - offer.first_ordinal
        if offer.layout != layout.fingerprint or len(offer.pages) != pages or pages < 1:
            return "ownership_violation", "the offer does not fit the page layout"
        return "", ""

    def _refuse_overdue(self, before: float) -> None:
        """Offers that got no pages for too long: nothing was touched for them yet."""
        while self._queue and self._queue[0].since < before:
            job = self._queue.popleft()
            text = f"prefill had no pages for this request within {self._wait_max:g} s"
            self.outbox.append((job.peer, Reject(job.offer.lease, "capacity_exceeded", text)))
            self._forget(job)

    def _admit(self) -> None:
        while self._queue:
            job = self._queue[0]
            offer = job.offer
            job.table = self._pages.reserve(offer.request, offer.scope, job.text, remote=False)
            if job.table is None:
                return
            self._queue.popleft()
            self._running.append(job)
            self._send(job)

    def _works(self) -> list[tuple[_Job, Work]]:
        works, budget = [], self._chunk_tokens
        for job in self._running:
            if budget > 0 and job.table is not None:
                start = job.table.length
                chunk = job.offer.tokens[start : start + budget]
                budget -= len(chunk)
                works.append((job, Work(job.table, chunk, wants_logits=False)))
        return works

    def _send(self, job: _Job) -> None:
        """Submit the pages that became full; with the last one, the job is only writes."""
        table, offer = job.table, job.offer
        if table is None or not job.give.writing:
            return
        self._pages.seal_full(table)
        last = table.length == len(offer.tokens)
        end = len(table.pages) if last else table.sealed
        if end > job.sent:
            # Checked at the source too: a page is read by the transport from here on.
            evidence = self._pages.verify([table]).get(offer.request, ())
            if evidence:
                self._pages.condemn(evidence)
                self.violations.extend(evidence)
                self._apply(job, job.give.broken("a source page changed hands"))
                return
            self._submit(job, table, job.sent, end)
            job.sent = end
        if last:
            shared = offer.first_ordinal * self._pages.layout.page_size
            self._apply(job, job.give.last(shared))

    def _submit(self, job: _Job, table: BlockTable, start: int, end: int) -> None:
        layout, offer = self._pages.layout, job.offer
        digests = [table.digest_at(ordinal) for ordinal in range(start, end)]
        if end > table.sealed:  # the last page, partly filled: here its digest is still to come
            digests[-1] = offer.token_digest
        words = make_headers(
            layout,
            offer.lease.incarnation,
            np.full(end - start, offer.lease.serial, np.uint64),
            start,
            table.words[start:end, ORDINAL_WORD] >> np.uint64(32),
            digests,
        )
        source = table.pages[start:end]
        if self._pages.policy.payload_digests:
            for row, page in enumerate(source):
                words[row, 6:8] = self._pages.memory.digest_words(int(page))
        writes = [
            PageWrite(int(page), offer.pages[ordinal - offer.first_ordinal], header.tobytes())
            for ordinal, page, header in zip(range(start, end), source, words, strict=True)
        ]
        grant = self._pages.pool.pin(source)
        ticket = self._transport.submit(self._peers[job.peer].number, writes)
        self._tickets[ticket] = (job, grant)
        tokens = min(end * layout.page_size, table.length) - start * layout.page_size
        self._apply(job, job.give.submit(end - start, tokens))

    def _collect(self) -> None:
        for ticket, status, detail in self._transport.poll():
            job, grant = self._tickets[ticket]
            if status is Status.UNKNOWN:
                self._apply(job, job.give.in_doubt(detail))
                continue
            del self._tickets[ticket]
            self._pages.settle(grant)
            landed = status is Status.DONE
            self._apply(job, job.give.landed() if landed else job.give.lost(detail))

    def _apply(self, job: _Job, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and not isinstance(effect.message, AbortOffer):
                self.outbox.append((job.peer, effect.message))
        if not job.give.writing:
            self._retire(job)
        if job.give.closed:
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        self._jobs.pop(job.offer.lease, None)
        if job.peer in self._peers:
            self._peers[job.peer].leases.discard(job.offer.lease)

    def _retire(self, job: _Job) -> None:
        """Nothing more is computed for this job: its pages go, those being read stay pinned."""
        if job in self._queue:
            self._queue.remove(job)
        if job in self._running:
            self._running.remove(job)
        if job.table is not None:
            self._pages.release(job.table)
            job.table = None
