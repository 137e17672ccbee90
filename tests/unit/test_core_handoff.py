"""Both sides of the hand-off, step by step; scenes from the public reports."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from sekisho.core.errors import Evidence, LocalOwnershipError, RemoteOwnershipError
from sekisho.core.handoff import (
    AbortOffer,
    Commit,
    Complete,
    Drained,
    End,
    Failed,
    Give,
    GiveHandoff,
    Offer,
    Reject,
    Send,
    Settle,
    Take,
    TakeHandoff,
    Writer,
)
from sekisho.core.lease import Lease
from sekisho.core.outcome import CODES

LEASE = Lease(7, 1)
# 40 tokens in pages of 16; the first page is decode's own from its prefix cache.
OFFER = Offer(LEASE, 5, "a", list(range(40)), bytes(16), 1, [4, 9], 1)
FOREIGN = Evidence("foreign", 5, 9, "mine", "another's")
DONE = Complete(LEASE, 40, 2)
HONEST: Callable[[], tuple[Evidence, ...]] = tuple


def taking(prove: Callable[[], tuple[Evidence, ...]] = HONEST) -> TakeHandoff:
    return TakeHandoff(OFFER, 16, prove)


def giving() -> GiveHandoff:
    return GiveHandoff(OFFER)


def everything(hand: TakeHandoff | GiveHandoff) -> dict[str, Any]:
    return {k: v if callable(v) else copy.deepcopy(v) for k, v in vars(hand).items()}


# ---- decode's side


def test_a_proved_hand_off_settles_and_commits_at_once() -> None:
    """In this order: a commit seals pages, which nobody may seal under a writer."""
    hand = taking()
    assert not hand.closed
    assert hand.receive(DONE) == [Settle(), Commit()]
    assert (hand.state, hand.writer, hand.closed) == (Take.COMMITTED, Writer.TERMINAL, True)


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (39, 2), (41, 2), (40, 1), (40, 3), (0, 0)])
def test_a_short_hand_off_is_a_violation_before_any_header_is_read(tokens: int, pages: int) -> None:
    """sglang#30233: one page of a placeholder, accepted for a whole prompt."""

    def prove() -> tuple[Evidence, ...]:
        raise AssertionError("counts come first")

    hand = taking(prove=prove)
    (end,) = hand.receive(Complete(LEASE, tokens, pages))
    assert isinstance(end, End)
    assert end.code == "ownership_violation"
    (evidence,) = end.evidence
    assert (evidence.kind, evidence.request, evidence.page) == ("count", 5, -1)
    assert evidence.expected == "tokens=40 pages=2"
    assert evidence.found == f"tokens={tokens} pages={pages}"
    assert (hand.state, hand.writer) == (Take.FAILED, Writer.DISTRUSTED)


def test_right_counts_and_a_wrong_header_are_a_violation() -> None:
    hand = taking(prove=lambda: (FOREIGN,))
    (end,) = hand.receive(DONE)
    assert isinstance(end, End)
    assert (end.code, end.evidence) == ("ownership_violation", (FOREIGN,))
    assert "foreign" in end.message


def test_a_writer_proved_wrong_is_believed_no_more_until_it_is_dead() -> None:
    hand = taking(prove=lambda: (FOREIGN,))
    hand.receive(DONE)
    for word in (Drained(LEASE), DONE, Failed(LEASE, ""), Reject(LEASE, "queue_full", "")):
        with pytest.raises(RemoteOwnershipError):
            hand.receive(word)
    assert hand.abort("client_gone", "") == []
    assert not hand.closed
    assert hand.writer_dead() == [Settle()]
    assert hand.closed


def test_a_rejection_ends_the_request_with_prefills_code() -> None:
    hand = taking()
    effects = hand.receive(Reject(LEASE, "context_length_exceeded", "9 > 8"))
    assert effects == [Settle(), End("context_length_exceeded", "9 > 8")]
    assert hand.closed


def test_a_failure_keeps_the_pin_until_drained() -> None:
    hand = taking()
    assert hand.receive(Failed(LEASE, "link down")) == [End("transfer_failed", "link down")]
    assert not hand.closed
    assert hand.receive(Drained(LEASE)) == [Settle()]
    assert hand.closed


def test_an_abort_ends_the_request_and_not_the_writer() -> None:
    """sglang#32564: pages freed under a live writer."""
    hand = taking()
    assert hand.abort("client_gone", "gone") == [
        End("client_gone", "gone"),
        Send(AbortOffer(LEASE)),
    ]
    assert (hand.closed, hand.writer) == (False, Writer.ACTIVE)
    assert hand.abort("shutting_down", "") == []
    assert hand.receive(Drained(LEASE)) == [Settle()]
    assert hand.closed


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        ([DONE], True),
        ([Reject(LEASE, "queue_full", "")], True),
        ([Failed(LEASE, "")], False),
        ([Failed(LEASE, ""), Drained(LEASE)], True),
        ([Complete(LEASE, 1, 1)], False),
    ],
)
def test_answers_that_cross_an_abort_end_nothing_twice(words: list[Any], closed: bool) -> None:
    hand = taking()
    hand.abort("client_gone", "")
    effects = [effect for word in words for effect in hand.receive(word)]
    assert effects == ([Settle()] if closed else [])
    assert (hand.state, hand.closed) == (Take.ABORTED, closed)


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("last", [DONE, Reject(LEASE, "queue_full", ""), Drained(LEASE), None])
def test_after_its_last_word_a_writer_has_nothing_to_say(last: Any, aborted: bool) -> None:
    """Whatever comes then breaks the rules of the hand-off, also where it would change nothing."""
    hand = taking()
    if aborted:
        hand.abort("client_gone", "")
    elif last == Drained(LEASE):
        hand.receive(Failed(LEASE, ""))
    closing = hand.writer_dead() if last is None else hand.receive(last)
    assert Settle() in closing
    words = (DONE, Complete(LEASE, 1, 1), Failed(LEASE, ""), Drained(LEASE), Reject(LEASE, "", ""))
    for word in words:
        before = everything(hand)
        with pytest.raises(RemoteOwnershipError):
            hand.receive(word)
        assert everything(hand) == before


