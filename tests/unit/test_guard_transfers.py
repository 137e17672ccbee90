"""Prefill's transfers: DRAINED means that nothing is in flight and nothing will ever be."""

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard_kit import LAYOUT, computed, new_keeper, offered, pages, prompt
from sekisho.core.errors import LocalOwnershipError
from sekisho.core.lease import Lease
from sekisho.core.ledger import State
from sekisho.core.page import HEADER_SIZE
from sekisho.guard.keeper import Keeper
from sekisho.guard.sglang import transfers as module
from sekisho.guard.sglang.transfers import Note, Transfers
from sekisho.guard.sglang.wire import Drain, Drained, Frames, Registration, drain_of

ROOM, SESSION, LEASE = 77, "session", Lease(5, 6)
ASK = Drain(ROOM, LEASE, "10.0.0.1", 5000, 3)


class Engine:
    """As Mooncake: a block is bytes from one address to another."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.engine = self

    def batch_register(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        self.registered += zip(addresses, sizes, strict=True)

    def move(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        for source, destination, size in blocks:
            inside = [a <= source and source + size <= a + n for a, n in self.registered]
            assert any(inside), "memory that the transfer engine does not know"
            ctypes.memmove(destination, source, size)


class Rank:
    """A prefill rank of one room, and what it answered."""

    def __init__(self, keeper: Keeper | None = None) -> None:
        self.keeper = keeper or new_keeper()
        self.answers: list[Drained] = []
        self.transfers = Transfers(self.keeper, self.send)
        computed(self.keeper, "a", prompt(40), pages(1, 2, 3))

    def send(self, host: str, port: int, frames: Frames) -> None:
        assert (host, port) == (ASK.host, ASK.port)
        answer = drain_of(frames)
        assert isinstance(answer, Drained)
        self.answers.append(answer)

    def queue(self) -> Note:
        note = self.transfers.snapshot(ROOM, pages(1, 2, 3))
        self.transfers.queued(note)
        return note


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_nothing_under_way_is_answered_at_once(rank: Rank) -> None:
    rank.transfers.granted(ROOM, SESSION, LEASE)
    assert rank.transfers.drain(ASK) is True
    assert rank.answers == [Drained(ROOM, LEASE, 3, True)]
    assert rank.transfers.lease(ROOM, SESSION) is None


def test_no_answer_while_a_chunk_is_under_way(rank: Rank) -> None:
    rank.transfers.granted(ROOM, SESSION, LEASE)
    notes = [rank.queue(), rank.queue()]
    rank.transfers.drain(ASK)
    rank.transfers.drain(ASK)  # asked again: time changes nothing
    assert rank.answers == []
    assert rank.transfers.lease(ROOM, SESSION) is None, "no new write from here on"
    rank.transfers.finished(notes[0])
    assert rank.answers == []
    rank.transfers.finished(notes[1])
    assert rank.answers == [Drained(ROOM, LEASE, 3, True)]


def test_a_drain_that_comes_before_its_grant_holds(rank: Rank) -> None:
    assert rank.transfers.drain(ASK) is False
    assert rank.answers == [Drained(ROOM, LEASE, 3, known=False)]
    rank.transfers.granted(ROOM, SESSION, LEASE)
    assert rank.transfers.lease(ROOM, SESSION) is None


def test_who_is_asked_again_says_again_that_it_was_granted_the_lease(rank: Rank) -> None:
    rank.transfers.granted(ROOM, SESSION, LEASE)
    rank.transfers.drain(ASK)
    rank.transfers.drain(ASK)
    for _ in range(2):
        rank.transfers.drain(ASK._replace(lease=Lease(5, 9)))
    assert [answer.known for answer in rank.answers] == [True, True, False, False]


def test_the_next_grant_of_a_room_is_another_one(rank: Rank) -> None:
    rank.transfers.granted(ROOM, SESSION, LEASE)
    rank.transfers.granted(ROOM, SESSION, Lease(5, 7))
    assert rank.transfers.drain(ASK) is False, "the room is no longer this lease's"
    assert rank.transfers.lease(ROOM, SESSION) == Lease(5, 7)


def test_one_decode_ranks_drain_leaves_the_others(rank: Rank) -> None:
    rank.transfers.granted(ROOM, SESSION, LEASE)
    rank.transfers.granted(ROOM, "other", Lease(8, 1))
    rank.transfers.drain(ASK)
    assert rank.transfers.lease(ROOM, SESSION) is None
    assert rank.transfers.lease(ROOM, "other") == Lease(8, 1)


def test_a_cancelled_lease_stays_cancelled_when_it_is_forgotten(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 4)
    rank.transfers.granted(ROOM, SESSION, LEASE)
    rank.transfers.drain(ASK)
    for serial in range(10, 20):
        rank.transfers.drain(ASK._replace(lease=Lease(5, serial)))
    assert rank.transfers.lease(ROOM, SESSION) is None


def test_what_is_remembered_is_bounded(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 4)
    for room in range(20):
        rank.transfers.granted(room, SESSION, LEASE)
    assert rank.transfers.lease(0, SESSION) is None, "without a lease nothing is written"
    assert rank.transfers.lease(19, SESSION) == LEASE


def test_an_answer_that_cannot_be_sent_ends_no_thread() -> None:
    def broken(*_: object) -> None:
        raise OSError("no route")

    transfers = Transfers(new_keeper(), broken)
    assert transfers.drain(ASK) is False


def test_source_pages_wait_for_their_transfer(rank: Rank) -> None:
    note = rank.queue()
    assert rank.keeper.release(pages(1, 2, 3)).tolist() == []
    assert rank.keeper.ledger.state_of(2) is State.QUARANTINED
    assert rank.transfers.settle_done().tolist() == []
    rank.transfers.finished(note)
    assert sorted(rank.transfers.settle_done().tolist()) == [1, 2, 3]


def test_a_page_that_nobody_holds_is_not_sent(rank: Rank) -> None:
    with pytest.raises(LocalOwnershipError, match="only held pages"):
        rank.transfers.snapshot(ROOM, pages(1, 5))


@given(data=st.data(), chunks=st.integers(0, 4), asked=st.integers(1, 3))
def test_drained_is_the_last_word_in_every_order(
    data: st.DataObject, chunks: int, asked: int
) -> None:
    """Each event in any order, each chunk's own in theirs: queue, take a lease or none, finish."""
    rank = Rank()
    lists: list[list[tuple[str, int]]] = [
        [("queue", i), ("lease", i), ("finish", i)] for i in range(chunks)
    ]
    lists += [[("grant", 0)], [("drain", 0)] * asked]
    notes: dict[int, Note] = {}
    writing: set[int] = set()
    while any(lists):
        events = data.draw(st.sampled_from([each for each in lists if each]))
        event, chunk = events.pop(0)
        if event == "queue":
            notes[chunk] = rank.queue()
        elif event == "lease" and rank.transfers.lease(ROOM, SESSION) is not None:
            writing.add(chunk)
            assert rank.answers == [], "a write began after DRAINED"
        elif event == "finish":
            writing.discard(chunk)
            rank.transfers.finished(notes[chunk])
        elif event == "grant":
            rank.transfers.granted(ROOM, SESSION, LEASE)
        elif event == "drain":
            rank.transfers.drain(ASK)
        assert not (rank.answers and writing), "DRAINED while a write is in flight"
    assert rank.answers, "asked, and never answered"
    rank.transfers.settle_done()
    assert rank.keeper.release(pages(1, 2, 3)).size == 3, "a source page stays pinned for ever"


