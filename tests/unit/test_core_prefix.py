"""Prefix cache: reuse within a scope, and eviction that leaves referenced pages alone."""

from typing import Any

import numpy as np
import pytest

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.lease import Lease
from sekisho.core.ledger import Pages, State
from sekisho.core.page import chain, chain_root
from sekisho.core.pool import Pool
from sekisho.core.prefix import PrefixCache

Serials = np.ndarray[Any, np.dtype[np.uint64]]


def digests_of(scope: str, tokens: list[int]) -> list[bytes]:
    return chain(chain_root(scope, "m"), tokens, 16)


A = digests_of("a", list(range(64)))
B = digests_of("b", list(range(64)))


@pytest.fixture
def pool() -> Pool:
    return Pool(16, 3)


@pytest.fixture
def cache(pool: Pool) -> PrefixCache:
    return PrefixCache(pool)


def sealed(pool: Pool, scope: str, count: int) -> tuple[Lease, Pages, Serials]:
    lease = pool.open_lease(scope)
    pages = pool.grant(lease, count)
    pool.seal(pages, lease)
    return lease, pages, pool.serials_of(pages)


def published(pool: Pool, cache: PrefixCache, scope: str, digests: list[bytes]) -> Pages:
    """Pages that only the cache holds."""
    _, pages, serials = sealed(pool, scope, len(digests))
    cache.publish(digests, pages, serials, scope)
    pool.drop(pages, serials)
    return pages


def test_what_was_published_is_matched_up_to_the_first_gap(pool: Pool, cache: PrefixCache) -> None:
    assert cache.match(A) == 0
    published(pool, cache, "a", A[:2])
    assert cache.match(A) == 2
    assert cache.match(A[:1]) == 1
    assert cache.match([]) == 0
    assert cache.match([A[3], A[0]]) == 0
    assert len(cache) == 2


def test_equal_text_of_another_scope_does_not_match(pool: Pool, cache: PrefixCache) -> None:
    published(pool, cache, "a", A)
    assert cache.match(B) == 0


def test_acquired_pages_have_one_more_holder_and_keep_their_leases(
    pool: Pool, cache: PrefixCache
) -> None:
    pages = published(pool, cache, "a", A[:2])
    found, serials = cache.acquire(A[:2], "a")
    assert found.tolist() == pages.tolist()
    assert serials.tolist() == pool.serials_of(pages).tolist()
    assert [pool.holders_of(page) for page in pages] == [2, 2]
    assert pool.drop(found, serials).size == 0
    assert [pool.state_of(page) for page in pages] == [State.SEALED] * 2


def test_a_page_of_another_scope_is_not_handed_out(pool: Pool, cache: PrefixCache) -> None:
    """Even if a key of another scope were to come out equal, the pool looks once more."""
    pages = published(pool, cache, "a", A[:2])
    pool.open_lease("b")
    for scope in ("b", "unknown"):
        with pytest.raises(LocalOwnershipError, match="another scope"):
            cache.acquire(A[:2], scope)
    assert [pool.holders_of(page) for page in pages] == [1, 1]


def test_only_cached_digests_are_acquired(pool: Pool, cache: PrefixCache) -> None:
    pages = published(pool, cache, "a", A[:1])
    with pytest.raises(KeyError):
        cache.acquire(A[:2], "a")
    assert pool.holders_of(int(pages[0])) == 1


def test_nothing_is_acquired_for_nothing(cache: PrefixCache) -> None:
    pages, serials = cache.acquire([], "a")
    assert pages.size == serials.size == 0


def test_only_sealed_pages_of_the_scope_are_published(pool: Pool, cache: PrefixCache) -> None:
    lease = pool.open_lease("a")
    pages = pool.grant(lease, 2)
    serials = pool.serials_of(pages)
    with pytest.raises(LocalOwnershipError, match="only sealed"):
        cache.publish(A[:2], pages, serials, "a")
    pool.seal(pages, lease)
    with pytest.raises(LocalOwnershipError, match="another scope"):
        cache.publish(A[:2], pages, serials, "b")
    assert len(cache) == cache.match(A) == 0
    assert pool.holders_of(int(pages[0])) == 1


def test_a_text_that_is_cached_already_keeps_its_page(pool: Pool, cache: PrefixCache) -> None:
    first = published(pool, cache, "a", A[:1])
    _, second, serials = sealed(pool, "a", 2)
    cache.publish(A[:2], second, serials, "a")
    assert [pool.holders_of(page) for page in second] == [1, 2]
    found, _ = cache.acquire(A[:2], "a")
    assert found.tolist() == [first[0], second[1]]
    cache.publish(A[:2], second, serials, "a")
    assert [pool.holders_of(page) for page in second] == [1, 3]


def test_eviction_frees_as_many_as_asked_the_deepest_of_a_text_first(
    pool: Pool, cache: PrefixCache
) -> None:
    pages = published(pool, cache, "a", A)
    assert cache.evict(0).size == 0
    assert cache.evict(1).tolist() == [pages[3]]
    assert cache.match(A) == 3
    assert cache.evict(99).tolist() == pages[2::-1].tolist()
    assert len(cache) == 0
    assert pool.free_count == 16
    pool.check_integrity()


def test_the_least_recently_used_text_goes_first(pool: Pool, cache: PrefixCache) -> None:
    first = published(pool, cache, "a", A[:1])
    second = published(pool, cache, "b", B[:1])
    pool.drop(*cache.acquire(A[:1], "a"))
    assert cache.evict(1).tolist() == second.tolist()
    published(pool, cache, "b", B[:1])
    _, again, serials = sealed(pool, "a", 1)
    cache.publish(A[:1], again, serials, "a")
    cache.evict(1)
    assert cache.match(A) == 1
    assert cache.match(B) == 0
    assert cache.evict(1).tolist() == first.tolist()


def test_a_referenced_page_is_never_evicted(pool: Pool, cache: PrefixCache) -> None:
    pages = published(pool, cache, "a", A)
    held, serials = cache.acquire(A[:2], "a")
    assert sorted(cache.evict(99).tolist()) == pages[2:].tolist()
    assert cache.match(A) == 2
    pool.drop(held, serials)
    assert sorted(cache.evict(99).tolist()) == pages[:2].tolist()


def test_a_page_that_another_process_reads_is_not_evicted(pool: Pool, cache: PrefixCache) -> None:
    pages = published(pool, cache, "a", A[:2])
    grant = pool.pin(pages[1:])
    assert cache.evict(99).tolist() == pages[:1].tolist()
    assert pool.state_of(int(pages[1])) is State.SEALED
    assert pool.settle(grant).size == 0
    assert cache.evict(99).tolist() == pages[1:].tolist()


def test_a_forgotten_page_is_offered_no_more_and_waits_for_its_holders(
    pool: Pool, cache: PrefixCache
) -> None:
    pages = published(pool, cache, "a", A[:3])
    held, serials = cache.acquire(A[:2], "a")
    grant = pool.pin(pages[2:])
    cache.forget(pages[1:])
    assert cache.match(A) == 1
    assert pool.state_of(int(pages[1])) is State.SEALED
    assert pool.state_of(int(pages[2])) is State.QUARANTINED
    assert pool.drop(held, serials).tolist() == [pages[1]]
    assert pool.settle(grant).tolist() == [pages[2]]
    cache.forget(pages[1:])
    assert len(cache) == 1
    pool.check_integrity()
