"""What a decode (or colocated) node does with requests, offers and prefill's answers.

    reserve ─▶ pin ─▶ Offer ──────▶ Complete ─▶ prove ─▶ settle ─▶ commit ─▶ decode ─▶ release
    pages   | LEASED, pinned for the writer                    | LEASED         | SEALED | FREE
    abort:             release ─▶ QUARANTINED ─▶ Drained, or the writer's death ─▶ settle ─▶ FREE

Sans-IO: messages and the time come in, `to_gateway` and ``to_prefill`` are drained by the loop.
"""

from collections import deque
from dataclasses import dataclass

from sekisho.core.errors import Evidence, RemoteOwnershipError
from sekisho.core.handoff import (
    AbortOffer,
    Answer,
    Commit,
    Complete,
    Effect,
    End,
    Offer,
    Send,
    Settle,
    TakeHandoff,
    Writer,
)
from sekisho.core.lease import Lease
from sekisho.core.outcome import Outcome
from sekisho.engine.output import Delta, Ended
from sekisho.engine.pages import PageManager
from sekisho.engine.scheduler import Scheduler
from sekisho.engine.sequence import Phase, Sequence
from sekisho.engine.tokenizer import Tokenizer
from sekisho.node.messages import Abort, Condemned, Distrust, Generate

# A long prompt is computed for minutes, but a stopped prefill node is not waited for for ever.
_TRANSFER_FACTOR = 10


@dataclass(eq=False)
class _Taking:
    """One offer that is not closed: its request may have ended, its writer has not."""

    peer: str
    take: TakeHandoff
    sequence: Sequence
    grant: int


class DecodeNode:
    """Owns the scheduler and every hand-off whose writer is not terminal.

    Args:
        vocab_size: the model's; token ids of a prompt are below it.
        wait_max: seconds that a request may wait for pages here; one that waits for a prefill
            node may take ten times as long. Time ends requests, never the pinning of their pages.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pages: PageManager,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        wait_max: float,
    ) -> None:
        self.to_prefill: list[tuple[str, Offer | AbortOffer]] = []
        self.violations: list[Evidence] = []
        self._scheduler = scheduler
        self._pages = pages
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = {Phase.WAITING: wait_max, Phase.TRANSFERRING: _TRANSFER_FACTOR * wait_max}
        self._prefills: set[str] = set()
        self._chosen: dict[int, str] = {}
        self._takings: dict[Lease, _Taking] = {}
        self._notices: deque[Distrust | Condemned] = deque()
        self._condemned = False

    # -- what comes in

    def generate(self, message: Generate, now: float) -> None:
        """A new request; whatever is wrong with it, it gets its one `Ended`."""
        try:
            sequence = Sequence(
                message.request,
                message.scope,
                message.tokens,
                message.params,
                self._tokenizer,
                self._vocab_size,
                now,
            )
        except ValueError as error:  # the gateway lets none of these through
            end = Ended(message.request, "internal_error", str(error), 0, 0)
            self._scheduler.outputs.append(end)
            return
        self._chosen[message.request] = message.prefill
        self._scheduler.add(sequence)

    def abort(self, message: Abort) -> None:
        """The gateway gives a request up; unknown ones have ended already."""
        sequence = self._scheduler.get(message.request)
        if sequence is not None:
            self._end(sequence, Outcome("client_gone"))

    def prefill_up(self, name: str) -> None:
        """A prefill node can be offered to."""
        self._prefills.add(name)

    def prefill_dead(self, name: str) -> None:
        """That process has ended: it writes no more, and answers no more."""
        self._prefills.discard(name)
        for taking in [t for t in self._takings.values() if t.peer == name]:
            self._apply(taking, taking.take.writer_dead())

    def answer(self, peer: str, message: Answer) -> None:
        """Prefill's word about a lease.

        Raises:
            RemoteOwnershipError: no such lease is open with that node, or the protocol has no
                such step; nothing was changed.
        """
        taking = self._takings.get(message.lease)
        if taking is None or taking.peer != peer:
            raise RemoteOwnershipError(f"{message.lease}: {peer} has no open offer of it")
        self._apply(taking, taking.take.receive(message))
        if isinstance(message, Complete) and taking.take.writer is Writer.DISTRUSTED:
            self._notices.append(Distrust(peer))

    # -- what goes out

    def to_gateway(self) -> list[Delta | Ended | Distrust | Condemned]:
        """Everything for the gateway since the last call, in order."""
        outputs, self._scheduler.outputs = self._scheduler.outputs, []
        for output in outputs:
            if isinstance(output, Ended):
                self._chosen.pop(output.request, None)
        if self._pages.condemned and not self._condemned:
            self._condemned = True
            self._notices.append(Condemned())
        notices = list(self._notices)
        self._notices.clear()
        return [*outputs, *notices]

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._takings

    def counts(self) -> dict[str, int]:
        """Requests waiting and running, hand-offs whose writer is not terminal."""
        return {**self._scheduler.counts(), "transferring": len(self._takings)}

    def step(self, now: float) -> bool:
        """One scheduler step and the offers it asks for; False if there was no work."""
        for phase, limit in self._limits.items():
            for sequence in self._scheduler.overdue(phase, now - limit):
                text = f"{phase.value} for more than {limit:g} s"
                self._end(sequence, Outcome("capacity_exceeded", text))
        worked = self._scheduler.step(now)
        handoffs, self._scheduler.handoffs = self._scheduler.handoffs, []
        for sequence in handoffs:
            self._offer(sequence)
        self.violations.extend(self._scheduler.violations)
        self._scheduler.violations.clear()
        return worked

    # -- private

    def _offer(self, sequence: Sequence) -> None:
        table = sequence.table
        if table is None or sequence.phase is not Phase.TRANSFERRING:
            return
        peer = self._chosen[sequence.request]
        if peer not in self._prefills:  # it died while the request was waiting
            peer = min(self._prefills, default="")
        if not peer:
            self._scheduler.finish(sequence, Outcome("node_lost", "no prefill node is left"))
            return
        pages = table.pages[table.shared :]
        offer = Offer(
            lease=table.lease,
            request=sequence.request,
            scope=sequence.scope,
            tokens=sequence.held(),
            token_digest=table.digest_at(len(table.pages) - 1),
            first_ordinal=table.shared,
            pages=pages.tolist(),
            layout=self._pages.layout.fingerprint,
        )
        take = TakeHandoff(offer, self._pages.layout.page_size, lambda: self._pages.prove(table))
        grant = self._pages.pool.pin(pages)
        self._takings[offer.lease] = _Taking(peer, take, sequence, grant)
        self.to_prefill.append((peer, offer))

    def _end(self, sequence: Sequence, outcome: Outcome) -> None:
        lease = sequence.table.lease if sequence.table is not None else None
        taking = self._takings.get(lease) if lease is not None else None
        if taking is None:
            self._scheduler.finish(sequence, outcome)
        else:
            self._apply(taking, taking.take.abort(outcome.code, outcome.message))

    def _apply(self, taking: _Taking, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Settle():
                    self._pages.settle(taking.grant)
                case Commit():
                    self._scheduler.committed(taking.sequence)
                case End(code=code, message=message, evidence=evidence):
                    self.violations.extend(evidence)
                    self._scheduler.finish(taking.sequence, Outcome(code, message))
                case Send(message=AbortOffer() as message):
                    self.to_prefill.append((taking.peer, message))
        if taking.take.closed:
            self._takings.pop(taking.take.offer.lease, None)
