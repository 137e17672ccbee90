"""Header format, layout and digests: pinned to bytes, because two nodes must agree on them."""

import hashlib
import struct
from dataclasses import asdict, replace

import numpy as np
import pytest

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.page import (
    DIGEST_SIZE,
    HEADER,
    HEADER_SIZE,
    MAGIC,
    PageLayout,
    chain,
    chain_next,
    chain_root,
    payload_digest,
)

LAYOUT = PageLayout(16, 3, 2, 8, 2, "m")
ROOT = chain_root("tenant", "m")


def test_the_header_is_64_little_endian_bytes_in_the_documented_order() -> None:
    header = np.zeros(1, HEADER)
    header[0] = (MAGIC, 0x0A0B0C0D, 2**63, 2**64 - 1, 5, 6, b"t" * 16, b"p" * 16)
    packed = struct.pack("<IIQQII", MAGIC, 0x0A0B0C0D, 2**63, 2**64 - 1, 5, 6)
    assert header.tobytes() == packed + b"t" * 16 + b"p" * 16
    assert HEADER.itemsize == HEADER_SIZE == 64
    assert struct.pack("<I", MAGIC) == b"SKP1"


def test_sizes_of_a_page() -> None:
    assert LAYOUT.half_layer_elements == 2 * 8 * 16
    assert LAYOUT.payload_bytes == 3 * 2 * (2 * 8 * 16) * 2
    assert LAYOUT.page_bytes == 64 + LAYOUT.payload_bytes


@pytest.mark.parametrize("name", ["layer_count", "kv_head_count", "head_size", "element_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_layout_without_content_is_refused(name: str, value: int) -> None:
    with pytest.raises(LocalOwnershipError, match=name):
        PageLayout(**(asdict(LAYOUT) | {name: value}))


def test_the_smallest_layout_is_one_of_everything() -> None:
    assert PageLayout(16, 1, 1, 1, 1, "m").page_bytes == 64 + 2 * 16


@pytest.mark.parametrize("page_size", [0, -16, 1, 8, 17, 24])
def test_a_page_size_that_is_no_multiple_of_16_is_refused(page_size: int) -> None:
    with pytest.raises(LocalOwnershipError, match="page_size"):
        replace(LAYOUT, page_size=page_size)


def test_the_fingerprint_covers_every_field() -> None:
    others = [
        replace(LAYOUT, page_size=32),
        replace(LAYOUT, layer_count=4),
        replace(LAYOUT, kv_head_count=3),
        replace(LAYOUT, head_size=16),
        replace(LAYOUT, element_size=4),
        replace(LAYOUT, model="n"),
        replace(LAYOUT, layer_count=2, kv_head_count=3),
    ]
    prints = [layout.fingerprint for layout in (LAYOUT, *others)]
    assert len(set(prints)) == len(prints)
    assert all(0 <= one < 2**32 for one in prints)
    framed = hashlib.blake2b(b"16\x1f3\x1f2\x1f8\x1f2\x1fm", digest_size=4).digest()
    assert LAYOUT.fingerprint == struct.unpack("<I", framed)[0]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert LAYOUT.pages_for(tokens) == pages


def test_the_root_frames_scope_and_model() -> None:
    def framed(*parts: bytes) -> bytes:
        text = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        return hashlib.blake2b(text, digest_size=16, person=b"sekisho-root").digest()

    assert chain_root("tenänt", "m") == framed("tenänt".encode(), b"m")
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("a", "b\0c"), ("a\0b", "c")]
    assert len({chain_root(*pair) for pair in pairs}) == len(pairs)


def test_a_link_hashes_u32_tokens_keyed_with_the_link_before() -> None:
    tokens = [0, 1, 2**32 - 1]
    data = struct.pack("<3I", *tokens)
    expected = hashlib.blake2b(data, digest_size=16, key=ROOT, person=b"sekisho-page").digest()
    assert chain_next(ROOT, tokens) == expected
    assert chain_next(ROOT, np.array(tokens, np.uint32)) == expected
    assert len(expected) == DIGEST_SIZE


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_outside_u32_is_refused_and_not_wrapped(token: int) -> None:
    with pytest.raises(OverflowError):
        chain_next(ROOT, [token])
    with pytest.raises(OverflowError):
        chain(ROOT, [1, token], 16)


def test_a_chain_is_one_digest_a_page() -> None:
    tokens = list(range(35))
    first = chain_next(ROOT, tokens[:16])
    second = chain_next(first, tokens[16:32])
    assert chain(ROOT, tokens, 16) == [first, second, chain_next(second, tokens[32:])]
    assert chain(ROOT, [], 16) == []
    large = [10_000, 2**32 - 1]
    assert chain(ROOT, large, 16) == [chain_next(ROOT, large)]


def test_equal_texts_of_two_scopes_agree_on_no_page() -> None:
    tokens = list(range(64))
    mine, theirs = (set(chain(chain_root(scope, "m"), tokens, 16)) for scope in ("a", "b"))
    assert len(mine) == len(theirs) == 4
    assert not mine & theirs


def test_a_digest_depends_on_all_text_before_and_on_its_length() -> None:
    tokens = list(range(48))
    base = chain(ROOT, tokens, 16)
    for at in (0, 15, 16, 47):
        other = chain(ROOT, [*tokens[:at], 99, *tokens[at + 1 :]], 16)
        assert [a == b for a, b in zip(base, other, strict=True)] == [
            page < at // 16 for page in range(3)
        ]
    assert chain(ROOT, [0], 16) != chain(ROOT, [0, 0], 16)


def test_the_payload_digest_sees_one_bit() -> None:
    payload = np.zeros(4096, np.uint8)
    before = payload_digest(payload)
    assert before == hashlib.blake2b(bytes(4096), digest_size=16, person=b"sekisho-kv").digest()
    payload[4095] ^= 1
    assert payload_digest(payload) != before
