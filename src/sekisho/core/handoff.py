"""The hand-off of a request's pages from prefill to decode, as two state machines.

Rule 1. Decode says what it expects (`Offer`), prefill proves what it wrote (`Complete`), decode
        commits only if the two agree and every page's header says so.
Rule 2. The *request* and the *writer* are two lives. Aborting the request ends the first; only a
        word that proves that nothing more will land ends the second. Until then the pages are
        pinned. Silence, a time-out or a broken connection are not such a word; the death of the
        writer's process is.
Rule 3. Each `Offer` is answered with exactly one of `Reject`, `Complete`, or `Failed` followed by
        `Drained`; after an `AbortOffer` also by `Drained` alone. Messages keep their order.
Rule 4. A writer that claims to have completed and is proved wrong is distrusted: whatever it
        says afterwards, its pages stay pinned until it is known to be dead.

Everything that changes state is in the tables below; an event that has no entry raises and
changes nothing. (Reports that these rules answer: sglang#30233 short hand-off accepted, #32564
pages freed under a live writer, #38961 time-out as release, PR#35360 acknowledgement without
quiescence, vllm#52234 failed receive reported as finished.)
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from sekisho.core.errors import Evidence, LocalOwnershipError, RemoteOwnershipError
from sekisho.core.lease import Lease

# ---- messages


@dataclass(frozen=True, slots=True)
class Offer:
    """Decode to prefill: write the pages of ``tokens`` from ``first_ordinal`` on, under ``lease``,
    into ``pages`` of my region. ``token_digest`` is the chained digest over all of ``tokens``."""

    lease: Lease
    request: int
    scope: str
    tokens: list[int]
    token_digest: bytes
    first_ordinal: int
    pages: list[int]
    layout: int


@dataclass(frozen=True, slots=True)
class AbortOffer:
    """Decode to prefill: start no new write under ``lease``."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Reject:
    """Prefill to decode: refused, nothing was touched. ``code`` is an outcome code."""

    lease: Lease
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Prefill to decode: so many tokens in so many pages landed; nothing more will."""

    lease: Lease
    token_count: int
    page_count: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Prefill to decode: it will not be whole. Writes may still be under way."""

    lease: Lease
    detail: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Prefill to decode: no write under ``lease`` is under way, and none will start."""

    lease: Lease


Answer: TypeAlias = Reject | Complete | Failed | Drained

# ---- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the other side."""

    message: AbortOffer | Answer


@dataclass(frozen=True, slots=True)
class Commit:
    """The pages are proved: the request may decode."""


@dataclass(frozen=True, slots=True)
class End:
    """The request ends with this outcome code; drop its pages."""

    code: str
    message: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Settle:
    """The writer is terminal: settle its pin."""


Effect: TypeAlias = Send | Commit | End | Settle

# ---- decode's side


class Take(enum.StrEnum):
    OFFERED = "offered"
    COMMITTED = "committed"
    REJECTED = "rejected"
    FAILED = "failed"
    ABORTED = "aborted"


class Writer(enum.StrEnum):
    ACTIVE = "active"
    DISTRUSTED = "distrusted"
    TERMINAL = "terminal"


class TakeEvent(enum.StrEnum):
    COMPLETE_TRUE = "complete, proved"
    COMPLETE_FALSE = "complete, disproved"
    REJECT = "reject"
    FAILED = "failed"
    DRAINED = "drained"
    ABORT = "abort"
    WRITER_DEAD = "writer dead"


_T, _W, _E = Take, Writer, TakeEvent

TAKE_TRANSITIONS: dict[Take, dict[TakeEvent, Take]] = {
    _T.OFFERED: {
        _E.COMPLETE_TRUE: _T.COMMITTED,
        _E.COMPLETE_FALSE: _T.FAILED,
        _E.REJECT: _T.REJECTED,
        _E.FAILED: _T.FAILED,
        _E.ABORT: _T.ABORTED,
        _E.WRITER_DEAD: _T.FAILED,
    },
    _T.COMMITTED: {_E.ABORT: _T.COMMITTED, _E.WRITER_DEAD: _T.COMMITTED},
    _T.REJECTED: {_E.ABORT: _T.REJECTED, _E.WRITER_DEAD: _T.REJECTED},
    _T.FAILED: {_E.DRAINED: _T.FAILED, _E.ABORT: _T.FAILED, _E.WRITER_DEAD: _T.FAILED},
    _T.ABORTED: dict.fromkeys(_E, _T.ABORTED),
}
WRITER_TRANSITIONS: dict[Writer, dict[TakeEvent, Writer]] = {
    _W.ACTIVE: {
        _E.COMPLETE_TRUE: _W.TERMINAL,
        _E.COMPLETE_FALSE: _W.DISTRUSTED,
        _E.REJECT: _W.TERMINAL,
        _E.FAILED: _W.ACTIVE,
        _E.DRAINED: _W.TERMINAL,
        _E.ABORT: _W.ACTIVE,
        _E.WRITER_DEAD: _W.TERMINAL,
    },
    _W.DISTRUSTED: {_E.ABORT: _W.DISTRUSTED, _E.WRITER_DEAD: _W.TERMINAL},
    _W.TERMINAL: {_E.ABORT: _W.TERMINAL, _E.WRITER_DEAD: _W.TERMINAL},
}
# Joint rule: the hand-off may be forgotten once the writer is terminal and the request decided.
CLOSED: frozenset[tuple[Take, Writer]] = frozenset(
    (take, _W.TERMINAL) for take in Take if take is not _T.OFFERED
)


