"""Page memory: headers and payloads of one page never touch those of another."""

import numpy as np
import pytest

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.memory import PageMemory, make_headers
from sekisho.core.page import HEADER, HEADER_SIZE, MAGIC, PageLayout, payload_digest

LAYOUT = PageLayout(16, 1, 1, 4, 2, "m")
PAGES = 5


@pytest.fixture
def memory() -> PageMemory:
    """Every byte is set, so that whatever is erased or left shows."""
    buffer = np.full(PAGES * LAYOUT.page_bytes, 0xA5, np.uint8)
    return PageMemory(buffer, LAYOUT, PAGES)


def raw(memory: PageMemory) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return memory._buffer.reshape(PAGES, LAYOUT.page_bytes)


def test_headers_have_every_field_in_its_place() -> None:
    digests = [b"a" * 16, b"b" * 16]
    words = make_headers(
        LAYOUT, 9, np.array([4, 5], np.uint64), 7, np.array([16, 3], np.uint64), digests
    )
    headers = words.view(HEADER).reshape(2)
    assert headers["magic"].tolist() == [MAGIC] * 2
    assert headers["layout"].tolist() == [LAYOUT.fingerprint] * 2
    assert headers["incarnation"].tolist() == [9, 9]
    assert headers["serial"].tolist() == [4, 5]
    assert headers["ordinal"].tolist() == [7, 8]
    assert headers["filled"].tolist() == [16, 3]
    assert [bytes(one) for one in headers["token_digest"]] == digests
    assert [bytes(one) for one in headers["payload_digest"]] == [bytes(16)] * 2


@pytest.mark.parametrize("count", [1024, 1025, 2500])
@pytest.mark.parametrize("first", [7, 9_000])
def test_headers_of_a_long_table_are_those_of_each_page(count: int, first: int) -> None:
    """They are made in blocks. Two rounds, lest memory that is reused holds the right words."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    digests = [index.to_bytes(16, "little") for index in range(first, first + count)]
    words = make_headers(LAYOUT, 9, numbers, first, numbers % np.uint64(17), digests)
    headers = words.view(HEADER).reshape(count)
    assert (headers["magic"] == MAGIC).all()
    assert (headers["layout"] == LAYOUT.fingerprint).all()
    assert (headers["incarnation"] == 9).all()
    assert np.array_equal(headers["serial"], numbers)
    assert np.array_equal(headers["ordinal"], numbers)
    assert np.array_equal(headers["filled"], numbers % 17)
    assert headers["token_digest"].tobytes() == b"".join(digests)
    assert not words[:, 6:].any()


def test_no_headers_for_no_digests() -> None:
    none = np.zeros(0, np.uint64)
    assert make_headers(LAYOUT, 9, none, 0, none, []).shape == (0, 8)


@pytest.mark.parametrize(("serials", "filled"), [(1, 2), (2, 1), (3, 2), (2, 3), (1, 1)])
def test_headers_of_unequal_columns_are_refused(serials: int, filled: int) -> None:
    """NumPy would broadcast a column of one: two pages under one page's lease."""
    with pytest.raises(LocalOwnershipError, match="one serial and one filled"):
        make_headers(
            LAYOUT, 9, np.ones(serials, np.uint64), 0, np.ones(filled, np.uint64), [bytes(16)] * 2
        )


def test_a_buffer_smaller_than_its_pages_is_refused() -> None:
    size = PAGES * LAYOUT.page_bytes
    PageMemory(np.zeros(size, np.uint8), LAYOUT, PAGES)
    with pytest.raises(LocalOwnershipError, match="smaller"):
        PageMemory(np.zeros(size - 1, np.uint8), LAYOUT, PAGES)


def test_words_and_payloads_are_views_that_cover_a_page_once(memory: PageMemory) -> None:
    for page in range(PAGES):
        memory.words[page] = page
        memory.payload(page)[:] = page + 100
    for page in range(PAGES):
        row = raw(memory)[page]
        assert (row[:HEADER_SIZE].view("<u8") == page).all()
        assert (row[HEADER_SIZE:] == page + 100).all()


def test_gather_copies_headers_in_the_order_asked(memory: PageMemory) -> None:
    memory.words[:] = np.arange(PAGES * 8).reshape(PAGES, 8)
    pages = np.array([3, 0, 3], np.intp)
    found = memory.gather(pages)
    assert np.array_equal(found, memory.words[pages])
    memory.words[3] = 0
    assert found[0, 1] == 25
    assert memory.gather(np.zeros(0, np.intp)).shape == (0, 8)


def test_blank_erases_headers_alone(memory: PageMemory) -> None:
    memory.blank(np.array([1, 3], np.intp))
    for page in range(PAGES):
        assert (raw(memory)[page, :HEADER_SIZE] == (0 if page in (1, 3) else 0xA5)).all()
        assert (raw(memory)[page, HEADER_SIZE:] == 0xA5).all()


def test_scrub_erases_whole_pages_and_no_others(memory: PageMemory) -> None:
    memory.scrub(np.array([0, 4], np.intp))
    for page in range(PAGES):
        assert (raw(memory)[page] == (0 if page in (0, 4) else 0xA5)).all()


def test_the_payload_digest_goes_into_its_own_header(memory: PageMemory) -> None:
    memory.payload(2)[5] = 1
    before = raw(memory).copy()
    memory.set_payload_digest(2)
    digest = payload_digest(memory.payload(2))
    assert memory.digest_words(2).tobytes() == digest
    before[2, 48:64] = np.frombuffer(digest, np.uint8)
    assert np.array_equal(raw(memory), before)