def test_drained_is_the_last_word_among_threads() -> None:
    """Workers write through real threads; whatever the machine does, no write follows DRAINED."""
    for _ in range(40):
        rank = Rank()
        rank.transfers.granted(ROOM, SESSION, LEASE)
        notes = [rank.queue() for _ in range(8)]
        start = threading.Barrier(3, timeout=60)
        wrong: list[str] = []

        def work(mine: list[Note], rank: Rank, start: threading.Barrier, wrong: list[str]) -> None:
            start.wait()
            for note in mine:
                if rank.transfers.lease(ROOM, SESSION) is not None and rank.answers:
                    wrong.append("written after DRAINED")
                rank.transfers.finished(note)

        arguments = [(part, rank, start, wrong) for part in (notes[::2], notes[1::2])]
        threads = [threading.Thread(target=work, args=each) for each in arguments]
        for thread in threads:
            thread.start()
        start.wait()
        rank.transfers.drain(ASK)
        for thread in threads:
            thread.join()
        assert not wrong
        assert rank.answers == [Drained(ROOM, LEASE, 3, True)]


# -- headers


@pytest.mark.parametrize("row", [[1, 2, 3], [4, 5, 9], [9, 2, 5], [3, 2, 1], [11]])
def test_headers_land_beside_the_pages_they_belong_to(rank: Rank, row: list[int]) -> None:
    decode, manager = new_keeper(incarnation=8), Engine()
    length = min(40, 16 * len(row))
    holding = offered(decode, "a", prompt(length), np.array(row))
    peer = Registration(LAYOUT.fingerprint, 8, decode.headers.words.ctypes.data)
    note = rank.queue()
    blocks = rank.transfers.headers_for(manager, note, holding.lease, peer, np.array(row))
    assert sum(size for _, _, size in blocks) == len(row) * HEADER_SIZE
    assert len(blocks) == 1 + sum(b != a + 1 for a, b in itertools.pairwise(row))
    before = decode.headers.words.copy()
    manager.move(blocks)
    changed = (decode.headers.words != before).any(axis=1)
    assert np.flatnonzero(changed).tolist() == sorted(row), "a header landed elsewhere"
    assert decode.verify([holding]) == {}


