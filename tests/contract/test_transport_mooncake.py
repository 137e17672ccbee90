"""What is Mooncake's alone: a peer that hangs, missing libraries, and the choice of transport."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transport_peer import Peer, open_transport, written_pages

from sekisho.transport import (
    Completion,
    PageWrite,
    Status,
    Transport,
    TransportError,
    mooncake,
    mooncake_engine,
)
from sekisho.transport import create_transport as create

PAGE = 1 << 20
COUNT = 48
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pair() -> Iterator[tuple[Transport, Peer]]:
    local = open_transport("mooncake", PAGE, COUNT)
    peer = Peer("mooncake", PAGE, COUNT)
    yield local, peer
    local.close()
    peer.stop()


def next_completion(transport: Transport) -> Completion:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if found := transport.poll():
            assert len(found) == 1
            return found[0]
        time.sleep(0.001)
    raise TimeoutError("no completion")


def writes() -> list[PageWrite]:
    return [PageWrite(i, i, bytes([i + 1]) * 64) for i in range(COUNT)]


def test_stopped_peer_is_unknown_and_then_done(
    pair: tuple[Transport, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "STALL_S", 0.3)
    local, peer = pair
    number = local.connect(peer.endpoint)
    peer.signal(signal.SIGSTOP)
    ticket = local.submit(number, writes())
    assert next_completion(local)[:2] == (ticket, Status.UNKNOWN)
    assert local.poll() == []
    peer.signal(signal.SIGCONT)
    assert next_completion(local)[:2] == (ticket, Status.DONE)
    assert peer.ask(written_pages) == list(range(COUNT))


def test_stopped_peer_is_unknown_until_it_is_dead(
    pair: tuple[Transport, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "STALL_S", 0.3)
    local, peer = pair
    number = local.connect(peer.endpoint)
    peer.signal(signal.SIGSTOP)
    ticket = local.submit(number, writes())
    assert next_completion(local)[:2] == (ticket, Status.UNKNOWN)
    # wrongly declared dead: its writes are under way, so the ticket must not end
    local.disconnect(number)
    time.sleep(1.0)
    assert local.poll() == []
    peer.signal(signal.SIGKILL)
    assert next_completion(local)[:2] == (ticket, Status.FAILED)


def test_close_does_not_wait_for_a_stopped_peer(
    pair: tuple[Transport, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "CLOSE_S", 0.2)
    local, peer = pair
    number = local.connect(peer.endpoint)
    peer.signal(signal.SIGSTOP)
    local.submit(number, writes())
    local.close()
    assert local.region.size == 0


def test_missing_library_is_named_and_auto_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise TransportError(f"no {protocol}: apt-get install libibverbs1")

    monkeypatch.setattr(mooncake, "load_engine", missing)
    with pytest.raises(TransportError, match="apt-get install"):
        create("mooncake", 128, 1)
    made = create("auto", 128, 1)
    assert made.transport.name == "memory"
    assert "apt-get install" in made.fallback_reason
    made.transport.close()


def test_import_errors_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "mooncake.engine", raising=False)
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TransportError, match="pip install"):
        mooncake_engine.load_engine("tcp")
    (package / "engine.py").write_text('raise ImportError("libibverbs.so.1: cannot open")')
    with pytest.raises(TransportError, match=r"libibverbs\.so\.1.*apt-get install libibverbs1"):
        mooncake_engine.load_engine("tcp")


def test_auto_prefers_mooncake() -> None:
    open_transport("mooncake", 128, 1).close()
    made = create("auto", 128, 1)
    assert (made.transport.name, made.fallback_reason) == ("mooncake", "")
    made.transport.close()


def test_unacknowledged_framing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(TransportError, match="MC_TCP_PROTO"):
        create("mooncake", 128, 1)


def test_rdma_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(TransportError, match="rdma"):
        create("mooncake", 128, 1, protocol="rdma")


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="pigeon"):
        create("pigeon", 128, 1)
    with pytest.raises(ValueError, match="protocol"):
        create("mooncake", 128, 1, protocol="pigeon")
