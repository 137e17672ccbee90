"""Serials are u64 wherever they go: kept as a float, two leases would become equal above 2**53."""

from typing import Any

import numpy as np
import pytest

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.lease import U64_MAX, Lease
from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout, chain, chain_root
from sekisho.core.pool import Pool
from sekisho.core.prefix import PrefixCache
from sekisho.core.table import BlockTable, verify

LAYOUT = PageLayout(16, 1, 1, 4, 2, "m")
ROOT = chain_root("a", "m")
TEXT = chain(ROOT, list(range(64)), 16)
LARGE = [2**53 + 1, 2**63, U64_MAX - 1]


def serials(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def lease_at(pool: Pool, serial: int) -> Lease:
    """The lease that a pool in long use would hand out as its number ``serial``."""
    pool._mint._serial = serial - 1
    return pool.open_lease("a")


@pytest.mark.parametrize("serial", LARGE)
def test_a_drop_under_the_neighbouring_serial_is_refused(serial: int) -> None:
    pool = Pool(4, 1)
    lease = lease_at(pool, serial)
    pages = pool.grant(lease, 1)
    assert pool.serials_of(pages).tolist() == [serial]
    for wrong in (serial - 1, serial + 1):
        with pytest.raises(LocalOwnershipError, match="of another lease"):
            pool.drop(pages, serials(wrong))
    assert pool.drop(pages, serials(serial)).tolist() == pages.tolist()


@pytest.mark.parametrize("serial", LARGE)
def test_a_table_expects_all_64_bits(serial: int) -> None:
    memory = PageMemory(np.zeros(2 * LAYOUT.page_bytes, np.uint8), LAYOUT, 2)
    pages = np.array([0, 1], np.intp)
    for fill in ("open", "expect"):
        table = BlockTable(LAYOUT, 1, Lease(1, serial), ROOT)
        if fill == "open":
            table.open(pages, memory)
        else:
            table.expect(pages, 32, [], TEXT[:2])
            memory.words[pages] = table.words
        assert table.serials.tolist() == [serial] * 2
        assert verify(memory, [table]) == {}
        memory.words[1, 2] ^= np.uint64(1)
        assert [item.kind for item in verify(memory, [table])[1]] == ["foreign"]


def cached_under(*numbers: int) -> tuple[Pool, PrefixCache]:
    """A cache that alone holds one page under each of these serials."""
    pool = Pool(8, 1)
    cache = PrefixCache(pool)
    for number, digest in zip(numbers, TEXT, strict=False):
        lease = lease_at(pool, number)
        pages = pool.grant(lease, 1)
        pool.seal(pages, lease)
        cache.publish([digest], pages, serials(number), "a")
        pool.drop(pages, serials(number))
    return pool, cache


def test_a_prefix_under_small_and_large_serials_is_acquired_and_evicted() -> None:
    """NumPy makes floats of a list on both sides of 2**63."""
    numbers = (5, 2**63 + 5, U64_MAX)
    pool, cache = cached_under(*numbers)
    pages, found = cache.acquire(TEXT[:3], "a")
    assert found.dtype == np.uint64
    assert found.tolist() == list(numbers)
    pool.drop(pages, found)
    assert sorted(cache.evict(3).tolist()) == sorted(pages.tolist())
    assert pool.free_count == 8
    pool.check_integrity()


def test_eviction_names_the_lease_in_all_64_bits() -> None:
    """Against a ledger that was damaged: the neighbouring serial is another owner."""
    pool, cache = cached_under(5, 2**63 + 5)
    pool._serial[1] ^= np.uint64(1)
    with pytest.raises(LocalOwnershipError, match="of another lease"):
        cache.evict(2)
    assert [pool.holders_of(page) for page in (0, 1)] == [1, 1]


def test_nothing_acquired_are_u64_serials_too() -> None:
    pages, found = PrefixCache(Pool(1, 1)).acquire([], "a")
    assert [pages.dtype, found.dtype] == [np.dtype(np.intp), np.dtype(np.uint64)]


@pytest.mark.parametrize("number", [5, *LARGE])
def test_a_page_of_any_serial_is_forgotten(number: int) -> None:
    pool, cache = cached_under(number)
    cache.forget(np.array([0], np.intp))
    assert len(cache) == 0
    assert pool.free_count == 8
