"""The pool's ledger: each rule by itself, and that a refused call changes nothing."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.lease import Lease
from sekisho.core.ledger import PAGE_TRANSITIONS, PageEvent, Pages, State
from sekisho.core.pool import Pool


def everything(pool: Pool) -> dict[str, Any]:
    """The pool's whole state, comparable; `_mark` is scratch."""
    state = {name: copy.deepcopy(value) for name, value in vars(pool).items() if name != "_mark"}
    state["_mint"] = vars(pool._mint).copy()
    state["_grants"] = {grant: pages.tolist() for grant, pages in pool._grants.items()}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in state.items()
    }


def refused(pool: Pool, match: str, call: Callable[[], object]) -> None:
    """``call`` raises, and nothing at all has changed."""
    before = everything(pool)
    with pytest.raises(LocalOwnershipError, match=match):
        call()
    assert everything(pool) == before
    pool.check_integrity()


def at(*pages: int) -> Pages:
    return np.array(pages, np.intp)


def serials(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


@pytest.fixture
def pool() -> Pool:
    return Pool(8, 3)


def sealed(pool: Pool, scope: str, count: int) -> tuple[Lease, Pages]:
    lease = pool.open_lease(scope)
    pages = pool.grant(lease, count)
    pool.seal(pages, lease)
    return lease, pages


@pytest.mark.parametrize("page_count", [0, -1, 2**31])
def test_a_pool_has_at_least_one_page_and_indices_of_int32(page_count: int) -> None:
    with pytest.raises(LocalOwnershipError, match="page_count"):
        Pool(page_count, 1)


def test_a_pool_needs_an_incarnation() -> None:
    with pytest.raises(LocalOwnershipError, match="incarnation"):
        Pool(1, 0)


def test_a_new_pool_is_free() -> None:
    pool = Pool(8, 3)
    assert pool.counts() == {"free": 8, "leased": 0, "sealed": 0, "quarantined": 0}
    assert pool.incarnation == 3
    assert pool.serials_of(at(0, 7)).tolist() == [0, 0]
    pool.check_integrity()


def test_the_ledger_is_small() -> None:
    pool = Pool(1000, 1)
    arrays = [value for value in vars(pool).values() if isinstance(value, np.ndarray)]
    assert pool.ledger_bytes() == sum(array.nbytes for array in arrays)
    assert pool.ledger_bytes() == 33 * 1000


def test_a_granted_page_has_one_holder_and_the_lease_of_its_grant(pool: Pool) -> None:
    lease = pool.open_lease("a")
    pages = pool.grant(lease, 3)
    assert pages.tolist() == [0, 1, 2]
    for page in pages:
        assert pool.state_of(page) is State.LEASED
        assert (pool.holders_of(page), pool.pins_of(page)) == (1, 0)
    assert pool.serials_of(pages).tolist() == [lease.serial] * 3
    assert pool.counts() == {"free": 5, "leased": 3, "sealed": 0, "quarantined": 0}
    pool.check_integrity()


def test_the_page_that_is_free_longest_comes_first(pool: Pool) -> None:
    lease = pool.open_lease("a")
    first, second = pool.grant(lease, 3), pool.grant(lease, 5)
    assert pool.drop(second, pool.serials_of(second)).tolist() == second.tolist()
    pool.drop(first[::-1], pool.serials_of(first))
    assert pool.grant(lease, 8).tolist() == [3, 4, 5, 6, 7, 2, 1, 0]


def test_the_ring_wraps_many_times(pool: Pool) -> None:
    lease = pool.open_lease("a")
    held = pool.grant(lease, 2)
    for round_ in range(50):
        pages = pool.grant(lease, 1 + round_ % 4)
        pool.drop(held, pool.serials_of(held))
        held = pages
        pool.check_integrity()


def test_a_scope_has_a_name(pool: Pool) -> None:
    refused(pool, "scope is empty", lambda: pool.open_lease(""))


@pytest.mark.parametrize(("count", "match"), [(0, "above 0"), (-1, "above 0"), (9, "9 pages")])
def test_a_grant_has_pages_and_no_more_than_are_free(pool: Pool, count: int, match: str) -> None:
    lease = pool.open_lease("a")
    refused(pool, match, lambda: pool.grant(lease, count))
    assert len(pool.grant(lease, 8)) == 8
    refused(pool, "1 pages", lambda: pool.grant(lease, 1))


def test_only_an_open_lease_of_this_pool_is_granted_to(pool: Pool) -> None:
    lease = pool.open_lease("a")
    other = Lease(pool.incarnation + 1, lease.serial)
    unknown = Lease(pool.incarnation, lease.serial + 1)
    for wrong in (other, unknown):
        refused(pool, "not open", lambda wrong=wrong: pool.grant(wrong, 1))  # type: ignore[misc]
        refused(pool, "not open", lambda wrong=wrong: pool.close_lease(wrong))  # type: ignore[misc]
    pool.close_lease(lease)
    refused(pool, "not open", lambda: pool.grant(lease, 1))
    refused(pool, "not open", lambda: pool.close_lease(lease))
    assert pool.open_lease("a") != lease


def test_a_closed_lease_keeps_its_pages_until_they_are_dropped(pool: Pool) -> None:
    lease = pool.open_lease("a")
    pages = pool.grant(lease, 2)
    pool.close_lease(lease)
    assert pool.counts()["leased"] == 2
    assert pool.drop(pages, serials(lease.serial, lease.serial)).tolist() == pages.tolist()


def test_seal_wants_own_leased_pages_without_a_writer(pool: Pool) -> None:
    mine, other = pool.open_lease("a"), pool.open_lease("a")
    pages, foreign = pool.grant(mine, 2), pool.grant(other, 1)
    refused(pool, "not of this lease", lambda: pool.seal(at(0, 2), mine))
    refused(pool, "not of this lease", lambda: pool.seal(foreign, mine))
    grant = pool.pin(at(1))
    refused(pool, "with a writer", lambda: pool.seal(pages, mine))
    pool.settle(grant)
    pool.seal(pages, mine)
    assert pool.state_of(0) is pool.state_of(1) is State.SEALED
    refused(pool, "illegal for a page here: seal", lambda: pool.seal(pages, mine))
    pool.drop(pages, pool.serials_of(pages))
    refused(pool, "illegal for a page here: seal", lambda: pool.seal(pages, mine))


@pytest.mark.parametrize("pages", [(-1,), (8,), (0, 8), (-1, 0)])
def test_a_page_outside_the_pool_is_refused(pool: Pool, pages: tuple[int, ...]) -> None:
    """NumPy would take -1 for the last page."""
    lease = pool.open_lease("a")
    pool.grant(lease, 8)
    named, same = at(*pages), serials(*[lease.serial] * len(pages))
    refused(pool, "out of range", lambda: pool.seal(named, lease))
    refused(pool, "out of range", lambda: pool.hold(named, same, "a"))
    refused(pool, "out of range", lambda: pool.drop(named, same))
    refused(pool, "out of range", lambda: pool.pin(named))


def test_a_page_named_twice_is_refused(pool: Pool) -> None:
    """``array[[1, 1]] += 1`` counts once: a lost pin is a page freed under a writer."""
    lease = pool.open_lease("a")
    pages = pool.grant(lease, 3)
    twice, same = at(1, 2, 1), serials(*[lease.serial] * 3)
    refused(pool, "named twice", lambda: pool.seal(twice, lease))
    refused(pool, "named twice", lambda: pool.pin(twice))
    refused(pool, "named twice", lambda: pool.drop(twice, same))
    pool.seal(pages, lease)
    refused(pool, "named twice", lambda: pool.hold(twice, same, "a"))


def test_hold_wants_the_expected_leases(pool: Pool) -> None:
    lease, pages = sealed(pool, "a", 2)
    same = serials(lease.serial, lease.serial)
    refused(pool, "one serial a page", lambda: pool.hold(pages, same[:1], "a"))
    refused(pool, "of another lease", lambda: pool.hold(pages, same + np.uint64(1), "a"))
    pool.hold(pages, same, "a")
    assert [pool.holders_of(page) for page in pages] == [2, 2]
    pool.check_integrity()


@pytest.mark.parametrize("owner", ["a", "b", "c"])
def test_hold_wants_the_same_scope(pool: Pool, owner: str) -> None:
    """Whichever scope came first: a name that no lease ever had is nobody's scope."""
    for lease, pages in [sealed(pool, scope, 1) for scope in ("a", "b", "c")]:
        same = serials(lease.serial)
        if pages.tolist() == [ord(owner) - ord("a")]:
            for scope in {"a", "b", "c", "never seen", ""} - {owner}:
                call = functools.partial(pool.hold, pages, same, scope)
                refused(pool, "another scope", call)
            pool.hold(pages, same, owner)


def test_hold_wants_sealed_pages_that_somebody_holds(pool: Pool) -> None:
    lease = pool.open_lease("a")
    pages = pool.grant(lease, 1)
    same = serials(lease.serial)
    refused(pool, "only sealed", lambda: pool.hold(pages, same, "a"))
    pool.drop(pages, same)
    refused(pool, "no holder", lambda: pool.hold(pages, same, "a"))


def test_a_shared_page_is_free_when_its_last_holder_is_gone(pool: Pool) -> None:
    lease, pages = sealed(pool, "a", 2)
    same = serials(lease.serial, lease.serial)
    pool.hold(pages[:1], same[:1], "a")
    assert pool.drop(pages, same).tolist() == [1]
    assert pool.state_of(0) is State.SEALED
    assert pool.drop(pages[:1], same[:1]).tolist() == [0]
    assert pool.counts()["free"] == 8
    pool.check_integrity()


def test_a_second_drop_is_refused_and_later_drops_nobody_elses_page(pool: Pool) -> None:
    lease = pool.open_lease("a")
    pages = pool.grant(lease, 8)
    stale = pool.serials_of(pages)
    pool.drop(pages, stale)
    refused(pool, "no holder", lambda: pool.drop(pages, stale))
    pool.grant(pool.open_lease("b"), 8)
    refused(pool, "of another lease", lambda: pool.drop(pages, stale))
    refused(pool, "one serial a page", lambda: pool.drop(pages, stale[:1]))


def test_a_pinned_page_waits_in_quarantine_for_every_pin(pool: Pool) -> None:
    lease = pool.open_lease("a")
    pages = pool.grant(lease, 3)
    first, second = pool.pin(pages), pool.pin(pages[:1])
    assert [pool.pins_of(page) for page in pages] == [2, 1, 1]
    assert pool.drop(pages, pool.serials_of(pages)).size == 0
    assert pool.counts() == {"free": 5, "leased": 0, "sealed": 0, "quarantined": 3}
    pool.check_integrity()
    assert pool.settle(first).tolist() == [1, 2]
    assert pool.state_of(0) is State.QUARANTINED
    assert pool.settle(second).tolist() == [0]
    pool.check_integrity()


def test_pinned_and_unpinned_pages_part_in_one_drop(pool: Pool) -> None:
    lease, pages = sealed(pool, "a", 4)
    pool.pin(pages[1:3])
    assert pool.drop(pages, pool.serials_of(pages)).tolist() == [0, 3]
    assert [pool.state_of(page) for page in pages] == [0, 3, 3, 0]
    pool.close_lease(lease)
    pool.check_integrity()


def test_a_quarantined_page_is_nobodys(pool: Pool) -> None:
    lease = pool.open_lease("a")
    pages = pool.grant(lease, 1)
    pool.pin(pages)
    same = pool.serials_of(pages)
    pool.drop(pages, same)
    refused(pool, "only held", lambda: pool.pin(pages))
    refused(pool, "no holder", lambda: pool.drop(pages, same))
    refused(pool, "no holder", lambda: pool.hold(pages, same, "a"))
    refused(pool, "with a writer", lambda: pool.seal(pages, lease))
    assert not set(pages.tolist()) & set(pool.grant(lease, 7).tolist())
    refused(pool, "0 free", lambda: pool.grant(lease, 1))


def test_a_settled_pin_leaves_held_pages_as_they_are(pool: Pool) -> None:
    pages = pool.grant(pool.open_lease("a"), 2)
    assert pool.settle(pool.pin(pages)).size == 0
    assert pool.counts()["leased"] == 2
    pool.check_integrity()


def test_a_pin_is_settled_once(pool: Pool) -> None:
    pages = pool.grant(pool.open_lease("a"), 1)
    first, second = pool.pin(pages), pool.pin(pages)
    pool.settle(first)
    refused(pool, "not open", lambda: pool.settle(first))
    refused(pool, "not open", lambda: pool.settle(second + 1))
    assert pool.pins_of(0) == 1


def test_a_pin_remembers_its_pages_whatever_its_caller_does_to_the_array(pool: Pool) -> None:
    pages = pool.grant(pool.open_lease("a"), 2)
    named = pages[:1].copy()
    grant = pool.pin(named)
    named[0] = 1
    pool.settle(grant)
    assert [pool.pins_of(page) for page in pages] == [0, 0]


def test_a_free_page_is_not_pinned(pool: Pool) -> None:
    refused(pool, "only held", lambda: pool.pin(at(0)))


def test_calls_on_no_pages_do_nothing(pool: Pool) -> None:
    none = at()
    assert pool.drop(none, serials()).size == 0
    pool.hold(none, serials(), "a")
    assert pool.settle(pool.pin(none)).size == 0
    assert pool.counts()["free"] == 8


def in_state(state: State) -> Pool:
    """A pool of one page in ``state``."""
    pool = Pool(1, 1)
    if state is not State.FREE:
        lease = pool.open_lease("a")
        pages = pool.grant(lease, 1)
        if state is State.SEALED:
            pool.seal(pages, lease)
        elif state is State.QUARANTINED:
            pool.pin(pages)
            pool.drop(pages, pool.serials_of(pages))
    assert pool.state_of(0) is state
    return pool


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", PageEvent)
def test_every_state_and_event_does_what_the_table_says(state: State, event: PageEvent) -> None:
    pool = in_state(state)
    after = PAGE_TRANSITIONS[event].get(state)
    if after is None:
        refused(pool, event.value, lambda: pool._move(at(0), event))
    else:
        pool._move(at(0), event)
        assert pool.state_of(0) is after
        assert pool.counts()[after.name.lower()] == 1


def test_a_page_has_three_ways_to_free_one_out_of_it_and_three_between() -> None:
    steps = {
        (before.name, event.name, after.name)
        for event, row in PAGE_TRANSITIONS.items()
        for before, after in row.items()
    }
    assert steps == {
        ("FREE", "GRANT", "LEASED"),
        ("LEASED", "SEAL", "SEALED"),
        ("LEASED", "LAST_HOLDER_GONE_PINNED", "QUARANTINED"),
        ("SEALED", "LAST_HOLDER_GONE_PINNED", "QUARANTINED"),
        ("LEASED", "LAST_HOLDER_GONE", "FREE"),
        ("SEALED", "LAST_HOLDER_GONE", "FREE"),
        ("QUARANTINED", "LAST_PIN_GONE", "FREE"),
    }


@pytest.mark.parametrize(
    ("column", "page", "value", "law"),
    [
        ("_counts", 0, 4, "counts"),
        ("_state", 0, 9, "counts"),
        ("_ring", 4, 5, "free ring"),  # a free page twice, another one lost
        ("_holders", 0, 0, "held pages"),
        ("_holders", 7, 1, "held pages"),
        ("_pins", 2, 0, "quarantine is not"),
        ("_pins", 7, 1, "quarantine is not"),
        ("_pins", 0, 2, "open grants"),
    ],
)
def test_the_integrity_check_names_the_broken_law(
    pool: Pool, column: str, page: int, value: int, law: str
) -> None:
    lease = pool.open_lease("a")
    pages = pool.grant(lease, 3)
    pool.seal(pages[1:2], lease)
    pool.pin(pages)
    pool.drop(pages[2:], pool.serials_of(pages[2:]))
    pool.check_integrity()
    getattr(pool, column)[page] = value
    with pytest.raises(LocalOwnershipError, match=law):
        pool.check_integrity()
