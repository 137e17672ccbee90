"""Grants: pages and slots wait until every writer has provably ended; no clock ends the waiting."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import zmq

from guard_kit import closed_port, computed, new_keeper, offered, pages, prompt
from sekisho.core.errors import LocalOwnershipError
from sekisho.core.lease import Lease
from sekisho.core.ledger import Pages
from sekisho.guard.keeper import Holding
from sekisho.guard.sglang import grants as module
from sekisho.guard.sglang.grants import Grants
from sekisho.guard.sglang.transfers import Transfers
from sekisho.guard.sglang.wire import Drain, Drained, drain_of
from sekisho.guard.sockets import gone

HERE = "127.0.0.1"


class Pull:
    """A rank's own socket: a real one, on a port of this machine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.rcvtimeo = 60_000
        self.port = self.socket.bind_to_random_port(f"tcp://{HERE}")
        self.info = {"rank_ip": HERE, "rank_port": str(self.port)}

    def drain(self) -> Drain:
        message = drain_of(self.socket.recv_multipart())
        assert isinstance(message, Drain)
        return message


class Side:
    """A decode rank: its pool, its grants, and what came back to the allocator."""

    def __init__(self, port: int, info: dict[str, str]) -> None:
        self.info = info  # of a prefill rank that lives and says nothing
        self.keeper = new_keeper()
        self.free: list[int] = []
        self.grants = Grants(self.keeper, self.put_back)
        self.manager = SimpleNamespace(local_ip=HERE, rank_port=port)

    def put_back(self, freed: Pages) -> None:
        self.free += freed.tolist()

    def grant(
        self, room: int, row: Pages, infos: list[dict[str, str]], slot: int | None = None
    ) -> Holding:
        holding = offered(self.keeper, "a", prompt(16 * len(row)), row)
        receiver = SimpleNamespace(bootstrap_infos=infos, bootstrap_room=room, kv_mgr=self.manager)
        self.grants.open(receiver, holding, slot)
        return holding

    def end(self, holding: Holding) -> None:
        """The request ends, as a client's abort ends it."""
        self.free += self.keeper.release(holding.table.pages).tolist()
        self.keeper.close(holding)
        self.grants.abandon(holding)

    def until(self, done: Callable[[], bool]) -> None:
        """Run the scheduler's loop until ``done``; a hang fails, how long it takes does not."""
        end = time.monotonic() + 60
        while not done():
            assert time.monotonic() < end, "it never came"
            self.grants.tick()
            time.sleep(0.002)


