"""The pages' memory as the core sees it: headers to compare, payloads to digest and scrub."""

import numpy as np
from numpy.typing import NDArray

from sekisho.core.errors import check
from sekisho.core.ledger import Pages
from sekisho.core.page import HEADER_SIZE, MAGIC, PageLayout, payload_digest

WORDS = HEADER_SIZE // 8
"""A header as eight u64: magic and layout | incarnation | serial | ordinal and filled | token
digest (2) | payload digest (2). Ordinal is the low half of its word, filled the high half."""
ORDINAL_WORD = 3
_BLOCK = 1024

Words = NDArray[np.uint64]


def make_headers(
    layout: PageLayout,
    incarnation: int,
    serials: NDArray[np.uint64],
    first_ordinal: int,
    filled: NDArray[np.uint64],
    digests: list[bytes],
) -> Words:
    """Headers [n, 8] of n consecutive ordinals; payload digests are left zero."""
    count = len(digests)
    check(len(serials) == count and len(filled) == count, "one serial and one filled a digest")
    words = np.empty((count, WORDS), np.uint64)
    same = np.zeros(WORDS, np.uint64)
    same[:2] = MAGIC | (layout.fingerprint << 32), incarnation
    ordinals = np.arange(first_ordinal, first_ordinal + count, dtype=np.uint64)
    ordinals |= filled << np.uint64(32)
    # In blocks, so that rows and digests are in the cache for as long as they are worked on.
    for start in range(0, count, _BLOCK):
        block = slice(start, start + _BLOCK)
        rows = words[block]
        rows[:] = same
        rows[:, 2] = serials[block]
        rows[:, ORDINAL_WORD] = ordinals[block]
        rows[:, 4:6] = np.frombuffer(b"".join(digests[block]), "<u8").reshape(-1, 2)
    return words


class Headers:
    """Headers of ``page_count`` pages in a buffer, one every ``stride`` bytes, the first at 0.

    Inside another engine they are a side-car of their own, ``stride`` 64; in our pages each
    stands before its payload (`PageMemory`).

    Attributes:
        words: the headers, u64 [page_count, 8], a view of the buffer.
    """

    def __init__(
        self, buffer: NDArray[np.uint8], layout: PageLayout, page_count: int, stride: int
    ) -> None:
        check(buffer.nbytes >= page_count * stride, "buffer is smaller than its pages")
        self.layout = layout
        self.words: Words = np.ndarray((page_count, WORDS), "<u8", buffer, strides=(stride, 8))
        # The same headers as opaque items: gathered at once, several times faster than as words.
        self._items = np.ndarray((page_count,), f"V{HEADER_SIZE}", buffer, strides=(stride,))

    def gather(self, pages: Pages) -> Words:
        """A copy of the headers of ``pages``, u64 [n, 8]."""
        return self._items[pages].view("<u8").reshape(-1, WORDS)

    def blank(self, pages: Pages) -> None:
        """Erase the headers, so that *never written* and *written by another* look different."""
        self.words[pages] = 0


class PageMemory(Headers):
    """A page-major buffer, uint8 [page_count * page_bytes], seen as headers and payloads."""

    def __init__(self, buffer: NDArray[np.uint8], layout: PageLayout, page_count: int) -> None:
        super().__init__(buffer, layout, page_count, layout.page_bytes)
        self._buffer = buffer

    def payload(self, page: int) -> NDArray[np.uint8]:
        """View of the payload bytes of one page."""
        start = page * self.layout.page_bytes
        return self._buffer[start + HEADER_SIZE : start + self.layout.page_bytes]

    def scrub(self, pages: Pages) -> None:
        """Erase headers and payloads (isolation ``strict``, when pages become free)."""
        self.blank(pages)
        for page in pages:
            self.payload(int(page))[:] = 0

    def digest_words(self, page: int) -> NDArray[np.uint64]:
        """Payload digest of a page as it is now, u64 [2]."""
        return np.frombuffer(payload_digest(self.payload(page)), "<u8")

    def set_payload_digest(self, page: int) -> None:
        """Write the digest of the payload into the header of the same page."""
        self.words[page, 6:8] = self.digest_words(page)