class TakeHandoff:
    """Decode's side of one offer. The caller has pinned the offered pages for the writer.

    Args:
        prove: compares the headers (and by policy the payloads) of the offered pages with what
            the block table expects, and returns evidence; called on every `Complete`, so that no
            caller can forget it.
    """

    def __init__(
        self, offer: Offer, page_size: int, prove: Callable[[], tuple[Evidence, ...]]
    ) -> None:
        self.offer = offer
        self.state = Take.OFFERED
        self.writer = Writer.ACTIVE
        self._page_count = -(-len(offer.tokens) // page_size) - offer.first_ordinal
        self._prove = prove

    @property
    def closed(self) -> bool:
        return (self.state, self.writer) in CLOSED

    def receive(self, message: Answer) -> list[Effect]:
        """Take prefill's word; raise `RemoteOwnershipError` where the tables have no such step."""
        if message.lease != self.offer.lease:
            raise LocalOwnershipError(f"{message.lease} is not the lease of this hand-off")
        match message:
            case Reject(code=code, message=text):
                return self._step(_E.REJECT, End(code, text))
            case Failed(detail=detail):
                return self._step(_E.FAILED, End("transfer_failed", detail))
            case Drained():
                return self._step(_E.DRAINED, None)
            case _:
                evidence = self._compare(message) or self._prove()
                if evidence:
                    text = f"what arrived is not what was offered: {evidence[0].kind}"
                    return self._step(_E.COMPLETE_FALSE, End("ownership_violation", text, evidence))
                return self._step(_E.COMPLETE_TRUE, None)

    def abort(self, code: str, message: str) -> list[Effect]:
        """The request is over here, for a reason of this side."""
        return self._step(_E.ABORT, End(code, message))

    def writer_dead(self) -> list[Effect]:
        """The writer's process has ended, as its parent saw: it writes no more."""
        return self._step(_E.WRITER_DEAD, End("node_lost", "the prefill node died"))

    def _compare(self, message: Complete) -> tuple[Evidence, ...]:
        offer = self.offer
        expected = (len(offer.tokens), self._page_count)
        found = (message.token_count, message.page_count)
        if found == expected:
            return ()
        text = "tokens={} pages={}"
        return (Evidence("count", offer.request, -1, text.format(*expected), text.format(*found)),)

    def _step(self, event: TakeEvent, end: End | None) -> list[Effect]:
        state = TAKE_TRANSITIONS[self.state].get(event)
        writer = WRITER_TRANSITIONS[self.writer].get(event)
        if state is None or writer is None:
            raise RemoteOwnershipError(
                f"{self.offer.lease}: no {event.value!r} in {self.state.value}/{self.writer.value}"
            )
        effects: list[Effect] = []
        if self.writer is not Writer.TERMINAL and writer is Writer.TERMINAL:
            effects.append(Settle())
        if self.state is Take.OFFERED and state is Take.COMMITTED:
            effects.append(Commit())
        elif self.state is Take.OFFERED and end is not None:
            effects.append(end)
        if self.state is Take.OFFERED and state is Take.ABORTED:
            effects.append(Send(AbortOffer(self.offer.lease)))
        self.state, self.writer = state, writer
        return effects


# ---- prefill's side


class Give(enum.StrEnum):
    WRITING = "writing"
    FINISHING = "finishing"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"
    DRAINED = "drained"


class GiveEvent(enum.StrEnum):
    SUBMIT = "submit"
    LAST = "last submitted"
    LANDED = "landed"
    LOST = "lost"
    IN_DOUBT = "in doubt"
    BROKEN = "broken here"
    ABORT = "abort"


_G, _V = Give, GiveEvent
_AFTER = (_V.LANDED, _V.LOST, _V.IN_DOUBT, _V.BROKEN, _V.ABORT)

GIVE_TRANSITIONS: dict[Give, dict[GiveEvent, Give]] = {
    _G.WRITING: {
        _V.SUBMIT: _G.WRITING,
        _V.LAST: _G.FINISHING,
        _V.LANDED: _G.WRITING,
        _V.LOST: _G.FAILED,
        _V.IN_DOUBT: _G.FAILED,
        _V.BROKEN: _G.FAILED,
        _V.ABORT: _G.ABORTED,
    },
    _G.FINISHING: {
        _V.LANDED: _G.FINISHING,
        _V.LOST: _G.FAILED,
        _V.IN_DOUBT: _G.FAILED,
        _V.BROKEN: _G.FAILED,
        _V.ABORT: _G.ABORTED,
    },
    _G.COMPLETED: {_V.ABORT: _G.COMPLETED},
    _G.FAILED: dict.fromkeys(_AFTER, _G.FAILED),
    _G.ABORTED: dict.fromkeys(_AFTER, _G.ABORTED),
    _G.DRAINED: {_V.ABORT: _G.DRAINED, _V.BROKEN: _G.DRAINED},
}
IN_FLIGHT: dict[GiveEvent, int] = {_V.SUBMIT: 1, _V.LANDED: -1, _V.LOST: -1}
# Joint rule: what is told of a write is illegal where none is under way.
OF_A_WRITE: frozenset[GiveEvent] = frozenset((_V.LANDED, _V.LOST, _V.IN_DOUBT))
# Joint rule: what a state becomes as soon as no write is under way.
GIVE_WHEN_QUIET: dict[Give, Give] = {
    _G.FINISHING: _G.COMPLETED,
    _G.FAILED: _G.DRAINED,
    _G.ABORTED: _G.DRAINED,
}


class GiveHandoff:
    """Prefill's side of one admitted offer (a refused one is answered with `Reject` at once)."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.state = Give.WRITING
        self.in_flight = 0
        self.tokens_written = 0
        self.pages_written = 0

    @property
    def closed(self) -> bool:
        return self.state in (Give.COMPLETED, Give.DRAINED)

    @property
    def writing(self) -> bool:
        """Whether new writes may start."""
        return self.state is Give.WRITING

    def submit(self, page_count: int, token_count: int) -> list[Effect]:
        """A write of so many pages, which hold so many tokens, has started."""
        return self._step(_V.SUBMIT, pages=page_count, tokens=token_count)

    def last(self, tokens_shared: int) -> list[Effect]:
        """No further write will start; ``tokens_shared`` were decode's own from the beginning."""
        return self._step(_V.LAST, tokens=tokens_shared)

    def landed(self) -> list[Effect]:
        return self._step(_V.LANDED)

    def lost(self, detail: str) -> list[Effect]:
        """A write failed for good: nothing of it will land any more."""
        return self._step(_V.LOST, detail)

    def in_doubt(self, detail: str) -> list[Effect]:
        """A write may or may not land: the request fails, the write stays in flight."""
        return self._step(_V.IN_DOUBT, detail)

    def broken(self, detail: str) -> list[Effect]:
        """This side cannot go on (its own source pages failed a check, the peer is dead)."""
        return self._step(_V.BROKEN, detail)

    def abort(self) -> list[Effect]:
        return self._step(_V.ABORT)

    def _step(
        self, event: GiveEvent, detail: str = "", pages: int = 0, tokens: int = 0
    ) -> list[Effect]:
        state = GIVE_TRANSITIONS[self.state].get(event)
        if state is None or (event in OF_A_WRITE and self.in_flight == 0):
            raise LocalOwnershipError(
                f"{self.offer.lease}: no {event.value!r} in {self.state.value}"
            )
        in_flight = self.in_flight + IN_FLIGHT.get(event, 0)
        self.pages_written += pages
        self.tokens_written += tokens
        effects: list[Effect] = []
        if state is Give.FAILED and self.state is not Give.FAILED:
            effects.append(Send(Failed(self.offer.lease, detail)))
        if in_flight == 0:
            state = GIVE_WHEN_QUIET.get(state, state)
        if state is Give.COMPLETED and self.state is not Give.COMPLETED:
            done = Complete(self.offer.lease, self.tokens_written, self.pages_written)
            effects.append(Send(done))
        if state is Give.DRAINED and self.state is not Give.DRAINED:
            effects.append(Send(Drained(self.offer.lease)))
        self.state, self.in_flight = state, in_flight
        return effects
