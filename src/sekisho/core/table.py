"""Block tables: what a request expects to find in each of its pages, and the check that it does.

An entry is (page index, expected lease, ordinal, filled, digest). The expectation is held here,
by the reader, because an in-band tag alone cannot show a stale page: the old page carries its own
consistent old tag.

    ordinal   0 … shared-1            shared …              pages-1
    entry     | prefix pages          | own pages, full    | own page being filled |
    lease     | of who wrote them     | this request's                             |
    memory    | read only, SEALED     | LEASED                                     |
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sekisho.core.errors import Evidence, check
from sekisho.core.lease import Lease
from sekisho.core.ledger import Pages
from sekisho.core.memory import ORDINAL_WORD, WORDS, Headers, PageMemory, Words, make_headers
from sekisho.core.page import HEADER, PageLayout, chain_next

_FILLED_SHIFT = 32
_OWN_WORDS = slice(ORDINAL_WORD, 6)  # ordinal and filled, token digest: never the lease
_Array = TypeVar("_Array", Pages, Words)


class BlockTable:
    """The pages of one request, by ordinal, and the headers they must carry.

    Attributes:
        shared: leading pages that come from the prefix cache. sealed: leading pages, these
            included, that nobody writes any more; kept by whoever seals them in the pool.
        length: token slots that are written, over all pages.
        pages: intp [entries], page indices. words: u64 [entries, 8], expected headers.
    """

    def __init__(self, layout: PageLayout, request: int, lease: Lease, root: bytes) -> None:
        self.layout = layout
        self.request = request
        self.lease = lease
        self.shared = self.sealed = 0
        self.length = 0
        self._root = root
        self._tail: list[int] = []
        self._count = 0
        self._pages: Pages = np.zeros(0, np.intp)
        self._words: Words = np.zeros((0, WORDS), np.uint64)

    @property
    def pages(self) -> Pages:
        return self._pages[: self._count]

    @property
    def words(self) -> Words:
        return self._words[: self._count]

    @property
    def serials(self) -> NDArray[np.uint64]:
        """Expected lease serials, u64 [entries]; of the local pool's incarnation."""
        return self._words[: self._count, 2]

    @property
    def capacity(self) -> int:
        """Token slots of all its pages."""
        return self._count * self.layout.page_size

    def digest_at(self, ordinal: int) -> bytes:
        """Expected token digest of a page; of ordinal -1, the root of the chain."""
        return self._words[ordinal, 4:6].tobytes() if ordinal >= 0 else self._root

    def adopt(self, pages: Pages, serials: NDArray[np.uint64], digests: list[bytes]) -> None:
        """Start with ``pages`` of the prefix cache: full, and under their writers' leases."""
        check(self._count == 0, "a prefix comes first in a table")
        full = np.full(len(pages), self.layout.page_size, np.uint64)
        words = make_headers(self.layout, self.lease.incarnation, serials, 0, full, digests)
        self._extend(pages, words)
        self.shared = self.sealed = len(pages)
        self.length = len(pages) * self.layout.page_size

    def expect(
        self, pages: Pages, token_count: int, tail: Sequence[int], digests: list[bytes]
    ) -> None:
        """Add own pages that a remote writer fills up to ``token_count`` tokens in all.

        ``digests`` is one a page; ``tail`` are the token ids of the last page where it stays
        partly filled (they are hashed again when the page is full).
        """
        size = self.layout.page_size
        check(self.length == self.capacity, "pages can only follow full pages")
        check(len(pages) == self.layout.pages_for(token_count - self.length), "wrong page count")
        check(len(tail) == token_count % size, "tail is not the tokens of the last page")
        filled = np.full(len(pages), size, np.uint64)
        if tail:
            filled[-1] = len(tail)
        serials = np.full(len(pages), self.lease.serial, np.uint64)
        self._extend(
            pages,
            make_headers(
                self.layout, self.lease.incarnation, serials, self._count, filled, digests
            ),
        )
        self.length = token_count
        self._tail = list(tail)

    def open(self, pages: Pages, memory: Headers) -> None:
        """Add own pages that this process fills itself, and write their empty headers.

        A header that is still being appended to carries the digest of the last boundary its
        owner published: the start of the page, or the hand-off.
        """
        count = len(pages)
        check(self.capacity == self.length, "pages can only follow full pages")
        digest = self.digest_at(self._count - 1)
        serials = np.full(count, self.lease.serial, np.uint64)
        words = make_headers(
            self.layout,
            self.lease.incarnation,
            serials,
            self._count,
            np.zeros(count, np.uint64),
            [digest] * count,
        )
        self._extend(pages, words)
        memory.words[pages] = words

    def append(self, tokens: Sequence[int], memory: Headers) -> None:
        """``tokens`` were written behind the last one: count them, here and in the headers.

        Only ``filled`` and the digest change in memory, and only where the header is still the
        one this table left. So a header that landed meanwhile, even one of the same lease, stays
        as it is, and the next check sees it.
        """
        check(self.length + len(tokens) <= self.capacity, "tokens beyond the table's pages")
        size = self.layout.page_size
        done = 0
        while done < len(tokens):
            ordinal, slot = divmod(self.length, size)
            part = tokens[done : done + size - slot]
            self._tail.extend(part)
            done += len(part)
            self.length += len(part)
            filled = slot + len(part)
            expected, found = self._words[ordinal], memory.words[self._pages[ordinal]]
            ours = expected.tobytes() == found.tobytes()
            expected[ORDINAL_WORD] = ordinal | filled << _FILLED_SHIFT
            if filled == size:
                digest = chain_next(self.digest_at(ordinal - 1), self._tail)
                expected[4:6] = np.frombuffer(digest, "<u8")
                self._tail.clear()
            if ours:
                found[_OWN_WORDS] = expected[_OWN_WORDS]

    def expect_payloads(self, memory: PageMemory, first_ordinal: int) -> None:
        """Expect headers from ``first_ordinal`` on to carry the digests of the payloads that are
        in memory now (isolation ``strict``: at a hand-off, before `verify`)."""
        for ordinal in range(first_ordinal, self._count):
            self._words[ordinal, 6:8] = memory.digest_words(int(self._pages[ordinal]))

    def _extend(self, pages: Pages, words: Words) -> None:
        start, self._count = self._count, self._count + len(pages)
        if start == 0:  # mostly the whole table at once; the words are fresh from `make_headers`
            self._pages, self._words = pages.copy(), words
            return
        if self._count > len(self._pages):
            room = max(self._count, 2 * len(self._pages))
            held, expected = self._pages, self._words
            self._pages, self._words = np.empty(room, np.intp), np.empty((room, WORDS), np.uint64)
            self._pages[:start], self._words[:start] = held[:start], expected[:start]
        self._pages[start : self._count] = pages
        self._words[start : self._count] = words


