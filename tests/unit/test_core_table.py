"""Block tables: the reader holds what it expects to find, and `verify` finds what differs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.lease import Lease
from sekisho.core.memory import PageMemory
from sekisho.core.page import HEADER, PageLayout, chain, chain_root
from sekisho.core.table import BlockTable, verify

SIZE = 16
LAYOUT = PageLayout(SIZE, 1, 1, 4, 2, "m")
ROOT = chain_root("a", "m")
PAGES = 32
LEASE = Lease(77, 5)


@pytest.fixture
def memory() -> PageMemory:
    return PageMemory(np.zeros(PAGES * LAYOUT.page_bytes, np.uint8), LAYOUT, PAGES)


def at(*pages: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    return np.array(pages, np.intp)


def header(memory: PageMemory, page: int) -> Any:
    """The header of a page as it lies in memory; assign to its fields to change it."""
    return memory.words[page].view(HEADER)[0]


def expecting(pages: list[int], token_count: int, request: int = 1) -> BlockTable:
    """A table whose pages a remote writer fills with tokens 0, 1, 2 …"""
    table = BlockTable(LAYOUT, request, Lease(LEASE.incarnation, LEASE.serial + request), ROOT)
    tokens = list(range(token_count))
    tail = tokens[token_count - token_count % SIZE :]
    table.expect(at(*pages), token_count, tail, chain(ROOT, tokens, SIZE))
    return table


def landed(memory: PageMemory, *tables: BlockTable) -> None:
    """An honest writer writes what the tables expect."""
    for table in tables:
        memory.words[table.pages] = table.words


def opened(memory: PageMemory, pages: list[int]) -> BlockTable:
    table = BlockTable(LAYOUT, 1, LEASE, ROOT)
    table.open(at(*pages), memory)
    return table


def state(table: BlockTable) -> tuple[Any, ...]:
    return (
        table.length,
        table.shared,
        table.sealed,
        table.pages.tolist(),
        table.words.tolist(),
        list(table._tail),
    )


def refused(table: BlockTable, match: str, call: Callable[[], object]) -> None:
    before = state(table)
    with pytest.raises(LocalOwnershipError, match=match):
        call()
    assert state(table) == before


# ---- building


def test_expected_headers_of_a_remote_writer() -> None:
    table = expecting([4, 9, 2], 35)
    found = table.words.view(HEADER).reshape(3)
    assert found["serial"].tolist() == [6, 6, 6]
    assert found["incarnation"].tolist() == [77] * 3
    assert found["ordinal"].tolist() == [0, 1, 2]
    assert found["filled"].tolist() == [16, 16, 3]
    assert [bytes(one) for one in found["token_digest"]] == chain(ROOT, list(range(35)), SIZE)
    assert (table.length, table.capacity, table.shared) == (35, 48, 0)
    assert table.pages.tolist() == [4, 9, 2]
    assert table.serials.tolist() == [6, 6, 6]


def test_adopted_pages_keep_their_writers_leases() -> None:
    table = BlockTable(LAYOUT, 1, LEASE, ROOT)
    digests = chain(ROOT, list(range(32)), SIZE)
    table.adopt(at(7, 3), np.array([2, 4], np.uint64), digests)
    found = table.words.view(HEADER).reshape(2)
    assert found["serial"].tolist() == [2, 4]
    assert found["ordinal"].tolist() == [0, 1]
    assert found["filled"].tolist() == [16, 16]
    assert (table.length, table.shared, table.capacity) == (32, 2, 32)
    assert [table.digest_at(i) for i in (-1, 0, 1)] == [ROOT, *digests]
    refused(table, "comes first", lambda: table.adopt(at(1), np.ones(1, np.uint64), digests[:1]))


def test_own_pages_follow_an_adopted_prefix() -> None:
    tokens = list(range(40))
    digests = chain(ROOT, tokens, SIZE)
    table = BlockTable(LAYOUT, 1, LEASE, ROOT)
    table.adopt(at(7), np.array([2], np.uint64), digests[:1])
    table.expect(at(1, 0), 40, tokens[32:], digests[1:])
    found = table.words.view(HEADER).reshape(3)
    assert found["serial"].tolist() == [2, LEASE.serial, LEASE.serial]
    assert found["ordinal"].tolist() == [0, 1, 2]
    assert found["filled"].tolist() == [16, 16, 8]


def test_an_opened_page_has_an_empty_header_in_memory(memory: PageMemory) -> None:
    memory.words[5] = 1
    table = opened(memory, [5, 6])
    assert np.array_equal(memory.words[[5, 6]], table.words)
    assert [header(memory, page)["filled"] for page in (5, 6)] == [0, 0]
    assert bytes(header(memory, 5)["token_digest"]) == ROOT
    assert verify(memory, [table]) == {}
    assert not memory.words[7].any()


@pytest.mark.parametrize("full", [0, 1, 2, 3])
def test_an_opened_page_carries_the_digest_of_the_page_before(
    memory: PageMemory, full: int
) -> None:
    """So also a page without a token of its own says which text it goes on."""
    tokens = list(range(full * SIZE))
    table = BlockTable(LAYOUT, 1, LEASE, ROOT)
    if full:
        table.open(at(*range(full)), memory)
        table.append(tokens, memory)
    table.open(at(10, 11), memory)
    last = [ROOT, *chain(ROOT, tokens, SIZE)][-1]
    assert [bytes(header(memory, page)["token_digest"]) for page in (10, 11)] == [last] * 2


def test_pages_follow_full_pages_only(memory: PageMemory) -> None:
    table = expecting([1, 2], 20)
    refused(table, "only follow full", lambda: table.open(at(3), memory))
    refused(table, "only follow full", lambda: table.expect(at(3), 40, list(range(8)), [ROOT]))
    assert not memory.words.any()


@pytest.mark.parametrize("pages", [(), (1,), (1, 2, 3)])
def test_as_many_pages_as_the_tokens_need(pages: tuple[int, ...]) -> None:
    table = BlockTable(LAYOUT, 1, LEASE, ROOT)
    digests = [ROOT] * len(pages)
    refused(table, "wrong page count", lambda: table.expect(at(*pages), 20, [0] * 4, digests))


@pytest.mark.parametrize("tail", [0, 3, 5, 16])
def test_the_tail_is_the_last_pages_tokens(tail: int) -> None:
    table = BlockTable(LAYOUT, 1, LEASE, ROOT)
    refused(table, "tail", lambda: table.expect(at(1, 2), 20, [0] * tail, [ROOT] * 2))


def test_one_digest_a_page() -> None:
    table = BlockTable(LAYOUT, 1, LEASE, ROOT)
    refused(table, "a digest", lambda: table.expect(at(1, 2), 32, [], [ROOT]))
    refused(table, "a digest", lambda: table.adopt(at(1, 2), np.ones(2, np.uint64), [ROOT]))


def test_a_table_grows_beyond_its_first_room(memory: PageMemory) -> None:
    table = BlockTable(LAYOUT, 1, LEASE, ROOT)
    tokens = list(range(SIZE * 20))
    for page in range(20):
        table.open(at(page + 3), memory)
        table.append(tokens[page * SIZE : (page + 1) * SIZE], memory)
    assert table.pages.tolist() == list(range(3, 23))
    assert [table.digest_at(i) for i in range(20)] == chain(ROOT, tokens, SIZE)
    assert verify(memory, [table]) == {}


def test_a_table_keeps_its_pages_whatever_its_caller_does_to_the_array(
    memory: PageMemory,
) -> None:
    table, named = BlockTable(LAYOUT, 1, LEASE, ROOT), at(3, 5)
    table.open(named, memory)
    named[:] = 0
    assert table.pages.tolist() == [3, 5]
    memory.words[3] = 0
    assert verify(memory, [table])[1][0].kind == "unwritten"


# ---- appending


@pytest.mark.parametrize("steps", [[40], [1] * 40, [15, 2, 23], [16, 16, 8], [0, 33, 0, 7]])
def test_appended_in_any_parts_the_headers_are_the_same(
    memory: PageMemory, steps: list[int]
) -> None:
    tokens = list(range(100, 140))
    table = opened(memory, [8, 1, 4])
    done = 0
    for count in steps:
        table.append(tokens[done : done + count], memory)
        done += count
        assert verify(memory, [table]) == {}
        assert table.length == done
    found = table.words.view(HEADER).reshape(3)
    assert found["filled"].tolist() == [16, 16, 8]
    assert [bytes(one) for one in found["token_digest"]] == [*chain(ROOT, tokens[:32], SIZE), ROOT]


def test_appending_goes_on_where_the_remote_writer_stopped(memory: PageMemory) -> None:
    table = expecting([4, 9], 20)
    landed(memory, table)
    table.append(list(range(20, 32)), memory)
    assert verify(memory, [table]) == {}
    assert table.digest_at(1) == chain(ROOT, list(range(32)), SIZE)[1]
    table.open(at(2), memory)
    table.append([32], memory)
    assert verify(memory, [table]) == {}


def test_no_token_beyond_the_pages(memory: PageMemory) -> None:
    table = opened(memory, [3])
    table.append([1] * 10, memory)
    before = memory.words.copy()
    refused(table, "beyond", lambda: table.append([1] * 7, memory))
    assert np.array_equal(memory.words, before)
    table.append([1] * 6, memory)
    refused(table, "beyond", lambda: table.append([1], memory))


@pytest.mark.parametrize("count", [1, 12], ids=["page stays open", "page becomes full"])
@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("magic", 0, "unwritten"),
        ("serial", 99, "foreign"),
        ("incarnation", 99, "foreign"),
        ("ordinal", 0, "misplaced"),
        ("filled", 3, "short"),
        ("token_digest", b"x" * 16, "short"),
        ("payload_digest", b"x" * 16, "short"),
    ],
)
def test_what_lands_between_verify_and_append_stays_visible(
    memory: PageMemory, field: str, value: object, kind: str, count: int
) -> None:
    table = expecting([4, 9], 20)
    landed(memory, table)
    assert verify(memory, [table]) == {}
    header(memory, 9)[field] = value
    there = memory.words[9].copy()
    for _ in range(12 // count):
        table.append([1] * count, memory)
        assert np.array_equal(memory.words[9], there)
        (evidence,) = verify(memory, [table])[table.request]
        assert (evidence.page, evidence.kind) == (9, kind)


def test_append_never_writes_a_lease(memory: PageMemory) -> None:
    table = expecting([4, 9], 20)
    landed(memory, table)
    before = memory.words[:, :3].copy()
    table.append(list(range(12)), memory)
    assert np.array_equal(memory.words[:, :3], before)


# ---- verify


def corrupted(memory: PageMemory, field: str, value: object) -> BlockTable:
    table = expecting([4, 9, 2], 35)
    landed(memory, table)
    header(memory, 9)[field] = value
    return table


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("magic", 0, "unwritten"),
        ("magic", 0x32504B53, "layout"),
        ("layout", 1, "layout"),
        ("incarnation", 78, "foreign"),
        ("serial", 5, "foreign"),
        ("ordinal", 2, "misplaced"),
        ("filled", 15, "short"),
        ("filled", 17, "short"),
        ("token_digest", bytes(16), "wrong_text"),
        ("payload_digest", b"\1" + bytes(15), "corrupt"),
    ],
)
def test_the_kind_of_a_finding(memory: PageMemory, field: str, value: object, kind: str) -> None:
    table = corrupted(memory, field, value)
    (evidence,) = verify(memory, [table])[table.request]
    assert (evidence.kind, evidence.request, evidence.page) == (kind, 1, 9)


def test_a_never_written_page_is_told_from_a_foreign_one(memory: PageMemory) -> None:
    mine, other = expecting([4, 9], 20, request=1), expecting([5, 9], 20, request=2)
    landed(memory, mine)
    memory.blank(at(4))
    memory.words[9] = other.words[1]
    first, second = verify(memory, [mine])[1]
    assert (first.kind, second.kind) == ("unwritten", "foreign")
    assert second.expected == f"{mine.lease} ordinal=1 filled=4"
    assert second.found == f"{other.lease} ordinal=1 filled=4"


@pytest.mark.parametrize("others", [0, 1, 2])
def test_every_bit_of_a_header_is_compared(memory: PageMemory, others: int) -> None:
    """Also beside tables without a page, whose expectations are joined to those of the others."""
    table = expecting([4, 9, 2], 35)
    landed(memory, table)
    batch = [BlockTable(LAYOUT, 7 + i, LEASE, ROOT) for i in range(others)] + [table]
    raw = memory._buffer[9 * LAYOUT.page_bytes :][:64]
    for bit in range(64 * 8):
        raw[bit // 8] ^= 1 << bit % 8
        found = verify(memory, batch)
        assert [(one, item.page) for one, items in found.items() for item in items] == [(1, 9)]
        raw[bit // 8] ^= 1 << bit % 8
    assert verify(memory, batch) == {}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_fault_in_any_table_of_a_batch_is_found(memory: PageMemory, count: int) -> None:
    tables = [expecting([2 * i, 2 * i + 1], 20, request=i) for i in range(count)]
    for broken in range(2 * count):
        landed(memory, *tables)
        assert verify(memory, tables) == {}
        memory.blank(at(broken))
        found = verify(memory, tables)
        assert {request: [item.page for item in items] for request, items in found.items()} == {
            broken // 2: [broken]
        }


def test_no_tables_no_findings(memory: PageMemory) -> None:
    assert verify(memory, []) == {}
    assert verify(memory, [BlockTable(LAYOUT, 1, LEASE, ROOT)]) == {}


def test_findings_go_to_the_requests_they_concern(memory: PageMemory) -> None:
    tables = [expecting([3 * i, 3 * i + 1, 3 * i + 2], 40, request=i) for i in range(4)]
    landed(memory, *tables)
    assert verify(memory, tables) == {}
    memory.blank(at(3, 5, 9))
    found = verify(memory, tables)
    assert {request: [item.page for item in items] for request, items in found.items()} == {
        1: [3, 5],
        3: [9],
    }


@pytest.mark.parametrize("read", [0, 8, 31])
def test_attention_was_given_another_page_than_the_table_names(
    memory: PageMemory, read: int
) -> None:
    """Padding that reads page 0, an index off by one, another request's page."""
    table, other = expecting([4, 9], 20, request=1), expecting([8, 0], 20, request=2)
    landed(memory, table, other)
    given = [at(4, read), other.pages]
    found = verify(memory, [table, other], given)
    assert [(item.page, item.kind) for item in found.pop(1)] == [
        (read, "foreign" if read in (0, 8) else "unwritten")
    ]
    assert found == {}
    assert verify(memory, [table, other], [table.pages, other.pages]) == {}


