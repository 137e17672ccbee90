"""Pool, prefix cache and block tables under random use, against a plain dict of owners.

A page that is in the dict is somebody's; a page that is not must be FREE. Every request writes the
headers it is entitled to, so a page in two hands would also show in `verify`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.lease import Lease
from sekisho.core.ledger import Pages, State
from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout, chain, chain_root
from sekisho.core.pool import Pool
from sekisho.core.prefix import PrefixCache
from sekisho.core.table import BlockTable, verify

SIZE = 16
LAYOUT = PageLayout(SIZE, 1, 1, 1, 1, "m")
PAGES = 12
SCOPES = st.sampled_from(["a", "b"])
TEXTS = st.sampled_from([0, 0, 0, 1])
LENGTHS = st.one_of(st.sampled_from([16, 32, 48]), st.integers(1, 70))
CACHE = "cache"


@dataclass
class Owner:
    """What the model knows of a page that is not free."""

    scope: str
    serial: int
    holders: list[object]
    sealed: bool = False
    pins: set[int] = field(default_factory=set)

    @property
    def state(self) -> State:
        if not self.holders:
            return State.QUARANTINED
        return State.SEALED if self.sealed else State.LEASED


@dataclass
class Request:
    scope: str
    table: BlockTable
    text: int

    def tokens(self, start: int, end: int) -> list[int]:
        """Texts of one number share their beginning, so that prefixes are found."""
        return [self.text * 1000 + position for position in range(start, end)]


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.leases: set[Lease] = set()
        self.incarnation = 0
        self.requests_made = 0
        self.restart()

    @precondition(lambda self: self.started >= 8)
    @rule()
    def restart(self) -> None:
        """The process starts again: a new pool, nothing held, leases that were never there."""
        self.incarnation += 1
        self.started = 0
        self.pool = Pool(PAGES, self.incarnation)
        self.memory = PageMemory(np.zeros(PAGES * LAYOUT.page_bytes, np.uint8), LAYOUT, PAGES)
        self.cache = PrefixCache(self.pool)
        self.owners: dict[int, Owner] = {}
        self.cached: dict[bytes, int] = {}
        self.requests: list[Request] = []
        self.grants: dict[int, list[int]] = {}

    # -- what requests do

    def grant(self, request: Request, count: int) -> Pages:
        pages = self.pool.grant(request.table.lease, count)
        for page in pages.tolist():
            assert page not in self.owners, "a page has two owners"
            self.owners[page] = Owner(request.scope, request.table.lease.serial, [request])
        return pages

    def gone(self, freed: Pages, pages: list[int], holder: object) -> None:
        """``holder`` dropped ``pages``, and the pool says that ``freed`` are FREE by it."""
        for page in pages:
            self.owners[page].holders.remove(holder)
        expected = [p for p in pages if not self.owners[p].holders and not self.owners[p].pins]
        assert sorted(freed.tolist()) == sorted(expected)
        for page in expected:
            del self.owners[page]

    @rule(scope=SCOPES, text=TEXTS, length=LENGTHS, remote=st.booleans())
    def start(self, scope: str, text: int, length: int, remote: bool) -> None:
        root = chain_root(scope, "m")
        lease = self.pool.open_lease(scope)
        assert lease not in self.leases
        self.leases.add(lease)
        self.requests_made += 1
        self.started += 1
        request = Request(scope, BlockTable(LAYOUT, self.requests_made, lease, root), text)
        tokens = request.tokens(0, length)
        digests = chain(root, tokens, SIZE)
        full = digests[: length // SIZE]
        matched = full[: self.cache.match(full)]
        assert matched == list(takewhile(self.cached.__contains__, full))
        pages, serials = self.cache.acquire(matched, scope)
        request.table.adopt(pages, serials, matched)
        for page, digest in zip(pages.tolist(), matched, strict=True):
            assert self.cached[digest] == page
            assert self.owners[page].scope == scope
            self.owners[page].holders.append(request)
        self.requests.append(request)
        need = len(digests) - len(matched)
        if need > self.pool.free_count:
            self.evict(need - self.pool.free_count)
        if need > self.pool.free_count:
            return
        if need:
            own = self.grant(request, need)
            tail = tokens[length - length % SIZE :]
            if remote:
                request.table.expect(own, length, tail, digests[len(matched) :])
                self.memory.words[own] = request.table.words[len(matched) :]
            else:
                request.table.open(own, self.memory)
                request.table.append(tokens[len(matched) * SIZE :], self.memory)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 40))
    def decode(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        table = request.table
        for _ in range(count):
            if table.length == table.capacity:
                if not self.pool.free_count:
                    return
                table.open(self.grant(request, 1), self.memory)
            table.append(request.tokens(table.length, table.length + 1), self.memory)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), publish=st.integers(0, 3))
    def seal(self, data: st.DataObject, publish: int) -> None:
        """Full pages of a request, three times of four offered for reuse."""
        self.seal_full(data.draw(st.sampled_from(self.requests)), publish > 0)

    def seal_full(self, request: Request, publish: bool) -> None:
        table = request.table
        full = range(table.sealed, table.length // SIZE)
        ordinals = [
            i
            for i in full
            if not self.owners[int(table.pages[i])].sealed
            and not self.owners[int(table.pages[i])].pins
        ]
        pages = table.pages[ordinals]
        self.pool.seal(pages, table.lease)
        for page in pages.tolist():
            self.owners[page].sealed = True
        if publish:
            digests = [table.digest_at(i) for i in ordinals]
            self.cache.publish(digests, pages, table.serials[ordinals], request.scope)
            for digest, page in zip(digests, pages.tolist(), strict=True):
                if self.cached.setdefault(digest, page) == page:
                    self.owners[page].holders.append(CACHE)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), publish=st.booleans())
    def release(self, data: st.DataObject, publish: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if publish:
            self.seal_full(request, True)
        self.requests.remove(request)
        table = request.table
        self.gone(self.pool.drop(table.pages, table.serials), table.pages.tolist(), request)
        self.pool.close_lease(table.lease)

    # -- what others do

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.requests)).table.pages
        pages = pages[data.draw(st.integers(0, len(pages))) :]
        grant = self.pool.pin(pages)
        assert grant not in self.grants
        self.grants[grant] = pages.tolist()
        for page in pages.tolist():
            self.owners[page].pins.add(grant)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(sorted(self.grants)))
        pages = self.grants.pop(grant)
        freed = self.pool.settle(grant).tolist()
        for page in pages:
            self.owners[page].pins.remove(grant)
        done = [p for p in pages if not self.owners[p].holders and not self.owners[p].pins]
        assert sorted(freed) == sorted(done)
        for page in done:
            del self.owners[page]

    @precondition(lambda self: self.cached)
    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        idle = {
            page
            for page in self.cached.values()
            if self.owners[page].holders == [CACHE] and not self.owners[page].pins
        }
        freed = self.cache.evict(count)
        assert set(freed.tolist()) <= idle, "evicted under a reader"
        assert len(freed) == min(count, len(idle))
        self.gone(freed, freed.tolist(), CACHE)
        self.cached = {d: page for d, page in self.cached.items() if page not in freed}

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.cached.values())))
        self.cache.forget(np.array([page], np.intp))
        self.cached = {d: other for d, other in self.cached.items() if other != page}
        owner = self.owners[page]
        owner.holders.remove(CACHE)
        if not owner.holders and not owner.pins:
            del self.owners[page]

    # -- what nobody may do

    def refused(self, call: Callable[[], object]) -> None:
        before = snapshot(self.pool)
        with pytest.raises(LocalOwnershipError):
            call()
        assert snapshot(self.pool) == before

    @rule(page=st.integers(0, PAGES - 1), off=st.sampled_from([-1, 1]), scope=SCOPES)
    def misuse(self, page: int, off: int, scope: str) -> None:
        """Stale serials, foreign scopes, free pages, settled pins, leases of another life."""
        pages = np.array([page], np.intp)
        serials = self.pool.serials_of(pages)
        stale = np.array([int(serials[0]) + off & (2**64 - 1)], np.uint64)
        owner = self.owners.get(page)
        self.refused(lambda: self.pool.drop(pages, stale))
        self.refused(lambda: self.pool.hold(pages, stale, scope))
        if owner is None or not owner.holders:
            self.refused(lambda: self.pool.pin(pages))
            self.refused(lambda: self.pool.drop(pages, serials))
        if owner is None or owner.state is not State.SEALED or owner.scope != scope:
            self.refused(lambda: self.pool.hold(pages, serials, scope))
        lease = Lease(self.incarnation, int(serials[0]))
        if owner is None or owner.state is not State.LEASED or owner.pins:
            self.refused(lambda: self.pool.seal(pages, lease))
        self.refused(lambda: self.pool.settle(max(self.grants, default=0) + 1000))
        self.refused(lambda: self.pool.grant(Lease(self.incarnation + off, 1), 1))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def ask_too_much(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.requests)).table.lease
        self.refused(lambda: self.pool.grant(lease, self.pool.free_count + 1))

    # -- what always holds

    @invariant()
    def pages_add_up(self) -> None:
        self.pool.check_integrity()
        counts = self.pool.counts()
        assert sum(counts.values()) == PAGES
        states = [owner.state for owner in self.owners.values()]
        for state in (State.LEASED, State.SEALED, State.QUARANTINED):
            assert counts[state.name.lower()] == states.count(state)

    @invariant()
    def the_model_agrees(self) -> None:
        for page in range(PAGES):
            owner = self.owners.get(page)
            if owner is None:
                assert self.pool.state_of(page) is State.FREE
                assert self.pool.pins_of(page) == self.pool.holders_of(page) == 0
                continue
            assert self.pool.state_of(page) is owner.state
            assert self.pool.serials_of(np.array([page])).tolist() == [owner.serial]
            assert self.pool.holders_of(page) == len(owner.holders)
            assert self.pool.pins_of(page) == len(owner.pins)
            scopes = {holder.scope for holder in owner.holders if isinstance(holder, Request)}
            assert scopes <= {owner.scope}, "a page is shared by two scopes"
        assert len(self.cache) == len(self.cached)

    @invariant()
    def every_request_finds_its_own_pages(self) -> None:
        assert verify(self.memory, [request.table for request in self.requests]) == {}


def snapshot(pool: Pool) -> dict[str, Any]:
    """The whole state, comparable; `_mark` is scratch."""
    state = {name: value for name, value in vars(pool).items() if name not in ("_mark", "_mint")}
    state["_grants"] = {grant: pages.tolist() for grant, pages in pool._grants.items()}
    state["_mint"] = pool._mint._serial
    return {
        name: value.tobytes() if isinstance(value, np.ndarray) else copy.deepcopy(value)
        for name, value in state.items()
    }


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