def verify(
    memory: Headers, tables: Sequence[BlockTable], read: Sequence[Pages] | None = None
) -> dict[int, tuple[Evidence, ...]]:
    """Compare every page of every table with what the table expects: one vectorised pass.

    Args:
        memory: the pool's pages.
        tables: the tables of the batch.
        read: per table, the page indices that attention was really given (default: the table's).

    Returns:
        Evidence by request, empty where all agree.
    """
    if not tables:
        return {}
    given = [table.pages for table in tables] if read is None else list(read)
    same = [len(part) for part in given] == [len(table.pages) for table in tables]
    check(same, "attention was given another number of pages")
    pages, expected = _join(given), _join([table.words for table in tables])
    found = memory.gather(pages)
    if np.array_equal(found, expected):
        return {}
    wrong = (found != expected).any(axis=1)
    ends = np.cumsum([0, *(len(table.words) for table in tables)])
    evidence: dict[int, tuple[Evidence, ...]] = {}
    for table, (start, end) in zip(tables, pairwise(ends.tolist()), strict=True):
        at = start + np.flatnonzero(wrong[start:end])
        if at.size:
            evidence[table.request] = tuple(
                evidence_of(table.request, int(pages[i]), expected[i], found[i]) for i in at
            )
    return evidence


def _join(parts: list[_Array]) -> _Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def evidence_of(request: int, page: int, expected: Words, found: Words) -> Evidence:
    """How the header ``found`` [8] differs from the ``expected`` one [8]."""
    want, have = expected.view(HEADER)[0], found.view(HEADER)[0]
    return Evidence(_kind(want, have), request, page, _owner(want), _owner(have))


def _kind(want: np.void, have: np.void) -> str:
    if have["magic"] == 0:
        return "unwritten"
    if have["magic"] != want["magic"] or have["layout"] != want["layout"]:
        return "layout"
    if (have["incarnation"], have["serial"]) != (want["incarnation"], want["serial"]):
        return "foreign"
    if have["ordinal"] != want["ordinal"]:
        return "misplaced"
    if have["filled"] != want["filled"]:
        return "short"
    if have["token_digest"] != want["token_digest"]:
        return "wrong_text"
    return "corrupt"


def _owner(header: np.void) -> str:
    lease = Lease(int(header["incarnation"]), int(header["serial"]))
    return f"{lease} ordinal={header['ordinal']} filled={header['filled']}"