def test_pages_in_another_order_are_misplaced(memory: PageMemory) -> None:
    table = expecting([4, 9], 32)
    landed(memory, table)
    found = verify(memory, [table], [at(9, 4)])
    assert [item.kind for item in found[1]] == ["misplaced"] * 2


@pytest.mark.parametrize("given", [[(4,), (9, 8, 0)], [(4, 9), (8,)], [(4, 9)], [(), ()]])
def test_each_request_is_given_as_many_pages_as_it_has(
    memory: PageMemory, given: list[tuple[int, ...]]
) -> None:
    """Also where the sum is right: request 2 would attend to a page of request 1."""
    table, other = expecting([4, 9], 20, request=1), expecting([8, 0], 20, request=2)
    landed(memory, table, other)
    with pytest.raises(LocalOwnershipError, match="another number of pages"):
        verify(memory, [table, other], [at(*pages) for pages in given])


def test_payload_digests_are_expected_by_policy(memory: PageMemory) -> None:
    table = expecting([4, 9, 2], 35)
    landed(memory, table)
    for page in (4, 9, 2):
        memory.payload(page)[:] = page
    memory.set_payload_digest(9)
    memory.set_payload_digest(2)
    table.expect_payloads(memory, 1)
    assert verify(memory, [table]) == {}
    memory.payload(2)[7] ^= 1
    assert verify(memory, [table]) == {}
    table.expect_payloads(memory, 1)
    assert [(item.page, item.kind) for item in verify(memory, [table])[1]] == [(2, "corrupt")]
