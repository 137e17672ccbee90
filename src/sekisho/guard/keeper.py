"""Who holds which page of an engine that has an allocator of its own, and what it must carry.

The engine goes on choosing pages. The keeper is told of every page that is handed out and given
back, keeps for each request the headers that its pages must carry, and says which of the pages
that were given back may really be used again:

    engine     |-- allocated to R ------|given back          |-- allocated to S …
    keeper     |-- leased to R ---------|-- quarantined -----| free
    pin        |---- a remote writer, or a reader, of R -----|

One thread calls it: the engine's scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sekisho.core.errors import Evidence, check
from sekisho.core.lease import Lease
from sekisho.core.ledger import Ledger, Pages, State
from sekisho.core.memory import ORDINAL_WORD, Headers, Words, make_headers
from sekisho.core.page import PageLayout, chain, chain_next, chain_root
from sekisho.core.table import BlockTable, verify

NO_PAGES: Pages = np.zeros(0, np.intp)
_NAMES_MAX = 1 << 16


@dataclass(eq=False)
class Holding:
    """What one request holds: its lease, the pages under it, what they must carry.

    ``name`` is for evidence, never text of a prompt. ``fresh``: pages that were handed out and
    that no table expects yet. ``digests``: of the full pages whose tokens are known. ``doomed``:
    why no token of it may leave any more, empty where all is well.
    """

    name: str
    lease: Lease
    root: bytes
    table: BlockTable
    fresh: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    doomed: str = ""


class Keeper:
    """See above.

    Args:
        layout: shape of a page; both ends of a transfer must have the same.
        incarnation: u64, drawn anew for every pool.
        headers: where the headers of this engine's pages are; one a page.
    """

    def __init__(self, layout: PageLayout, incarnation: int, headers: Headers) -> None:
        self.layout = layout
        self.headers = headers
        self.ledger = Ledger(len(headers.words), incarnation)
        self._last: Words = np.zeros(len(headers.words), np.uint64)
        self._names: dict[int, str] = {}
        self._requests = 0

    # -- requests

    def open(self, name: str, scope: str) -> Holding:
        """A request begins: a new lease of ``scope`` (empty: the scope that everybody shares)."""
        lease = self.ledger.open_lease(f"scope:{scope}")
        self._requests += 1
        root = chain_root(scope, self.layout.model)
        self._names[lease.serial] = name
        if len(self._names) > _NAMES_MAX:
            del self._names[next(iter(self._names))]
        return Holding(name, lease, root, BlockTable(self.layout, self._requests, lease, root))

    def close(self, holding: Holding) -> None:
        """The request has ended; its pages come back by `release`, before or after."""
        self.ledger.close_lease(holding.lease)

    def claim(self, holding: Holding, pages: Pages) -> None:
        """The engine's allocator handed out ``pages`` to this request.

        Raises:
            LocalOwnershipError: one of them is somebody's, or waits for its writer.
        """
        check(self._inside(pages), "page index out of range")
        before = self.ledger.serials_of(pages)
        self.ledger.claim(holding.lease, pages)
        self._last[pages] = before
        holding.fresh.extend(pages.tolist())

    def release(self, pages: Pages) -> Pages:
        """The engine gives ``pages`` back; returns those that may be used again now.

        Raises:
            LocalOwnershipError: one of them is nobody's already.
        """
        check(self._inside(pages), "page index out of range")
        return self.ledger.drop(pages, self.ledger.serials_of(pages))

    def reset(self) -> Pages:
        """The engine forgets all its pages at once; returns those that wait for a writer."""
        for state in (State.LEASED, State.SEALED):
            self.release(self.ledger.pages_in(state))
        return self.ledger.pages_in(State.QUARANTINED)

    def quarantined(self) -> int:
        """Pages that were given back and wait for a writer or a reader."""
        return self.ledger.counts()["quarantined"]

    # -- what pages must carry

    def expect(self, holding: Holding, tokens: Sequence[int]) -> None:
        """A remote writer will fill the fresh pages with ``tokens``; blanks their headers."""
        size = self.layout.page_size
        pages = np.array(holding.fresh, np.intp)
        tail = list(tokens[len(tokens) - len(tokens) % size :])
        holding.table.expect(pages, len(tokens), tail, chain(holding.root, tokens, size))
        self.headers.blank(pages)
        holding.fresh.clear()

    def keep(self, holding: Holding, tokens: Sequence[int]) -> None:
        """This engine fills the fresh pages itself; ``tokens`` is the sequence as far as known.

        Tokens that the table lacks are counted first, so that full pages carry their digest.
        """
        table = holding.table
        table.append(tokens[table.length : table.capacity], self.headers)
        if holding.fresh:
            table.open(np.array(holding.fresh, np.intp), self.headers)
            holding.fresh.clear()
            table.append(tokens[table.length : table.capacity], self.headers)

    def verify(
        self, holdings: Sequence[Holding], read: Sequence[Pages] | None = None
    ) -> dict[int, tuple[Evidence, ...]]:
        """Evidence by place in ``holdings``, empty where every header is as expected.

        ``read``: per request, the pages that attention is really given.
        """
        found: dict[int, tuple[Evidence, ...]] = {}
        tables = [holding.table for holding in holdings]
        given = [table.pages for table in tables] if read is None else list(read)
        same = [len(a) == len(t.pages) for a, t in zip(given, tables, strict=True)]
        sound = [i for i, ok in enumerate(same) if ok]
        wrong = verify(self.headers, [tables[i] for i in sound], [given[i] for i in sound])
        for i in sound:
            if tables[i].request in wrong:
                found[i] = self._named(wrong[tables[i].request])
        for i, ok in enumerate(same):
            if not ok:
                want, have = f"{len(tables[i].pages)} pages", f"{len(given[i])} pages"
                found[i] = (Evidence("length", tables[i].request, -1, want, have),)
        return found

    def misdirected(self, holding: Holding, row: Pages) -> tuple[Evidence, ...]:
        """Evidence where ``row``, what the engine will attend to, is not what was vouched for."""
        want = holding.table.pages
        if np.array_equal(row, want):
            return ()
        request = holding.table.request
        if len(row) != len(want):
            return (Evidence("length", request, -1, f"{len(want)} pages", f"{len(row)} pages"),)
        return tuple(
            Evidence("row", request, int(row[i]), f"page {want[i]}", self.owner(int(row[i])))
            for i in np.flatnonzero(row != want)
        )

    # -- pages that are shared within a scope, where this engine computes

    def digests(self, holding: Holding, tokens: Sequence[int]) -> list[bytes]:
        """Digests of all full pages of ``tokens``; hashes only what is new."""
        size, known = self.layout.page_size, holding.digests
        for start in range(len(known) * size, len(tokens) - size + 1, size):
            previous = known[-1] if known else holding.root
            known.append(chain_next(previous, tokens[start : start + size]))
        return known

    def foreign(self, holding: Holding, tokens: Sequence[int], row: Pages) -> tuple[Evidence, ...]:
        """Evidence where ``row``, the pages of ``tokens`` written so far, holds other text,
        another scope's, or nothing: its pages may be of other requests of the same scope."""
        size = self.layout.page_size
        full = len(tokens) // size
        check(len(row) == self.layout.pages_for(len(tokens)), "one page a page of tokens")
        request = holding.table.request
        if not self._inside(row):
            return (Evidence("prefix", request, -1, "pages of this pool", str(row.tolist()[:8])),)
        digests = self.digests(holding, tokens)[:full]
        serials = self.ledger.serials_of(row)
        filled = np.full(full, size, np.uint64)
        words = make_headers(
            self.layout, self.ledger.incarnation, serials[:full], 0, filled, digests
        )
        if full < len(row):
            last = self.own_words(holding, tokens, full, len(tokens))
            words = np.concatenate([words, last])
        have = self.headers.gather(row)
        nobodys = np.isin(self.ledger.states_of(row), (State.FREE, State.QUARANTINED))
        wrong = (have != words).any(axis=1) | nobodys
        return self._named(
            tuple(
                Evidence("prefix", request, int(row[i]), f"ordinal {i}", self.owner(int(row[i])))
                for i in np.flatnonzero(wrong)
            )
        )

    def own_words(self, holding: Holding, tokens: Sequence[int], first: int, end: int) -> Words:
        """Headers of this request's own pages, from ordinal ``first``, ``end`` tokens written."""
        size = self.layout.page_size
        count = self.layout.pages_for(end) - first
        # Of the full pages only: the holding may know digests of pages beyond this end.
        digests = self.digests(holding, tokens[:end])[first : end // size]
        filled = np.full(count, size, np.uint64)
        if end % size:
            filled[-1] = end % size
            known = holding.digests[end // size - 1] if end >= size else holding.root
            digests.append(chain_next(known, tokens[end - end % size : end]))
        serials = np.full(count, holding.lease.serial, np.uint64)
        return make_headers(self.layout, self.ledger.incarnation, serials, first, filled, digests)

    def wrote(self, holding: Holding, tokens: Sequence[int], first: int, row: Pages) -> None:
        """This engine has filled ``row`` (ordinals from ``first``) up to the end of ``tokens``."""
        words = self.own_words(holding, tokens, first, len(tokens))
        check(len(row) == len(words), "one page a page of tokens")
        self.headers.words[row] = words
        holding.fresh.clear()

    # -- evidence

    def owner(self, page: int) -> str:
        """Whose a page is and was, by request name: never text."""
        if not 0 <= page < self.ledger.page_count:
            return "no page of this pool"
        serial = int(self.ledger.serials_of(np.array([page], np.intp))[0])
        now, before = self._names.get(serial, "-"), self._names.get(int(self._last[page]), "-")
        state = self.ledger.state_of(page).name.lower()
        ordinal = int(self.headers.words[page, ORDINAL_WORD]) & 0xFFFFFFFF
        return f"{state} of {now}, before of {before}, ordinal {ordinal}"

    def _inside(self, pages: Pages) -> bool:
        return bool(((pages >= 0) & (pages < self.ledger.page_count)).all())

    def _named(self, evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
        """The same, with the requests that hold and held each page."""
        return tuple(
            Evidence(e.kind, e.request, e.page, e.expected, f"{e.found}; {self.owner(e.page)}")
            for e in evidence
        )
