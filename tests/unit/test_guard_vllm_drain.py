"""Drain: no write begins after it, it is told only when none is under way, and only to our own."""

import socket
import threading

import pytest

from sekisho.guard.vllm.drain import Asker, DrainServer, Flights, drained

KEY, OTHER = b"k" * 32, b"o" * 32


def test_drained_only_when_nothing_is_under_way() -> None:
    flights = Flights()
    assert flights.begin("t")
    assert flights.begin("t")
    assert not flights.drain("t")
    flights.end("t")
    assert not flights.drain("t")
    flights.end("t")
    assert flights.drain("t")


def test_no_write_begins_after_a_drain() -> None:
    flights = Flights()
    assert flights.drain("t")
    assert not flights.begin("t")
    assert flights.begin("another")


@pytest.fixture
def flights() -> Flights:
    return Flights()


@pytest.fixture
def server(flights: Flights) -> DrainServer:
    return DrainServer(flights, KEY, "127.0.0.1")


def _ask(server: DrainServer, key: bytes, transfer: str = "t") -> bool:
    host, _, port = server.address.rpartition(":")
    return drained(key, host, int(port), transfer)


def test_it_answers_over_a_real_socket(server: DrainServer, flights: Flights) -> None:
    flights.begin("t")
    assert not _ask(server, KEY)
    flights.end("t")
    assert _ask(server, KEY)
    server.close()


def test_whoever_lacks_the_key_changes_nothing(server: DrainServer, flights: Flights) -> None:
    assert not _ask(server, OTHER)
    assert flights.begin("t"), "a stranger has stopped a transfer"
    assert server.answer(b"junk\n") == b"{}\n"
    assert server.answer(b'{"transfer": "t", "mac": "\xc3\xa9"}\n') == b"{}\n"
    server.close()


def test_an_answer_that_is_not_signed_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def lie() -> None:
            link, _ = listening.accept()
            with link:
                link.recv(4096)
                link.sendall(b'{"drained": true, "mac": "00"}\n')

        thread = threading.Thread(target=lie)
        thread.start()
        assert not drained(KEY, "127.0.0.1", listening.getsockname()[1], "t")
        thread.join()


def _over(asker: Asker, count: int) -> list[str]:
    found: list[str] = []
    for _ in range(200):
        found += asker.take_over()
        if len(found) >= count:
            break
        threading.Event().wait(0.05)
    return found


def test_asked_until_every_worker_has_drained(server: DrainServer) -> None:
    late = Flights()
    second = DrainServer(late, KEY, "127.0.0.1")
    late.begin("t")
    asker = Asker(KEY)
    asker.ask("t", "request", (server.address, second.address))
    threading.Event().wait(1.2)
    assert asker.take_over() == []
    late.end("t")
    assert _over(asker, 1) == ["request"]
    assert asker.open_count() == 0
    server.close()
    second.close()


def test_a_worker_that_is_gone_writes_no_more(server: DrainServer, flights: Flights) -> None:
    flights.begin("t")
    address = server.address
    server.close()
    asker = Asker(KEY)
    asker.ask("t", "request", (address,))
    assert _over(asker, 1) == ["request"]


def test_without_an_address_nothing_is_ever_over() -> None:
    asker = Asker(KEY)
    asker.ask("t", "request", ())
    threading.Event().wait(1.2)
    assert asker.take_over() == []
    assert asker.open_count() == 1


def test_a_death_is_seen_of_a_load_that_is_waited_for(server: DrainServer) -> None:
    asker = Asker(KEY)
    asker.watch("alive", (server.address,))
    dead = DrainServer(Flights(), KEY, "127.0.0.1")
    address = dead.address
    dead.close()
    asker.watch("dead", (address,))
    asker.watch("over", (address,))
    asker.unwatch("over")
    for _ in range(200):
        if found := asker.take_gone():
            break
        threading.Event().wait(0.05)
    assert found == ["dead"]
    threading.Event().wait(1.2)
    assert asker.take_gone() == []
    server.close()
