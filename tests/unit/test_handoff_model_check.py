"""Every state that the two sides of a hand-off can reach together, looked at one by one.

The states are walked breadth first with the real classes: each step puts them into a state, calls
one of their methods and reads the effects. Channels are FIFO. The faults: an abort at any time, a
write that is lost or in doubt, a write reported as landed that wrote nothing (or a hand-off ended
too early: to decode both look alike), a fault of prefill itself, prefill's death, and then the loss
of what it had sent.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from sekisho.core.errors import Evidence, LocalOwnershipError, RemoteOwnershipError
from sekisho.core.handoff import (
    GIVE_TRANSITIONS,
    GIVE_WHEN_QUIET,
    OF_A_WRITE,
    TAKE_TRANSITIONS,
    WRITER_TRANSITIONS,
    AbortOffer,
    Answer,
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

LEASE = Lease(1, 1)
OFFER = Offer(LEASE, 1, "a", [1] * 16, bytes(16), 0, [0], 1)
WRONG = (Evidence("unwritten", 1, 0, "", ""),)
IN_FLIGHT_MAX = 2
STATES_MAX = 2000
WORDS: dict[str, Answer] = {
    "reject": Reject(LEASE, "queue_full", ""),
    "complete": Complete(LEASE, 16, 1),
    "failed": Failed(LEASE, ""),
    "drained": Drained(LEASE),
}


class World(NamedTuple):
    """One joint state. ``give`` is None before the offer is admitted and after prefill's death."""

    take: Take = Take.OFFERED
    writer: Writer = Writer.ACTIVE
    give: Give | None = None
    in_flight: int = 0
    to_prefill: tuple[str, ...] = ("offer",)
    to_decode: tuple[str, ...] = ()
    alive: bool = True
    death_known: bool = False
    wrong: bool = False  # the pages are not what `complete` says
    pinned: bool = True
    decided: str = ""  # what the request was told: commit or end
    answers: tuple[str, ...] = ()  # all that prefill ever said


class Step(NamedTuple):
    name: str
    after: World
    fair: bool  # happens by itself sooner or later, without a fault or an abort


PAIRS: set[tuple[object, object]] = set()
"""(state, event) of every transition that the walk has taken."""


def steps(world: World) -> Iterator[Step]:
    yield from decode_steps(world)
    if world.alive:
        yield from prefill_steps(world)
        death = world._replace(alive=False, give=None, in_flight=0, to_prefill=())
        # Fair only as the way out for a writer that nobody believes any more.
        yield Step("prefill dies", death, world.writer is Writer.DISTRUSTED)
    elif world.to_decode:
        yield Step("what it sent is lost", world._replace(to_decode=()), False)


# ---- decode


def take_of(world: World) -> TakeHandoff:
    hand = TakeHandoff(OFFER, 16, lambda: WRONG if world.wrong else ())
    hand.state, hand.writer = world.take, world.writer
    return hand


def taken(world: World, event: TakeEvent, hand: TakeHandoff, effects: list[Effect]) -> World:
    """The world after decode did what ``effects`` say."""
    PAIRS.update({(world.take, event), (world.writer, event)})
    after = world._replace(take=hand.state, writer=hand.writer)
    for effect in effects:
        match effect:
            case Settle():
                assert after.pinned, "settled twice"
                after = after._replace(pinned=False)
            case Commit() | End():
                assert after.decided == "", "decided twice"
                word = "commit" if isinstance(effect, Commit) else "end"
                after = after._replace(decided=word)
            case Send(AbortOffer()):
                if after.alive:
                    after = after._replace(to_prefill=(*after.to_prefill, "abort"))
            case _:
                raise AssertionError(f"decode may not do {effect}")
    return after


def decode_steps(world: World) -> Iterator[Step]:
    hand = take_of(world)
    yield Step("abort", taken(world, TakeEvent.ABORT, hand, hand.abort("client_gone", "")), False)
    if not world.alive:
        hand = take_of(world)
        after = taken(world, TakeEvent.WRITER_DEAD, hand, hand.writer_dead())
        yield Step("death is known", after._replace(death_known=True), True)
    if world.to_decode:
        word, *rest = world.to_decode
        popped = world._replace(to_decode=tuple(rest))
        hand = take_of(world)
        try:
            effects = hand.receive(WORDS[word])
        except RemoteOwnershipError:
            # Only what a dead writer had sent may be out of place, and then it changes nothing.
            assert world.death_known, f"no entry for {word} in {world}"
            assert (hand.state, hand.writer) == (world.take, world.writer)
            yield Step(f"late {word} is refused", popped, True)
            return
        event = {
            "reject": TakeEvent.REJECT,
            "failed": TakeEvent.FAILED,
            "drained": TakeEvent.DRAINED,
            "complete": TakeEvent.COMPLETE_FALSE if world.wrong else TakeEvent.COMPLETE_TRUE,
        }[word]
        yield Step(f"receive {word}", taken(popped, event, hand, effects), True)