def test_an_abort_after_the_commit_is_no_business_of_the_hand_off() -> None:
    hand = taking()
    hand.receive(DONE)
    assert hand.abort("client_gone", "") == []


def test_the_writers_death_ends_the_request_and_settles() -> None:
    hand = taking()
    assert hand.writer_dead() == [Settle(), End("node_lost", "the prefill node died")]
    assert (hand.state, hand.writer) == (Take.FAILED, Writer.TERMINAL)
    assert hand.closed
    assert hand.writer_dead() == []


def test_drained_before_any_answer_is_a_broken_word() -> None:
    hand = taking()
    with pytest.raises(RemoteOwnershipError):
        hand.receive(Drained(LEASE))
    assert (hand.state, hand.writer) == (Take.OFFERED, Writer.ACTIVE)


@pytest.mark.parametrize("other", [Lease(7, 2), Lease(8, 1)])
def test_a_word_about_another_lease_is_a_local_fault(other: Lease) -> None:
    hand = taking()
    before = everything(hand)
    for word in (Complete(other, 40, 2), Drained(other), Failed(other, ""), Reject(other, "", "")):
        with pytest.raises(LocalOwnershipError, match="not the lease"):
            hand.receive(word)
    assert everything(hand) == before


def test_a_prove_that_raises_leaves_the_offer_open() -> None:
    def prove() -> tuple[Evidence, ...]:
        raise ZeroDivisionError

    hand = taking(prove=prove)
    with pytest.raises(ZeroDivisionError):
        hand.receive(DONE)
    assert (hand.state, hand.writer) == (Take.OFFERED, Writer.ACTIVE)


def test_every_end_has_a_code_of_the_outcomes() -> None:
    ends = [
        *taking().receive(Failed(LEASE, "")),
        *taking().receive(Complete(LEASE, 0, 0)),
        *taking().writer_dead(),
    ]
    evidence = {one.code: len(one.evidence) for one in ends if isinstance(one, End)}
    assert evidence == {"transfer_failed": 0, "ownership_violation": 1, "node_lost": 0}
    assert set(evidence) <= set(CODES)


# ---- prefill's side


def test_complete_says_what_was_written_once_all_has_landed() -> None:
    hand = giving()
    assert hand.writing
    assert hand.submit(1, 16) == []
    assert hand.submit(1, 8) == []
    assert hand.landed() == []
    assert hand.last(16) == []
    assert (hand.writing, hand.closed) == (False, False)
    assert hand.landed() == [Send(Complete(LEASE, 40, 2))]
    assert (hand.writing, hand.closed) == (False, True)


def test_the_last_write_may_have_landed_before_it_is_known_to_be_the_last() -> None:
    hand = giving()
    hand.submit(2, 24)
    hand.landed()
    assert hand.last(16) == [Send(Complete(LEASE, 40, 2))]


@pytest.mark.parametrize("late", ["landed", "lost"])
def test_a_write_in_doubt_keeps_the_give_open_until_it_is_known(late: str) -> None:
    """sglang#38961: a time-out is not a release."""
    hand = giving()
    hand.submit(1, 16)
    hand.last(24)
    assert hand.in_doubt("timed out") == [Send(Failed(LEASE, "timed out"))]
    assert hand.in_doubt("still") == []
    assert not hand.closed
    effects = hand.landed() if late == "landed" else hand.lost("")
    assert effects == [Send(Drained(LEASE))]
    assert hand.closed


def test_a_lost_write_fails_at_once_and_drains_with_the_others() -> None:
    hand = giving()
    hand.submit(1, 16)
    hand.submit(1, 8)
    assert hand.lost("refused") == [Send(Failed(LEASE, "refused"))]
    assert hand.landed() == [Send(Drained(LEASE))]
    assert hand.state is Give.DRAINED


def test_the_only_write_lost_is_failed_and_drained_in_one() -> None:
    hand = giving()
    hand.submit(1, 16)
    assert hand.lost("refused") == [Send(Failed(LEASE, "refused")), Send(Drained(LEASE))]


@pytest.mark.parametrize("finishing", [False, True])
def test_a_fault_of_this_side_fails_also_behind_the_last_write(finishing: bool) -> None:
    hand = giving()
    hand.submit(1, 16)
    if finishing:
        hand.last(24)
    assert hand.broken("source page is foreign") == [Send(Failed(LEASE, "source page is foreign"))]
    assert hand.landed() == [Send(Drained(LEASE))]


def test_an_abort_starts_no_new_write_and_drains() -> None:
    hand = giving()
    hand.submit(1, 16)
    assert hand.abort() == []
    assert not hand.writing
    with pytest.raises(LocalOwnershipError):
        hand.submit(1, 16)
    with pytest.raises(LocalOwnershipError):
        hand.last(0)
    assert hand.lost("") == [Send(Drained(LEASE))]
    assert (hand.pages_written, hand.tokens_written) == (1, 16)
    assert giving().abort() == [Send(Drained(LEASE))]


def test_no_word_of_a_write_where_none_is_under_way() -> None:
    """In doubt without a write would say Drained while something may still land."""
    hand = giving()
    for call in (hand.landed, lambda: hand.lost(""), lambda: hand.in_doubt("")):
        with pytest.raises(LocalOwnershipError):
            call()
    assert (hand.state, hand.in_flight) == (Give.WRITING, 0)
