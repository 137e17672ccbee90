"""The contract of `sekisho.transport.base`, over every transport, with a second process."""

import json
import signal
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pytest
from transport_peer import Peer, open_transport, page_bytes_of, watch_headers, written_pages

from sekisho.transport import (
    Completion,
    PageWrite,
    Status,
    Transport,
    TransportError,
    create_transport,
)
from sekisho.transport import mooncake as mooncake_module

PAGE = 4096 + 64
WAIT_S = 60.0
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["memory", "mooncake"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Opener(Protocol):
    def __call__(self, page_bytes: int = PAGE, page_count: int = 8) -> Transport: ...


class Spawner(Protocol):
    def __call__(self, page_bytes: int = PAGE, page_count: int = 8) -> Peer: ...


@pytest.fixture
def opened(kind: str) -> Iterator[Opener]:
    made: list[Transport] = []

    def make(page_bytes: int = PAGE, page_count: int = 8) -> Transport:
        made.append(open_transport(kind, page_bytes, page_count))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def spawned(kind: str) -> Iterator[Spawner]:
    made: list[Peer] = []

    def make(page_bytes: int = PAGE, page_count: int = 8) -> Peer:
        made.append(Peer(kind, page_bytes, page_count))
        return made[-1]

    yield make
    for peer in made:
        peer.stop()


def header(number: int) -> bytes:
    return number.to_bytes(8, "little") * 8


def wait_for(transport: Transport, tickets: set[int]) -> dict[int, Completion]:
    """The next completion of each ticket."""
    found: dict[int, Completion] = {}
    deadline = time.monotonic() + WAIT_S
    while set(found) != tickets:
        assert time.monotonic() < deadline, f"no word of {tickets - set(found)}"
        for completion in transport.poll():
            assert completion.ticket in tickets
            found.setdefault(completion.ticket, completion)
        time.sleep(0.001)
    return found


def fill(transport: Transport, page_bytes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Random content for every page; a view of shape [page_count, page_bytes]."""
    pages = transport.region.reshape(-1, page_bytes)
    pages[:] = np.random.default_rng(7).integers(0, 256, pages.shape, np.uint8)
    return pages


def test_region_is_zeroed_and_aligned(opened: Opener) -> None:
    region = opened(PAGE, 5).region
    assert region.shape == (5 * PAGE,)
    assert region.dtype == np.uint8
    assert region.ctypes.data % 4096 == 0
    assert not region.any()
    region[:] = 1


def test_payload_lands_with_the_given_header(opened: Opener, spawned: Spawner) -> None:
    local, peer = opened(), spawned()
    pages = fill(local, PAGE)
    number = local.connect(peer.endpoint)
    ticket = local.submit(number, [PageWrite(2, 5, header(1)), PageWrite(0, 7, header(2))])
    assert wait_for(local, {ticket})[ticket].status is Status.DONE
    assert peer.ask(page_bytes_of, 5) == header(1) + pages[2, 64:].tobytes()
    assert peer.ask(page_bytes_of, 7) == header(2) + pages[0, 64:].tobytes()
    assert peer.ask(written_pages) == [5, 7]
    assert local.poll() == []


def test_no_header_is_seen_before_its_payload(opened: Opener, spawned: Spawner) -> None:
    page_bytes, count = 368_704, 96
    local, peer = opened(page_bytes, count), spawned(page_bytes, count)
    values = {index: index % 250 + 1 for index in range(count)}
    pages = local.region.reshape(count, page_bytes)
    for index, value in values.items():
        pages[index] = value
    # asked of no page twice, so that the watcher never meets a payload of a later write
    expected = {count - 1 - i: (header(i + 1), values[i]) for i in range(count)}
    peer.begin(watch_headers, expected)
    number = local.connect(peer.endpoint)
    writes = [PageWrite(i, count - 1 - i, header(i + 1)) for i in range(count)]
    tickets = {local.submit(number, writes[at : at + 24]) for at in range(0, count, 24)}
    statuses = {completion.status for completion in wait_for(local, tickets).values()}
    assert statuses == {Status.DONE}
    assert peer.end() == []


def test_more_pages_than_fit_under_way(opened: Opener, spawned: Spawner) -> None:
    count = 5 * mooncake_module.WINDOW
    local, peer = opened(128, count), spawned(128, count)
    pages = fill(local, 128)
    number = local.connect(peer.endpoint)
    ticket = local.submit(number, [PageWrite(i, i, header(i + 1)) for i in range(count)])
    assert wait_for(local, {ticket})[ticket].status is Status.DONE
    for index in (0, count // 2, count - 1):
        assert peer.ask(page_bytes_of, index) == header(index + 1) + pages[index, 64:].tobytes()


def test_many_tickets_to_several_peers(opened: Opener, spawned: Spawner) -> None:
    local = opened()
    pages = fill(local, PAGE)
    peers = [spawned() for _ in range(2)]
    numbers = [local.connect(peer.endpoint) for peer in peers]
    assert len(set(numbers)) == 2
    tickets = {
        local.submit(number, [PageWrite(page, (page + shift) % 8, header(page + 10 * shift + 1))])
        for page in range(8)
        for shift, number in enumerate(numbers)
    }
    assert len(tickets) == 16
    statuses = {completion.status for completion in wait_for(local, tickets).values()}
    assert statuses == {Status.DONE}
    for shift, peer in enumerate(peers):
        for page in range(8):
            wanted = header(page + 10 * shift + 1) + pages[page, 64:].tobytes()
            assert peer.ask(page_bytes_of, (page + shift) % 8) == wanted


def test_bad_write_is_refused_whole(opened: Opener, spawned: Spawner) -> None:
    local, peer = opened(), spawned(PAGE, 6)
    fill(local, PAGE)
    number = local.connect(peer.endpoint)
    for write, message in (
        (PageWrite(8, 0, header(1)), "source_page 8"),
        (PageWrite(-1, 0, header(1)), "source_page -1"),
        (PageWrite(0, 6, header(1)), "target_page 6"),
        (PageWrite(0, -1, header(1)), "target_page -1"),
        (PageWrite(0, 0, header(1)[:63]), "header has 63 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            local.submit(number, [PageWrite(1, 1, header(9)), write])
    ticket = local.submit(number, [PageWrite(3, 3, header(3))])
    wait_for(local, {ticket})
    assert peer.ask(written_pages) == [3]


def test_bad_peer_and_empty_batch_are_refused(opened: Opener, spawned: Spawner) -> None:
    local, peer = opened(), spawned()
    number = local.connect(peer.endpoint)
    with pytest.raises(ValueError, match=f"peer {number + 1}"):
        local.submit(number + 1, [PageWrite(0, 0, header(1))])
    with pytest.raises(ValueError, match="pages"):
        local.submit(number, [])


def test_connect_refuses_another_page_size(opened: Opener, spawned: Spawner) -> None:
    with pytest.raises(TransportError, match="page_bytes"):
        opened().connect(spawned(PAGE + 64, 8).endpoint)


def test_connect_refuses_what_is_no_endpoint(opened: Opener) -> None:
    local = opened()
    own = json.dumps({"kind": local.name, "page_bytes": PAGE, "page_count": -1})
    for endpoint in ("", "[]", "{}", '{"kind": "pigeon"}', "\x00", own):
        with pytest.raises(TransportError):
            local.connect(endpoint)


def test_connect_refuses_a_dead_process(opened: Opener, spawned: Spawner) -> None:
    local, peer = opened(), spawned()
    peer.signal(signal.SIGKILL)
    peer.process.join()
    with pytest.raises(TransportError):
        local.connect(peer.endpoint)


def test_connect_refuses_another_process(opened: Opener, spawned: Spawner) -> None:
    local, peer = opened(), spawned()
    parts = json.loads(peer.endpoint)
    proofs = {"memory": ("start", "inode", "page_count"), "mooncake": ("nonce", "engine")}
    for name in proofs[local.name]:
        value = parts[name]
        other = value + 1 if isinstance(value, int) else value[::-1]
        with pytest.raises(TransportError):
            local.connect(json.dumps(parts | {name: other}))
    assert local.connect(peer.endpoint) == 1


def test_killed_peer_ends_in_bounded_time(opened: Opener, spawned: Spawner) -> None:
    page_bytes, count = 1 << 20, 96
    local, peer, other = opened(page_bytes, count), spawned(page_bytes, count), spawned(page_bytes)
    fill(local, page_bytes)
    number, healthy = local.connect(peer.endpoint), local.connect(other.endpoint)
    writes = [PageWrite(i, i, header(i + 1)) for i in range(count)]
    tickets = {local.submit(number, writes[at : at + 8]) for at in range(0, count, 8)}
    peer.signal(signal.SIGKILL)
    peer.process.join()
    found = wait_for(local, tickets)
    open_tickets = {t for t, done in found.items() if done.status is Status.UNKNOWN}
    if local.name == "mooncake":
        assert open_tickets, "the kill came too late to interrupt a transfer of 96 MiB"
    # what is UNKNOWN stays so until the caller says that the peer is dead
    assert local.poll() == []
    local.disconnect(number)
    closed = wait_for(local, open_tickets)
    assert {done.status for done in closed.values()} <= {Status.FAILED}
    with pytest.raises(ValueError, match="peer"):
        local.submit(number, writes[:1])
    ticket = local.submit(healthy, [PageWrite(0, 0, header(1))])
    assert wait_for(local, {ticket})[ticket].status is Status.DONE


def test_disconnect_ends_what_has_not_begun(opened: Opener, spawned: Spawner) -> None:
    page_bytes, count = 1 << 20, 64
    local, peer = opened(page_bytes, count), spawned(page_bytes, count)
    number = local.connect(peer.endpoint)
    writes = [PageWrite(i, i, header(i + 1)) for i in range(count)]
    tickets = {local.submit(number, writes) for _ in range(4)}
    local.disconnect(number)
    found = wait_for(local, tickets)
    assert found[max(tickets)].status is Status.FAILED
    assert Status.UNKNOWN not in {completion.status for completion in found.values()}
    local.disconnect(number)


def test_close_is_idempotent_and_final(opened: Opener, spawned: Spawner) -> None:
    local, peer = opened(), spawned()
    number = local.connect(peer.endpoint)
    view = local.region[:PAGE]
    view[:] = 3
    local.submit(number, [PageWrite(i, i, header(i + 1)) for i in range(8)])
    local.close()
    local.close()
    assert (view == 3).all()
    assert local.region.size == 0
    for call in (
        local.endpoint,
        lambda: local.connect(peer.endpoint),
        lambda: local.submit(number, [PageWrite(0, 0, header(1))]),
    ):
        with pytest.raises(TransportError, match="closed"):
            call()


def test_bad_shape_is_refused(kind: str) -> None:
    for page_bytes, page_count, name in ((64, 1, "page_bytes"), (PAGE, 0, "page_count")):
        with pytest.raises(ValueError, match=name):
            create_transport(kind, page_bytes, page_count)


def test_too_large_region_is_a_clear_error(kind: str) -> None:
    open_transport(kind, PAGE, 1).close()
    with pytest.raises(TransportError, match="bytes of memory"):
        create_transport(kind, 1 << 30, 1 << 20)