# ---- prefill


def told(world: World, *words: str) -> World:
    return world._replace(to_decode=(*world.to_decode, *words), answers=(*world.answers, *words))


def given(world: World, event: GiveEvent) -> World | None:
    """The world after ``event`` at prefill; None where the tables forbid it."""
    hand = GiveHandoff(OFFER)
    if world.give is None:
        return None
    hand.state, hand.in_flight = world.give, world.in_flight
    calls = {
        GiveEvent.SUBMIT: lambda: hand.submit(1, 1),
        GiveEvent.LAST: lambda: hand.last(0),
        GiveEvent.LANDED: hand.landed,
        GiveEvent.LOST: lambda: hand.lost(""),
        GiveEvent.IN_DOUBT: lambda: hand.in_doubt(""),
        GiveEvent.BROKEN: lambda: hand.broken(""),
        GiveEvent.ABORT: hand.abort,
    }
    try:
        effects = calls[event]()
    except LocalOwnershipError:
        assert (hand.state, hand.in_flight) == (world.give, world.in_flight)
        return None
    PAIRS.add((world.give, event))
    after = world._replace(give=hand.state, in_flight=hand.in_flight)
    for effect in effects:
        assert isinstance(effect, Send), f"prefill may not do {effect}"
        after = told(after, type(effect.message).__name__.lower())
    return after


def prefill_steps(world: World) -> Iterator[Step]:
    if world.to_prefill:
        word, *rest = world.to_prefill
        popped = world._replace(to_prefill=tuple(rest))
        if word == "offer":
            yield Step("admit", popped._replace(give=Give.WRITING), True)
            yield Step("refuse", told(popped, "reject"), True)
        else:
            # An abort that crosses a rejection finds nothing to abort.
            yield Step("receive abort", given(popped, GiveEvent.ABORT) or popped, True)
    for event in GiveEvent:
        if event is GiveEvent.ABORT or (
            event is GiveEvent.SUBMIT and world.in_flight == IN_FLIGHT_MAX
        ):
            continue
        after = given(world, event)
        if after is None:
            continue
        fair = event in (GiveEvent.LAST, GiveEvent.LANDED)
        yield Step(event.value, after, fair)
        if fair and not world.wrong:
            lied = given(world._replace(wrong=True), event)
            assert lied is not None
            yield Step(f"{event.value}, which is not so", lied, False)


# ---- the walk


@cache
def walk() -> dict[World, list[Step]]:
    """Successors of every reachable state."""
    seen: dict[World, list[Step]] = {}
    todo = deque([World()])
    while todo:
        world = todo.popleft()
        if world not in seen:
            assert len(seen) < STATES_MAX, "the states do not end"
            seen[world] = list(steps(world))
            todo.extend(step.after for step in seen[world])
    return seen


def closed(world: World) -> bool:
    """Both sides have forgotten the hand-off, and nothing is on its way."""
    prefill = world.give in (None, Give.COMPLETED, Give.DRAINED) and not world.to_prefill
    return take_of(world).closed and prefill and not world.to_decode


def test_the_walk_is_exhaustive_and_finite() -> None:
    states = walk()
    print(f"{len(states)} joint states, {sum(map(len, states.values()))} steps")
    assert len(states) > 150
    assert all(step.after in states for found in states.values() for step in found)


def test_pages_are_pinned_while_a_write_may_land() -> None:
    for world in walk():
        if world.in_flight:
            assert world.pinned, world
        assert world.pinned == (world.writer is not Writer.TERMINAL), world


def test_only_what_is_proved_commits() -> None:
    for world in walk():
        if world.decided == "commit":
            assert world.take is Take.COMMITTED, world
            assert not world.wrong and world.in_flight == 0, world
            assert world.answers == ("complete",), world


def test_the_request_is_decided_exactly_when_the_offer_is_over() -> None:
    for world in walk():
        expected = {Take.OFFERED: "", Take.COMMITTED: "commit"}.get(world.take, "end")
        assert world.decided == expected, world