class Net:
    """Sockets of all the processes that a test plays, closed after it."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.pushing: dict[str, tuple[zmq.Socket[bytes], threading.Lock]] = {}
        self.ranks: list[Pull] = []

    def rank(self) -> Pull:
        self.ranks.append(Pull(self.context))
        return self.ranks[-1]

    def connect(self, info: dict[str, str]) -> tuple[zmq.Socket[bytes], threading.Lock]:
        at = f"tcp://{info['rank_ip']}:{info['rank_port']}"
        if at not in self.pushing:
            push = self.context.socket(zmq.PUSH)
            push.connect(at)
            self.pushing[at] = push, threading.Lock()
        return self.pushing[at]

    def send(self, host: str, port: int, frames: list[bytes]) -> None:
        push, lock = self.connect({"rank_ip": host, "rank_port": str(port)})
        with lock:
            push.send_multipart(frames)


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    net.context.destroy(linger=0)


@pytest.fixture
def side(net: Net, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    """A decode rank that asks often, with the one function of SGLang that asking needs."""

    name = ""
    for part in ("sglang", "srt", "disaggregation", "common", "conn"):
        name = f"{name}.{part}".strip(".")
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    receiver = SimpleNamespace(_connect_to_bootstrap_server=net.connect)
    monkeypatch.setattr(sys.modules[name], "CommonKVReceiver", receiver, raising=False)
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.005)
    side = Side(port=1, info=net.rank().info)
    yield side
    for grant in list(side.grants._by_room.values()):  # so that its thread falls silent
        side.grants.settle(grant.room)


def quarantined(side: Side) -> int:
    side.keeper.ledger.check_integrity()
    return side.keeper.quarantined()


# -- by a whole commit


def test_a_whole_commit_ends_the_grant_and_the_request_goes_on(side: Side) -> None:
    holding = side.grant(7, pages(1, 2), [side.info])
    assert side.grants.lease_of(7) == holding.lease
    side.grants.settle(7)
    assert (side.grants.open_count(), side.grants.lease_of(7), side.free) == (0, None, [])
    side.end(holding)
    assert side.free == [1, 2]
    side.grants.settle(7)  # of nothing: nothing


def test_pages_that_came_back_first_are_put_back_by_the_commit(side: Side) -> None:
    holding = side.grant(7, pages(1, 2), [side.info])
    side.free += side.keeper.release(pages(1)).tolist()
    assert (side.free, quarantined(side)) == ([], 1)
    side.grants.settle(7)
    assert (side.free, quarantined(side)) == ([1], 0)
    assert holding.table.pages.tolist() == [1, 2]


def test_a_room_that_is_in_use_is_refused(side: Side) -> None:
    """CVE-2026-94627: a client names the room of another request."""
    first = side.grant(7, pages(1, 2), [side.info])
    with pytest.raises(LocalOwnershipError, match="bootstrap_room 7 is in use"):
        side.grant(7, pages(3, 4), [side.info])
    assert side.grants.lease_of(7) == first.lease
    assert side.keeper.ledger.pins_of(3) == 0, "the refused one left a pin"
    side.end(first)
    assert quarantined(side) == 2


# -- by the word of every rank


def test_pages_wait_until_every_rank_has_drained(side: Side) -> None:
    """sglang PR#35360: one writer's word says nothing of its siblings."""
    holding = side.grant(7, pages(1, 2, 3), [side.info, side.info])
    side.end(holding)
    lease = holding.lease
    wrong = [
        Drained(7, lease, 0, True),
        Drained(7, lease, 0, True),  # the same rank again is not the other one
        Drained(8, lease, 1, True),
        Drained(7, Lease(lease.incarnation, lease.serial + 1), 1, True),
        Drained(7, Lease(lease.incarnation + 1, lease.serial), 1, True),
        Drained(7, lease, 2, True),
    ]
    for answer in wrong:
        side.grants.heard(answer)
        side.grants.tick()
        assert (side.free, quarantined(side)) == ([], 3), answer
    side.grants.heard(Drained(7, lease, 1, True))
    assert side.free == [], "only the scheduler moves pages"
    side.grants.heard(Drained(7, lease, 1, True))
    side.grants.tick()
    assert (sorted(side.free), quarantined(side), side.grants.open_count()) == ([1, 2, 3], 0, 0)


def test_a_successor_answers_for_the_dead_once_nothing_of_it_is_unread(side: Side) -> None:
    """vllm#52234: a restart in the middle. The new process never heard of the lease."""
    holding = side.grant(7, pages(1), [side.info])
    side.end(holding)
    answer = Drained(7, holding.lease, 0, known=False)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((HERE, 0)))
        peer = stack.enter_context(socket.create_connection(server.getsockname()))
        peer.sendall(b"page")
        side.grants.heard(answer)
        side.grants.tick()
        assert quarantined(side) == 1

    def again() -> bool:
        side.grants.heard(answer)
        return side.free != []

    side.until(again)
    assert (side.free, quarantined(side)) == ([1], 0)


def test_the_old_answer_says_nothing_of_a_rooms_next_grant(side: Side) -> None:
    old = side.grant(7, pages(1), [side.info])
    side.end(old)
    side.grants.heard(Drained(7, old.lease, 0, True))
    side.grants.tick()
    new = side.grant(7, pages(1), [side.info])
    side.end(new)
    side.grants.heard(Drained(7, old.lease, 0, True))  # sglang PR#24580: it comes twice
    side.grants.tick()
    assert quarantined(side) == 1


def test_time_and_asking_again_free_nothing(side: Side, net: Net) -> None:
    """sglang PR#38961: a timer frees the pages, and the transfer lands."""
    rank = net.rank()
    holding = side.grant(7, pages(1, 2), [rank.info], slot=3)
    slots = Slots()
    assert side.grants.holds_slot(slots, 3)
    side.end(holding)
    for _ in range(20):
        assert rank.drain() == Drain(7, holding.lease, HERE, 1, 0)
        side.grants.tick()
        assert (side.free, quarantined(side), slots.freed) == ([], 2, [])
    side.grants.heard(Drained(7, holding.lease, 0, True))
    side.until(lambda: side.free == [1, 2])


def test_a_request_that_runs_is_asked_nothing(side: Side, net: Net) -> None:
    running, ended = net.rank(), net.rank()
    side.grant(7, pages(1), [running.info])
    side.end(side.grant(8, pages(2), [ended.info]))
    for _ in range(3):
        ended.drain()
    with pytest.raises(zmq.Again):
        running.socket.recv_multipart(zmq.NOBLOCK)