def test_a_chunk_says_what_its_pages_held_when_it_was_queued(rank: Rank) -> None:
    """sglang PR#36738: the page is used again before the worker takes its chunk."""
    decode, manager = new_keeper(incarnation=8), Engine()
    holding = offered(decode, "a", prompt(40), pages(4, 5, 6))
    peer = Registration(LAYOUT.fingerprint, 8, decode.headers.words.ctypes.data)
    note = rank.queue()
    rank.keeper.headers.blank(pages(1, 2, 3))
    row = pages(4, 5, 6)
    manager.move(rank.transfers.headers_for(manager, note, holding.lease, peer, row))
    assert decode.verify([holding]) == {}


def test_headers_of_fewer_pages_are_never_spread_over_more(rank: Rank) -> None:
    peer, manager = Registration(LAYOUT.fingerprint, 8, 4096), Engine()
    note = rank.transfers.snapshot(ROOM, pages(1))
    with pytest.raises(LocalOwnershipError, match="more pages to fill"):
        rank.transfers.headers_for(manager, note, LEASE, peer, pages(4, 5))
    assert rank.transfers.headers_for(manager, note, LEASE, peer, pages()) == []


def test_each_worker_has_a_chunk_and_memory_of_its_own(rank: Rank) -> None:
    manager, peer = Engine(), Registration(LAYOUT.fingerprint, 8, 4096)
    note = rank.queue()
    rank.transfers.here.note = note
    sources: list[int] = []
    alive = threading.Barrier(2, timeout=60)

    def work() -> None:
        assert rank.transfers.here.note is None
        for _ in range(2):
            blocks = rank.transfers.headers_for(manager, note, LEASE, peer, pages(4, 5, 6))
            sources.append(blocks[0][0])
        alive.wait()  # a thread that ends leaves its memory to the next

    threads = [threading.Thread(target=work) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for thread in threads:
            stack.callback(thread.join)
            thread.start()
    assert len(sources) == 4
    assert len(set(sources)) == 2, "a worker uses its memory again, and none another's"
    assert len(manager.registered) == 2
