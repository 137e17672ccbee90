"""Both sides of the hand-off in every state: an event does what its table says, or nothing."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from sekisho.core.errors import LocalOwnershipError, RemoteOwnershipError
from sekisho.core.handoff import (
    GIVE_TRANSITIONS,
    GIVE_WHEN_QUIET,
    OF_A_WRITE,
    TAKE_TRANSITIONS,
    WRITER_TRANSITIONS,
    Commit,
    Complete,
    Drained,
    Effect,
    End,
    Failed,
    Give,
    GiveEvent,
    GiveHandoff,
    Offer,
    Reject,
    Send,
    Settle,
    Take,
    TakeEvent,
    TakeHandoff,
    Writer,
)
from sekisho.core.lease import Lease

LEASE = Lease(7, 1)
# 40 tokens in pages of 16; the first page is decode's own from its prefix cache.
OFFER = Offer(LEASE, 5, "a", list(range(40)), bytes(16), 1, [4, 9], 1)
DONE = Complete(LEASE, 40, 2)


def taking(state: Take, writer: Writer) -> TakeHandoff:
    hand = TakeHandoff(OFFER, 16, tuple)
    hand.state, hand.writer = state, writer
    return hand


def giving(state: Give, in_flight: int = 0) -> GiveHandoff:
    hand = GiveHandoff(OFFER)
    hand.state, hand.in_flight = state, in_flight
    return hand


TAKE_EVENTS: dict[TakeEvent, Callable[[TakeHandoff], list[Effect]]] = {
    TakeEvent.COMPLETE_TRUE: lambda hand: hand.receive(DONE),
    TakeEvent.COMPLETE_FALSE: lambda hand: hand.receive(Complete(LEASE, 1, 1)),
    TakeEvent.REJECT: lambda hand: hand.receive(Reject(LEASE, "queue_full", "")),
    TakeEvent.FAILED: lambda hand: hand.receive(Failed(LEASE, "")),
    TakeEvent.DRAINED: lambda hand: hand.receive(Drained(LEASE)),
    TakeEvent.ABORT: lambda hand: hand.abort("client_gone", ""),
    TakeEvent.WRITER_DEAD: lambda hand: hand.writer_dead(),
}
GIVE_EVENTS: dict[GiveEvent, Callable[[GiveHandoff], list[Effect]]] = {
    GiveEvent.SUBMIT: lambda hand: hand.submit(1, 16),
    GiveEvent.LAST: lambda hand: hand.last(16),
    GiveEvent.LANDED: lambda hand: hand.landed(),
    GiveEvent.LOST: lambda hand: hand.lost("why"),
    GiveEvent.IN_DOUBT: lambda hand: hand.in_doubt("why"),
    GiveEvent.BROKEN: lambda hand: hand.broken("why"),
    GiveEvent.ABORT: lambda hand: hand.abort(),
}


def everything(hand: TakeHandoff | GiveHandoff) -> dict[str, Any]:
    return {k: v if callable(v) else copy.deepcopy(v) for k, v in vars(hand).items()}


@pytest.mark.parametrize("event", TakeEvent)
@pytest.mark.parametrize(("state", "writer"), list(product(Take, Writer)))
def test_take_follows_its_tables_in_every_state(
    state: Take, writer: Writer, event: TakeEvent
) -> None:
    hand = taking(state, writer)
    after = TAKE_TRANSITIONS[state].get(event), WRITER_TRANSITIONS[writer].get(event)
    before = everything(hand)
    if None in after:
        with pytest.raises(RemoteOwnershipError, match=f"no '{event.value}' in {state.value}"):
            TAKE_EVENTS[event](hand)
        assert everything(hand) == before
    else:
        effects = TAKE_EVENTS[event](hand)
        assert (hand.state, hand.writer) == after
        decided = state is Take.OFFERED
        assert (Commit() in effects) == (decided and hand.state is Take.COMMITTED)
        assert any(isinstance(one, End) for one in effects) == (
            decided and hand.state is not Take.COMMITTED
        )
        assert (Settle() in effects) == (
            writer is not Writer.TERMINAL and hand.writer is Writer.TERMINAL
        )


@pytest.mark.parametrize(("state", "writer"), list(product(Take, Writer)))
def test_a_hand_off_is_forgotten_when_it_is_decided_and_nobody_writes(
    state: Take, writer: Writer
) -> None:
    decided, quiet = state is not Take.OFFERED, writer is Writer.TERMINAL
    assert taking(state, writer).closed == (decided and quiet)


@pytest.mark.parametrize("event", GiveEvent)
@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("state", Give)
def test_give_follows_its_tables_in_every_state(
    state: Give, in_flight: int, event: GiveEvent
) -> None:
    hand = giving(state, in_flight)
    after = GIVE_TRANSITIONS[state].get(event)
    before = everything(hand)
    if after is None or (event in OF_A_WRITE and in_flight == 0):
        with pytest.raises(LocalOwnershipError, match=f"no '{event.value}' in {state.value}"):
            GIVE_EVENTS[event](hand)
        assert everything(hand) == before
    else:
        effects = GIVE_EVENTS[event](hand)
        ended = {GiveEvent.SUBMIT: 1, GiveEvent.LANDED: -1, GiveEvent.LOST: -1}.get(event, 0)
        assert hand.in_flight == in_flight + ended
        quiet = hand.in_flight == 0
        assert hand.state is (GIVE_WHEN_QUIET.get(after, after) if quiet else after)
        sent = [type(one.message) for one in effects if isinstance(one, Send)]
        assert len(sent) == len(effects)
        expected: list[type] = [Failed] if after is Give.FAILED is not state else []
        if hand.closed and hand.state is not state:
            expected.append(Complete if hand.state is Give.COMPLETED else Drained)
        assert sent == expected


@pytest.mark.parametrize(("state", "writer"), list(product(Take, Writer)))
def test_abort_and_death_may_come_at_any_time(state: Take, writer: Writer) -> None:
    """Both come from outside the protocol: refusing one would leave a request that never ends."""
    hand = taking(state, writer)
    hand.abort("client_gone", "")
    assert hand.writer is writer
    hand.writer_dead()
    assert hand.closed
    assert hand.state is (Take.ABORTED if state is Take.OFFERED else state)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("state", Give)
def test_an_abort_may_come_at_any_time_at_prefill_too(state: Give, in_flight: int) -> None:
    hand = giving(state, in_flight)
    closed = hand.closed
    assert not (hand.abort() and closed)
    assert hand.state is state or not closed
    assert not hand.writing
    assert hand.closed or in_flight


def test_no_state_is_missing_in_a_table() -> None:
    assert set(TAKE_TRANSITIONS) == set(Take)
    assert set(WRITER_TRANSITIONS) == set(Writer)
    assert set(GIVE_TRANSITIONS) == set(Give)


WHILE_WRITING = [Give.WRITING, Give.FINISHING, Give.FAILED, Give.ABORTED]


@pytest.mark.parametrize("event", [*OF_A_WRITE, GiveEvent.BROKEN])
@pytest.mark.parametrize("state", WHILE_WRITING)
def test_what_becomes_of_a_write_is_never_refused(state: Give, event: GiveEvent) -> None:
    """A refused completion would leave a write under way for good, and its pages pinned."""
    hand = giving(state, 2)
    GIVE_EVENTS[event](hand)
    assert hand.in_flight == (1 if event in (GiveEvent.LANDED, GiveEvent.LOST) else 2)
    assert hand.state in WHILE_WRITING


@pytest.mark.parametrize("event", [GiveEvent.LOST, GiveEvent.IN_DOUBT, GiveEvent.BROKEN])
@pytest.mark.parametrize("state", [Give.WRITING, Give.FINISHING])
def test_a_write_that_may_be_missing_fails_the_hand_off_at_once(
    state: Give, event: GiveEvent
) -> None:
    hand = giving(state, 2)
    assert GIVE_EVENTS[event](hand) == [Send(Failed(LEASE, "why"))]
    assert hand.state is Give.FAILED


@pytest.mark.parametrize("state", [Give.WRITING, Give.FINISHING])
def test_an_abort_drains_and_does_not_complete(state: Give) -> None:
    hand = giving(state, 1)
    assert hand.abort() == []
    assert hand.state is Give.ABORTED
    assert hand.landed() == [Send(Drained(LEASE))]


@pytest.mark.parametrize("event", [*OF_A_WRITE, GiveEvent.BROKEN, GiveEvent.ABORT])
@pytest.mark.parametrize("state", [Give.FAILED, Give.ABORTED])
def test_what_has_failed_or_was_aborted_says_no_more_until_it_drains(
    state: Give, event: GiveEvent
) -> None:
    hand = giving(state, 2)
    assert GIVE_EVENTS[event](hand) == []
    assert hand.state is state


NOT_AFTER: dict[Give, set[GiveEvent]] = {
    Give.WRITING: set(),
    Give.FINISHING: {GiveEvent.SUBMIT, GiveEvent.LAST},
    Give.FAILED: {GiveEvent.SUBMIT, GiveEvent.LAST},
    Give.ABORTED: {GiveEvent.SUBMIT, GiveEvent.LAST},
    Give.COMPLETED: {*GiveEvent} - {GiveEvent.ABORT},
    Give.DRAINED: {*GiveEvent} - {GiveEvent.ABORT, GiveEvent.BROKEN},
}
"""No write starts behind the last one, and nothing comes of a write when none can be under way."""


@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in product(Give, GiveEvent) if pair[1] in NOT_AFTER[pair[0]]]
)
def test_what_comes_too_late_is_refused(state: Give, event: GiveEvent, in_flight: int) -> None:
    hand = giving(state, in_flight)
    before = everything(hand)
    with pytest.raises(LocalOwnershipError):
        GIVE_EVENTS[event](hand)
    assert everything(hand) == before


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_fault_of_this_side_may_show_after_all_has_drained(in_flight: int) -> None:
    hand = giving(Give.DRAINED, in_flight)
    assert hand.broken("source page is foreign") == []
    assert hand.state is Give.DRAINED