def test_a_rank_that_has_drained_is_not_asked_again(side: Side, net: Net) -> None:
    done, other = net.rank(), net.rank()
    holding = side.grant(7, pages(1), [done.info, other.info])
    side.grants.heard(Drained(7, holding.lease, 0, True))
    side.end(holding)
    assert [other.drain().rank for _ in range(3)] == [1, 1, 1]
    with pytest.raises(zmq.Again):
        done.socket.recv_multipart(zmq.NOBLOCK)


def test_a_grant_that_cannot_be_asked_about_stops_no_other(side: Side, net: Net) -> None:
    rank = net.rank()
    side.end(side.grant(7, pages(1), [{}]))
    side.end(side.grant(8, pages(2), [rank.info]))
    for _ in range(3):
        assert rank.drain().room == 8
    assert quarantined(side) == 2


def test_two_servers_agree_on_the_end_of_a_transfer(side: Side, net: Net) -> None:
    """Decode's grants and prefill's transfers, over real sockets, a chunk still under way."""
    prefill, decode = net.rank(), net.rank()
    side.manager.rank_port = decode.port

    source = new_keeper(incarnation=9)
    transfers = Transfers(source, net.send)
    computed(source, "a", prompt(32), pages(1, 2))
    holding = side.grant(7, pages(4, 5), [prefill.info])
    transfers.granted(7, "session", holding.lease)
    note = transfers.snapshot(7, pages(1, 2))
    transfers.queued(note)
    side.end(holding)
    for _ in range(3):
        assert transfers.drain(prefill.drain()) in (True, False)
        side.grants.tick()
        assert quarantined(side) == 2
    transfers.finished(note)
    answer = drain_of(decode.socket.recv_multipart())
    assert isinstance(answer, Drained)
    side.grants.heard(answer)
    side.grants.tick()
    assert sorted(side.free) == [4, 5]


# -- metadata slots


class Slots:
    def __init__(self) -> None:
        self.freed: list[int] = []

    def free(self, slot: int) -> None:
        self.freed.append(slot)


def test_a_slot_waits_with_its_pages_and_comes_back_once(side: Side) -> None:
    """sglang PR#17430: the next request reads what the old one's writer left in its slot."""
    slots = Slots()
    holding = side.grant(7, pages(1), [side.info], slot=3)
    assert not side.grants.holds_slot(slots, 4)
    assert side.grants.holds_slot(slots, 3)
    side.end(holding)
    side.grants.tick()
    assert slots.freed == []
    side.grants.heard(Drained(7, holding.lease, 0, True))
    side.grants.tick()
    side.grants.tick()
    assert slots.freed == [3]
    assert not side.grants.holds_slot(slots, 3), "the grant is over: the slot is the engine's"


def test_a_slot_whose_request_was_committed_is_free_at_once(side: Side) -> None:
    side.grant(7, pages(1), [side.info], slot=0)
    side.grants.settle(7)
    assert not side.grants.holds_slot(Slots(), 0)


# -- by the death of the process


def test_a_rank_whose_process_is_gone_writes_no_more(side: Side, net: Net) -> None:
    dead, alive = {"rank_ip": HERE, "rank_port": str(closed_port())}, net.rank()
    side.end(side.grant(7, pages(1, 2), [dead, alive.info]))
    (grant,) = side.grants._by_room.values()
    side.until(lambda: grant.over == {0})
    for _ in range(3):
        assert alive.drain().rank == 1
        side.grants.tick()
        assert quarantined(side) == 2, "the other rank lives"
    alive.socket.close(linger=0)
    side.until(lambda: side.free == [1, 2])


def test_a_host_that_answers_nothing_holds_up_the_others_once_a_round(
    side: Side, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def counting(host: str, port: int) -> bool:
        asked.append((host, port))
        return gone(host, port)

    monkeypatch.setattr(module, "gone", counting)
    other = net.rank()
    dead = {"rank_ip": HERE, "rank_port": str(closed_port())}
    for room in range(8):
        side.grant(room, pages(room), [dead, other.info])
    grants = list(side.grants._by_room.values())
    with side.grants._lock:  # all end between two rounds
        for grant in grants:
            side.end(grant.holding)
    side.until(lambda: all(grant.over == {0} for grant in grants))
    at_dead = [port for _, port in asked if port != other.port]
    assert len(at_dead) <= max(grant.asked for grant in grants) - 1


def test_headers_of_the_granted_pages_are_blank(side: Side) -> None:
    side.keeper.headers.words[:] = 5
    side.grant(7, pages(1, 2), [side.info])
    assert not np.any(side.keeper.headers.words[[1, 2]])
