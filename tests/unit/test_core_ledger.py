"""The ledger beside another engine's allocator, which chooses the pages itself."""

import numpy as np
import pytest

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.ledger import Ledger, State
from sekisho.core.pool import Pool


def pages(*indices: int) -> np.ndarray:
    return np.array(indices, np.intp)


def test_pages_chosen_by_the_caller_are_leased_and_come_back() -> None:
    ledger = Ledger(8, 7)
    lease = ledger.open_lease("a")
    ledger.claim(lease, pages(5, 2))
    assert ledger.counts() == {"free": 6, "leased": 2, "sealed": 0, "quarantined": 0}
    assert ledger.serials_of(pages(5, 2)).tolist() == [lease.serial] * 2
    assert ledger.drop(pages(2, 5), ledger.serials_of(pages(2, 5))).tolist() == [2, 5]
    ledger.check_integrity()


def test_a_page_of_somebody_else_cannot_be_claimed() -> None:
    ledger = Ledger(8, 7)
    ledger.claim(ledger.open_lease("a"), pages(3))
    other = ledger.open_lease("b")
    with pytest.raises(LocalOwnershipError, match="illegal for a page here: grant"):
        ledger.claim(other, pages(4, 3))
    with pytest.raises(LocalOwnershipError, match="named twice"):
        ledger.claim(other, pages(4, 4))
    with pytest.raises(LocalOwnershipError, match="out of range"):
        ledger.claim(other, pages(8))
    assert ledger.state_of(4) is State.FREE


def test_a_closed_lease_claims_nothing() -> None:
    ledger = Ledger(8, 7)
    lease = ledger.open_lease("a")
    ledger.close_lease(lease)
    with pytest.raises(LocalOwnershipError, match="not open"):
        ledger.claim(lease, pages(1))


def test_a_claimed_page_with_a_writer_waits_for_it() -> None:
    ledger = Ledger(8, 7)
    ledger.claim(ledger.open_lease("a"), pages(1, 2))
    grant = ledger.pin(pages(2))
    serials = ledger.serials_of(pages(1, 2))
    assert ledger.drop(pages(1, 2), serials).tolist() == [1]
    with pytest.raises(LocalOwnershipError, match="illegal"):
        ledger.claim(ledger.open_lease("b"), pages(2))
    assert ledger.settle(grant).tolist() == [2]
    ledger.claim(ledger.open_lease("c"), pages(2))
    ledger.check_integrity()


def test_a_pool_lets_nobody_else_choose() -> None:
    pool = Pool(8, 7)
    with pytest.raises(LocalOwnershipError, match="chooses its pages itself"):
        pool.claim(pool.open_lease("a"), pages(1))
    assert pool.free_count == 8


def test_pages_are_found_by_their_state() -> None:
    ledger = Ledger(4, 7)
    ledger.claim(ledger.open_lease("a"), pages(3, 1))
    assert ledger.pages_in(State.LEASED).tolist() == [1, 3]
    assert ledger.states_of(pages(1, 0)).tolist() == [State.LEASED, State.FREE]
