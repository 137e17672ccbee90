"""What guarded servers say to each other, beside SGLang's own messages between them.

Decode to prefill, one more frame at the end of two messages that it sends anyway:

    registration   MARK "R" version u16 · layout fingerprint u32 · incarnation u64 · address of the
                   headers u64
    grant          MARK "G" version u16 · lease (incarnation u64, serial u64)

and messages of the guard alone, which SGLang never sees:

    decode -> prefill   DRAIN  room · incarnation · serial · host · port · rank   write no more
    prefill -> decode   DRAINED room · incarnation · serial · rank · known      nothing is in flight

Integers in frames of their own are decimal text, as in SGLang's messages.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from sekisho.core.lease import Lease

VERSION = 1
MARK = b"sekisho"
DRAIN = b"SEKISHO_DRAIN"
DRAINED = b"SEKISHO_DRAINED"

_REGISTRATION = struct.Struct("<7scHIQQ")
_GRANT = struct.Struct("<7scHQQ")
Frames = list[bytes]


class Registration(NamedTuple):
    """Where a decode rank takes the headers of its pages. ``address``: of the first, in its own
    memory, registered with its transfer engine; 64 bytes a page."""

    layout: int
    incarnation: int
    address: int

    def frame(self) -> bytes:
        return _REGISTRATION.pack(MARK, b"R", VERSION, *self)


class Drain(NamedTuple):
    """A request to write no more under ``lease``, and where to send `Drained`. ``rank`` is the
    asker's own number for the prefill rank; the answer repeats it."""

    room: int
    lease: Lease
    host: str
    port: int
    rank: int

    def frames(self) -> Frames:
        where = [self.host.encode(), *_decimal(self.port, self.rank)]
        return [DRAIN, *_decimal(self.room, *self.lease), *where]


class Drained(NamedTuple):
    """Nothing of ``lease`` is in flight from this process, and nothing will ever be.

    ``known``: it was granted to this very process. If not, whoever it was granted to has ended.
    """

    room: int
    lease: Lease
    rank: int
    known: bool

    def frames(self) -> Frames:
        return [DRAINED, *_decimal(self.room, *self.lease, self.rank, self.known)]


def grant_frame(lease: Lease) -> bytes:
    """The frame that tells prefill under which lease it writes."""
    return _GRANT.pack(MARK, b"G", VERSION, *lease)


def split(frames: Frames) -> tuple[Frames, Registration | Lease | None]:
    """SGLang's own frames, and what the guard added, None where the peer has no guard.

    Raises:
        ValueError: a guard's frame of another version, or cut off.
    """
    if not frames or not frames[-1].startswith(MARK):
        return frames, None
    last = frames[-1]
    version = int.from_bytes(last[len(MARK) + 1 : len(MARK) + 3], "little")
    if len(last) >= len(MARK) + 3 and version != VERSION:  # its frames may be of another size
        raise ValueError(f"a peer's guard speaks version {version}, not {VERSION}")
    for kind, form in ((b"R", _REGISTRATION), (b"G", _GRANT)):
        if last[len(MARK) : len(MARK) + 1] == kind and len(last) == form.size:
            _, _, _, *rest = form.unpack(last)
            return frames[:-1], Registration(*rest) if kind == b"R" else Lease(*rest)
    raise ValueError("a frame of a peer's guard is cut off")


def drain_of(frames: Frames) -> Drain | Drained | None:
    """One of the guard's own messages, or None if it is SGLang's.

    Raises:
        ValueError: it is the guard's, and malformed.
    """
    if frames[0] == DRAIN and len(frames) == 7:
        room, incarnation, serial = map(int, frames[1:4])
        host, port, rank = frames[4].decode(), int(frames[5]), int(frames[6])
        return Drain(room, Lease(incarnation, serial), host, port, rank)
    if frames[0] == DRAINED and len(frames) == 6:
        room, incarnation, serial, rank, known = map(int, frames[1:6])
        return Drained(room, Lease(incarnation, serial), rank, known == 1)
    if frames[0] in (DRAIN, DRAINED):
        raise ValueError("a message of a peer's guard is malformed")
    return None


class Receiving:
    """A socket whose ``recv_multipart`` shows SGLang only what is SGLang's.

    ``accept`` gets every message; it returns the frames for SGLang, or None to keep the message.
    """

    def __init__(self, socket: Any, accept: Callable[[Frames], Frames | None]) -> None:
        self._socket = socket
        self._accept = accept

    def recv_multipart(self, *args: Any, **kwargs: Any) -> Frames:
        while True:
            frames = self._accept(self._socket.recv_multipart(*args, **kwargs))
            if frames is not None:
                return frames

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class Sending:
    """A socket whose ``send_multipart`` adds the guard's frame to SGLang's message.

    ``extra`` gets the frames and returns the guard's, or None to add nothing.
    """

    def __init__(self, socket: Any, extra: Callable[[Frames], bytes | None]) -> None:
        self._socket = socket
        self._extra = extra

    def send_multipart(self, frames: Frames, *args: Any, **kwargs: Any) -> Any:
        more = self._extra(frames)
        return self._socket.send_multipart(
            frames if more is None else [*frames, more], *args, **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _decimal(*numbers: int) -> Frames:
    return [str(int(number)).encode("ascii") for number in numbers]
