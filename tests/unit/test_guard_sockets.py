"""A peer is gone when its host refuses connections and nothing of it is left in our sockets."""

import contextlib
import socket
import struct

import pytest

from guard_kit import closed_port
from sekisho.guard import sockets as module
from sekisho.guard.sockets import gone

HERE = "127.0.0.1"


def test_a_listener_is_there_and_a_refusal_proves_that_nobody_is() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        assert gone(HERE, port) is False
    assert gone(HERE, port) is True


def test_a_time_out_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONNECT_S", 0.05)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((HERE, 0), backlog=0))
        address = server.getsockname()
        for _ in range(4):  # until its queue is full and the kernel answers no more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        with contextlib.suppress(TimeoutError):
            socket.create_connection(address, timeout=0.05).close()
            pytest.fail("the queue is not full: this shows nothing")
        assert gone(*address) is False


def test_a_name_that_cannot_be_found_proves_nothing() -> None:
    assert gone("no-such-host.invalid", 9) is False


def test_bytes_that_wait_in_our_sockets_are_still_to_be_written() -> None:
    """What the dead process sent may land later: it lies in the kernel, unread."""
    port = closed_port()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((HERE, 0)))
        peer = stack.enter_context(socket.create_connection(server.getsockname()))
        peer.sendall(b"page")
        assert gone(HERE, port) is False, "nobody has accepted the connection yet"
        ours, _ = server.accept()
        stack.enter_context(ours)
        assert gone(HERE, port) is False
        assert ours.recv(100) == b"page"
        assert gone(HERE, port) is True


def test_the_end_of_a_dead_peers_connection_is_no_byte_of_it() -> None:
    """Nobody reads an idle connection, and so its end stays unread for good."""
    with socket.create_server((HERE, 0)) as server, socket.socket() as refused:
        refused.bind((HERE, 0))
        port = refused.getsockname()[1]
        peer = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        peer.close()
        with ours:
            assert gone(HERE, port)
        peer = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        peer.send(b"x")
        peer.close()
        with ours:
            assert not gone(HERE, port)
            ours.recv(1)
            assert gone(HERE, port)


def test_a_table_of_sockets_that_cannot_be_read_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable(_: str) -> list[list[str]]:
        raise PermissionError

    port = closed_port()
    assert gone(HERE, port) is True
    monkeypatch.setattr(module, "_table", unreadable)
    assert gone(HERE, port) is False


def test_bytes_before_a_reset_are_found_though_the_kernel_lists_the_connection_no_more() -> None:
    """A process that is killed with unread bytes of ours resets its connections."""
    port = closed_port()
    with socket.create_server((HERE, 0)) as server:
        peer = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        with ours:
            peer.sendall(b"page")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            assert gone(HERE, port) is False
            assert ours.recv(100) == b"page"
            assert gone(HERE, port) is True


def test_other_kinds_of_sockets_are_none_of_a_transfers() -> None:
    port = closed_port()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        assert gone(HERE, port) is True
