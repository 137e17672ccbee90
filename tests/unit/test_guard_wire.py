"""What guarded servers say to each other: it comes back as it was sent, or is refused."""

import struct
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sekisho.core.lease import U64_MAX, Lease
from sekisho.guard.sglang import wire
from sekisho.guard.sglang.wire import (
    DRAIN,
    DRAINED,
    MARK,
    Drain,
    Drained,
    Frames,
    Receiving,
    Registration,
    Sending,
    drain_of,
    grant_frame,
    split,
)

U64 = st.integers(0, U64_MAX)
LEASES = st.builds(Lease, st.integers(1, U64_MAX), st.integers(1, U64_MAX))
OWN = [b"77", b"10.0.0.1", b"5000", b"session", b"\x00\x01"]


@given(layout=st.integers(0, 2**32 - 1), incarnation=U64, address=U64)
def test_a_registration_comes_back_as_it_was(layout: int, incarnation: int, address: int) -> None:
    said = Registration(layout, incarnation, address)
    assert split([*OWN, said.frame()]) == (OWN, said)


@given(lease=LEASES)
def test_a_lease_comes_back_as_it_was(lease: Lease) -> None:
    own, extra = split([*OWN, grant_frame(lease)])
    assert (own, extra) == (OWN, lease)
    assert isinstance(extra, Lease)


@given(room=U64, lease=LEASES, port=st.integers(1, 65535), rank=st.integers(0, 255))
def test_drain_and_its_answer_come_back_as_they_were(
    room: int, lease: Lease, port: int, rank: int
) -> None:
    asked = Drain(room, lease, "fe80::1", port, rank)
    assert drain_of(asked.frames()) == asked
    for known in (True, False):
        said = Drained(room, lease, rank, known)
        assert drain_of(said.frames()) == said


@pytest.mark.parametrize("frames", [[], OWN, [*OWN, b""], [*OWN, b"sekish"], [b"None", b"1"]])
def test_what_is_sglangs_alone_is_left_as_it_is(frames: Frames) -> None:
    assert split(frames) == (frames, None)
    if frames:
        assert drain_of(frames) is None


@given(lease=LEASES, cut=st.integers(1, 25))
def test_a_frame_that_was_cut_off_is_refused(lease: Lease, cut: int) -> None:
    for frame in (grant_frame(lease), Registration(1, 2, 3).frame()):
        short = frame[: max(len(MARK), len(frame) - cut)]
        with pytest.raises(ValueError, match=r"cut off|speaks version"):
            split([*OWN, short])
        with pytest.raises(ValueError, match="cut off"):
            split([*OWN, frame + b"\0"])


@pytest.mark.parametrize("kind", [b"G", b"R"])
@pytest.mark.parametrize("more", [0, 8])
def test_another_version_is_named_whatever_its_size(kind: bytes, more: int) -> None:
    size = len(grant_frame(Lease(1, 2))) if kind == b"G" else len(Registration(1, 2, 3).frame())
    frame = MARK + kind + struct.pack("<H", wire.VERSION + 1) + bytes(size - 10 + more)
    with pytest.raises(ValueError, match="speaks version 2, not 1"):
        split([*OWN, frame])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="cut off"):
        split([*OWN, MARK + b"X" + grant_frame(Lease(1, 2))[8:]])


@pytest.mark.parametrize(
    "frames",
    [
        [DRAIN],
        [DRAINED, b"1", b"2"],
        [DRAIN, b"1", b"2", b"3", b"h", b"x", b"0"],
        [DRAIN, b"1", b"2", b"3", b"\xff", b"1", b"0"],
        [DRAIN, b"1", b"2", b"3", b"h", b"1", b"0", b"more"],
        [DRAINED, b"1", b"2", b"", b"0", b"1"],
        [DRAINED, b"1", b"2", b"3", b"0"],
    ],
)
def test_a_malformed_message_of_the_guard_is_refused(frames: Frames) -> None:
    with pytest.raises(ValueError, match=r".+"):
        drain_of(frames)


@given(frames=st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_no_bytes_whatever_end_the_thread_that_reads_them(frames: Frames) -> None:
    for read in (split, drain_of):
        try:
            read([DRAIN, *frames])
            read([*frames, MARK + frames[0]])
        except ValueError:
            continue


# -- sockets


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A sender and a receiver of this process."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.bind("inproc://guard")
        pull.rcvtimeo = 20_000
        with context.socket(zmq.PUSH) as push:
            push.connect("inproc://guard")
            yield push, pull


Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


def test_the_guards_frame_joins_sglangs_message_and_leaves_it(sockets: Sockets) -> None:
    push, pull = sockets
    lease = Lease(5, 6)
    seen: list[object] = []

    def accept(frames: Frames) -> Frames:
        own, extra = split(frames)
        seen.append(extra)
        return own

    sending = Sending(push, lambda f: grant_frame(lease) if f[0].isdigit() else None)
    receiving = Receiving(pull, accept)
    for frames in (OWN, [b"ABORT", b"77"]):
        sending.send_multipart(frames)
        assert receiving.recv_multipart() == frames
    assert seen == [lease, None]


def test_a_message_that_is_kept_is_never_shown(sockets: Sockets) -> None:
    push, pull = sockets
    receiving = Receiving(pull, lambda f: None if drain_of(f) else f)
    push.send_multipart(Drained(1, Lease(1, 2), 0, True).frames())
    push.send_multipart(Drain(1, Lease(1, 2), "h", 1, 0).frames())
    push.send_multipart(OWN)
    assert receiving.recv_multipart() == OWN
    with pytest.raises(zmq.Again):
        receiving.recv_multipart(zmq.NOBLOCK)


def test_everything_else_of_a_socket_is_the_sockets(sockets: Sockets) -> None:
    push, pull = sockets
    receiving, sending = Receiving(pull, lambda f: f), Sending(push, lambda _: None)
    sending.send(b"plain")
    assert receiving.recv() == b"plain"
    assert sending.getsockopt(zmq.TYPE) == zmq.PUSH
    assert receiving.closed is False