def test_a_decision_is_for_good() -> None:
    """What a log says of a request that has ended does not change by what comes later."""
    for world, found in walk().items():
        if world.take is not Take.OFFERED:
            assert {step.after.take for step in found} <= {world.take}, world


def test_a_disproved_writer_stays_pinned_until_it_is_dead() -> None:
    disproved = [
        step.after
        for world, found in walk().items()
        for step in found
        if step.name == "receive complete" and world.wrong
    ]
    assert disproved
    for world in disproved:
        assert world.writer is Writer.DISTRUSTED or world.death_known, world
    for world, found in walk().items():
        if world.writer is Writer.DISTRUSTED:
            for step in found:
                assert step.after.writer is Writer.DISTRUSTED or step.name == "death is known"


def test_every_offer_has_one_answer() -> None:
    allowed = {
        ("reject",),
        ("complete",),
        ("failed",),
        ("failed", "drained"),
        ("drained",),
        (),
    }
    for world in walk():
        assert world.answers in allowed, world
        if world.give in (Give.COMPLETED, Give.DRAINED):
            assert world.answers[-1] in ("complete", "drained"), world
        aborted = world.take is Take.ABORTED
        assert world.answers != ("drained",) or aborted or world.death_known, world


def test_channels_stay_short() -> None:
    for world in walk():
        assert len(world.to_decode) <= 2 and len(world.to_prefill) <= 2, world


@pytest.mark.parametrize(
    ("take", "writer"),
    [
        (Take.OFFERED, Writer.DISTRUSTED),
        (Take.OFFERED, Writer.TERMINAL),
        (Take.COMMITTED, Writer.ACTIVE),
        (Take.COMMITTED, Writer.DISTRUSTED),
        (Take.REJECTED, Writer.ACTIVE),
        (Take.REJECTED, Writer.DISTRUSTED),
    ],
)
def test_pairs_that_cannot_be(take: Take, writer: Writer) -> None:
    assert not [world for world in walk() if (world.take, world.writer) == (take, writer)]


def test_all_other_pairs_can() -> None:
    assert len({(world.take, world.writer) for world in walk()}) == 15 - 6


def ends_reached(fair_only: bool) -> set[World]:
    """States from which a closed one can be reached."""
    before: defaultdict[World, list[World]] = defaultdict(list)
    for world, found in walk().items():
        for step in found:
            if step.fair or not fair_only:
                before[step.after].append(world)
    good = {world for world in walk() if closed(world)}
    todo = list(good)
    while todo:
        new = [world for world in before[todo.pop()] if world not in good]
        good.update(new)
        todo.extend(new)
    return good


@pytest.mark.parametrize("fair_only", [False, True])
def test_nothing_is_stuck(fair_only: bool) -> None:
    """From every state both sides close: also without any further fault, abort or luck."""
    stuck = set(walk()) - ends_reached(fair_only)
    assert not stuck, next(iter(stuck))


def test_what_happens_by_itself_cannot_go_round_forever() -> None:
    """Fair steps alone lead nowhere twice, so that fairness needs no scheduler to help it."""
    fair = {
        world: {step.after for step in found if step.fair and step.after != world}
        for world, found in walk().items()
    }
    waiting = {world: len(after) for world, after in fair.items()}
    before: defaultdict[World, list[World]] = defaultdict(list)
    for world, after in fair.items():
        for one in after:
            before[one].append(world)
    todo = [world for world, count in waiting.items() if count == 0]
    done = 0
    while todo:
        done += 1
        for world in before[todo.pop()]:
            waiting[world] -= 1
            if waiting[world] == 0:
                todo.append(world)
    assert done == len(fair)
    assert all(closed(world) for world, after in fair.items() if not after)


def test_no_entry_of_the_tables_is_dead() -> None:
    walk()
    tables: list[set[tuple[object, object]]] = [
        {(state, event) for state, row in TAKE_TRANSITIONS.items() for event in row},
        {(state, event) for state, row in WRITER_TRANSITIONS.items() for event in row},
        {(state, event) for state, row in GIVE_TRANSITIONS.items() for event in row},
    ]
    assert not set().union(*tables) - PAIRS
    assert {world.give for world in walk()} == {*Give, None}
    assert set(GIVE_WHEN_QUIET.values()) == {Give.COMPLETED, Give.DRAINED}
    assert {GiveEvent.LANDED, GiveEvent.LOST, GiveEvent.IN_DOUBT} == OF_A_WRITE
