"""An engine with an allocator, a prefix tree and faults of its own, beside the keeper; a dict of
owners is the model. What the engine does right passes, what it does wrong is always found."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from guard_kit import LAYOUT, SIZE, new_keeper, pages, prompt, sent
from sekisho.core.errors import LocalOwnershipError
from sekisho.core.ledger import Pages, State
from sekisho.core.memory import ORDINAL_WORD, Words
from sekisho.guard.keeper import Holding

PAGES = 14
SCOPES = st.sampled_from(["", "a", "b"])
TEXTS = st.integers(0, 1)
LENGTHS = st.one_of(st.sampled_from([16, 32]), st.integers(1, 60))
TREE = "tree"


@dataclass(eq=False)
class Request:
    holding: Holding
    scope: str
    text: int
    length: int
    row: list[int]
    pin: int | None = None
    committed: bool = False

    @property
    def tokens(self) -> list[int]:
        return prompt(self.length, self.text)


@dataclass
class Owner:
    """What the model knows of a page that is not on the engine's free list."""

    holder: Request | str | None
    pins: set[int] = field(default_factory=set)


class KeeperMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.keeper = new_keeper(PAGES)
        self.free = list(range(PAGES))
        self.owners: dict[int, Owner] = {}
        self.decoding: list[Request] = []
        self.ended: dict[int, tuple[Request, list[int]]] = {}
        self.tree: dict[tuple[str, int, int], int] = {}

    # -- the engine's allocator

    def allocate(self, data: st.DataObject, holding: Holding, count: int) -> list[int]:
        """The engine picks; the keeper is told. Empty where it has too few."""
        if count > len(self.free):
            return []
        picked = data.draw(st.permutations(self.free))[:count]
        self.free = [page for page in self.free if page not in picked]
        self.keeper.claim(holding, pages(*picked))
        return picked

    def give_back(self, row: list[int]) -> None:
        freed = self.keeper.release(pages(*row)).tolist()
        for page in row:
            self.owners[page].holder = None
        self.forget(freed, [page for page in row if not self.owners[page].pins])

    def forget(self, freed: list[int], expected: list[int]) -> None:
        assert sorted(freed) == sorted(expected)
        for page in freed:
            assert not self.owners.pop(page).pins, "a page became free under its writer"
        self.free += freed

    def end(self, request: Request) -> None:
        self.decoding.remove(request)
        self.give_back(request.row)
        self.keeper.close(request.holding)
        if request.pin is not None and not request.committed:
            self.ended[request.pin] = (request, request.row)

    def settle(self, pin: int, row: list[int]) -> None:
        freed = self.keeper.ledger.settle(pin).tolist()
        for page in row:
            self.owners[page].pins.remove(pin)
        done = [p for p in row if self.owners[p].holder is None and not self.owners[p].pins]
        self.forget(freed, done)

    # -- decode

    @rule(data=st.data(), scope=SCOPES, text=TEXTS, length=LENGTHS)
    def offer(self, data: st.DataObject, scope: str, text: int, length: int) -> None:
        holding = self.keeper.open("decoding", scope)
        row = self.allocate(data, holding, LAYOUT.pages_for(length))
        if not row:
            self.keeper.close(holding)
            return
        request = Request(holding, scope, text, length, row)
        self.keeper.expect(holding, request.tokens)
        request.pin = self.keeper.ledger.pin(holding.table.pages)
        for page in row:
            self.owners[page] = Owner(request, {request.pin})
        self.decoding.append(request)
        assert self.keeper.misdirected(holding, pages(*row)) == ()

    @precondition(lambda self: any(not r.committed for r in self.decoding))
    @rule(data=st.data())
    def arrive_whole(self, data: st.DataObject) -> None:
        request = self.waiting(data)
        self.keeper.headers.words[request.row] = sent(
            request.scope, request.tokens, request.holding
        )
        assert self.keeper.verify([request.holding]) == {}
        request.committed = True
        assert request.pin is not None
        self.settle(request.pin, request.row)

    @precondition(lambda self: any(not r.committed for r in self.decoding))
    @rule(data=st.data(), fault=st.integers(0, 7))
    def arrive_wrong(self, data: st.DataObject, fault: int) -> None:
        request = self.waiting(data)
        at = data.draw(st.integers(0, len(request.row) - 1))
        self.keeper.headers.words[request.row] = self.faulty(request, fault, at)
        assert list(self.keeper.verify([request.holding])) == [0]
        self.end(request)

    def faulty(self, request: Request, fault: int, at: int) -> Words:
        other = {"": "a", "a": "b", "b": ""}[request.scope]
        scope = other if fault == 0 else request.scope
        text = request.text + 5 if fault == 1 else request.text
        words = sent(scope, prompt(request.length, text), request.holding)
        if fault == 2:
            words[at] = 0
        elif fault == 3:
            words[at, 2] += np.uint64(1)
        elif fault == 4:
            words[at, 1] += np.uint64(1)
        elif fault == 5:
            words[at, ORDINAL_WORD] -= np.uint64(1 << 32)
        elif fault == 6:
            words[at, ORDINAL_WORD] += np.uint64(1)
        elif fault == 7:
            words[at, 0] ^= np.uint64(1 << 33)
        return words

    def waiting(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from([r for r in self.decoding if not r.committed]))

    def running(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from([r for r in self.decoding if r.committed]))

    @precondition(lambda self: any(r.committed for r in self.decoding))
    @rule(data=st.data(), count=st.integers(1, 40))
    def decode(self, data: st.DataObject, count: int) -> None:
        request = self.running(data)
        for _ in range(count):
            if request.length == len(request.row) * SIZE:
                more = self.allocate(data, request.holding, 1)
                if not more:
                    return
                request.row += more
                self.owners[more[0]] = Owner(request)
                self.keeper.keep(request.holding, request.tokens)
            request.length += 1

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def finish_or_abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.decoding)))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def late_write(self, data: st.DataObject) -> None:
        """What was sent for a request that is gone lands: nobody else's page is under it."""
        request, row = self.ended[data.draw(st.sampled_from(sorted(self.ended)))]
        length = min(request.length, len(row) * SIZE)
        words = sent(request.scope, prompt(length, request.text), request.holding)
        for page in row:
            assert self.keeper.ledger.state_of(page) is State.QUARANTINED
        self.keeper.headers.words[row] = words

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def drained(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(sorted(self.ended)))
        self.settle(pin, self.ended.pop(pin)[1])

    @precondition(lambda self: any(r.committed for r in self.decoding))
    @rule(data=st.data(), old=st.booleans())
    def foreign_write(self, data: st.DataObject, old: bool) -> None:
        """A stray transfer writes into a running request: it fails, and it alone."""
        request = self.running(data)
        page = data.draw(st.sampled_from(request.row))
        serial = self.keeper.headers.words[page, 2] + np.uint64(PAGES)
        self.keeper.headers.words[page, 2] = serial - np.uint64(PAGES + 1) if old else serial
        batch = [r for r in self.decoding if r.committed]
        found = self.keeper.verify([r.holding for r in batch])
        assert [batch[i] for i in found] == [request]
        assert [e.page for e in found[batch.index(request)]] == [page]
        self.end(request)

    @precondition(lambda self: any(r.committed for r in self.decoding))
    @rule(data=st.data(), page=st.integers(-1, PAGES), shorter=st.booleans())
    def misdirect(self, data: st.DataObject, page: int, shorter: bool) -> None:
        request = self.running(data)
        row = list(request.row)
        at = data.draw(st.integers(0, len(row) - 1))
        if shorter:
            row.pop(at)
        else:
            row[at] = page
        found = self.keeper.misdirected(request.holding, pages(*row))
        assert bool(found) == (row != request.row)

    # -- prefill

    def prefix(self, scope: str, text: int, length: int) -> list[int]:
        """The full pages that the tree has of this text, not all of a prompt."""
        found: list[int] = []
        while len(found) < (length - 1) // SIZE:
            page = self.tree.get((scope, text, len(found)))
            if page is None:
                break
            found.append(page)
        return found

    @rule(data=st.data(), scope=SCOPES, text=TEXTS, length=LENGTHS, chunk=st.integers(1, 40))
    def prefill(self, data: st.DataObject, scope: str, text: int, length: int, chunk: int) -> None:
        """In chunks, behind a prefix of its scope; its full pages stay in the tree."""
        shared = self.prefix(scope, text, length)
        tokens = prompt(length, text)
        holding = self.keeper.open("prefilling", scope)
        row, own = list(shared), []
        start = len(shared) * SIZE
        while start < length:
            end = min(length, start + chunk)
            need = LAYOUT.pages_for(end) - len(row)
            fresh = self.allocate(data, holding, need)
            if need and not fresh:
                break
            written = pages(*row)
            assert self.keeper.foreign(holding, tokens[:start], written) == ()
            row += fresh
            own += fresh
            first = start // SIZE
            self.keeper.wrote(holding, tokens[:end], first, pages(*row[first:]))
            start = end
        for page in own:
            self.owners[page] = Owner(TREE)
        for ordinal, page in list(enumerate(row))[: start // SIZE]:
            self.tree.setdefault((scope, text, ordinal), page)
        rest = [page for page in own if page not in self.tree.values()]
        if rest:
            self.give_back(rest)
        self.keeper.close(holding)

    @precondition(lambda self: self.tree)
    @rule(data=st.data(), scope=SCOPES, text=TEXTS)
    def match_wrongly(self, data: st.DataObject, scope: str, text: int) -> None:
        """A match of any page of the tree, or of any at all, as the first of this text."""
        page = data.draw(st.integers(0, PAGES - 1))
        holding = self.keeper.open("matched", scope)
        right = [p for (s, t, o), p in self.tree.items() if (s, t, o) == (scope, text, 0)]
        # Equal text that was computed twice is the same: the page need not be the tree's.
        if page not in right and (page not in self.owners or self.owners[page].holder != TREE):
            owner = self.owners.get(page)
            same = owner is not None and isinstance(owner.holder, Request)
            request = owner.holder if owner is not None and same else None
            if isinstance(request, Request) and (
                (request.scope, request.text) == (scope, text) and request.row[0] == page
            ):
                self.keeper.close(holding)
                return
        found = self.keeper.foreign(holding, prompt(SIZE, text), pages(page))
        assert bool(found) == (page not in right)
        self.keeper.close(holding)

    @precondition(lambda self: self.tree)
    @rule(data=st.data())
    def send_and_evict(self, data: st.DataObject) -> None:
        """A page of the tree is a transfer's source while it is evicted, and perhaps after."""
        key = data.draw(st.sampled_from(sorted(self.tree)))
        page = self.tree.pop(key)
        pin = self.keeper.ledger.pin(pages(page))
        self.owners[page].pins.add(pin)
        self.give_back([page])
        assert self.keeper.ledger.state_of(page) is State.QUARANTINED
        scope, text, ordinal = key
        if ordinal == 0:  # right in every word, and nobody's
            late = self.keeper.open("late", scope)
            assert self.keeper.foreign(late, prompt(SIZE, text), pages(page)) != ()
            self.keeper.close(late)
        if data.draw(st.booleans()):
            self.settle(pin, [page])
        else:
            holding = self.keeper.open("source", key[0])
            self.ended[pin] = (Request(holding, key[0], key[1], SIZE, [page]), [page])
            self.keeper.close(holding)

    # -- what the engine may not do

    @rule(page=st.integers(0, PAGES - 1))
    def misuse(self, page: int) -> None:
        owner = self.owners.get(page)
        before = self.keeper.ledger.counts(), self.keeper.owner(page)
        if owner is not None:
            with pytest.raises(LocalOwnershipError):
                self.keeper.claim(self.keeper.open("thief", "b"), pages(page))
        if owner is None or owner.holder is None:
            with pytest.raises(LocalOwnershipError):
                self.keeper.release(pages(page))
        assert (self.keeper.ledger.counts(), self.keeper.owner(page)) == before

    @precondition(lambda self: not self.decoding)
    @rule()
    def flush(self) -> None:
        waiting: Pages = self.keeper.reset()
        self.tree.clear()
        for page, owner in list(self.owners.items()):
            owner.holder = None
            if not owner.pins:
                del self.owners[page]
        assert sorted(waiting.tolist()) == sorted(self.owners)
        self.free = [page for page in range(PAGES) if page not in self.owners]

    # -- what always holds

    @invariant()
    def pages_add_up(self) -> None:
        ledger = self.keeper.ledger
        ledger.check_integrity()
        assert sum(ledger.counts().values()) == PAGES
        assert ledger.pages_in(State.FREE).tolist() == sorted(self.free)
        assert all(ledger.pins_of(page) == 0 for page in self.free)
        waiting = [page for page, owner in self.owners.items() if owner.holder is None]
        assert ledger.pages_in(State.QUARANTINED).tolist() == sorted(waiting)
        assert self.keeper.quarantined() == len(waiting)

    @invariant()
    def every_committed_request_finds_its_own_pages(self) -> None:
        batch = [r for r in self.decoding if r.committed]
        assert self.keeper.verify([r.holding for r in batch]) == {}
        for request in batch:
            assert self.keeper.misdirected(request.holding, pages(*request.row)) == ()


TestKeeper = KeeperMachine.TestCase
TestKeeper.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
