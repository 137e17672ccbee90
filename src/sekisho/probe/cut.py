"""Requests that are left: after some time, in the middle of their body, or half closed.

Each has a connection of its own that is closed at the end and never used again. It is written to
by hand, as HTTP clients neither send half of a body nor close the sending half of a connection.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

import h11
import msgspec
from multidict import CIMultiDict

from sekisho.probe.exchange import ExchangeError, UnreachedError, Whole
from sekisho.probe.reading import Seen, read

LEFT = "the prober left"
"""The reason of a request that was cut before its answer was whole."""
_PIECE = 65_536


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is left.

    Attributes:
        after_s: when the connection is closed, from the moment at which the request, as far as it
            is sent at all, was handed to the network; None: at the end of the answer.
        share: of the body that is sent, though its whole length is announced.
        half_close: no more can be sent after the request (FIN, under TLS after a close_notify),
            while the answer is still read.
    """

    after_s: float | None = None
    share: float = 1.0
    half_close: bool = False


async def exchange(
    url: str,
    head: Mapping[str, str],
    body: bytes,
    seen: Seen,
    cut: Cut,
    *,
    stream: bool,
    context: ssl.SSLContext | None = None,
) -> Whole | str:
    """A whole answer or the message of a refusal, if one came before the connection was closed.

    Raises:
        UnreachedError: no connection.
        ExchangeError: what came cannot be used; `LEFT` where it was left.
        OSError: the connection broke.
    """
    wire = await _Wire.opened(url, context)
    try:
        talk = _Talk(wire)
        await talk.send(url, head, body, cut.share)
        if cut.half_close:
            await wire.finish()
        async with asyncio.timeout(cut.after_s) as limit:
            await talk.head()
            return await read(talk, seen, stream)
    except TimeoutError:
        if limit.expired():
            raise ExchangeError(LEFT) from None
        raise
    finally:
        wire.close()


class _Talk:
    """HTTP/1.1 over a wire; once `head` is done, what `reading.read` reads."""

    def __init__(self, wire: "_Wire") -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._wire = wire
        self._http = h11.Connection(h11.CLIENT)

    @property
    def content(self) -> "_Talk":
        return self

    async def send(self, url: str, head: Mapping[str, str], body: bytes, share: float) -> None:
        """The request with the first ``share`` of its body."""
        parts = urlsplit(url)
        headers = {"Host": parts.netloc, "Connection": "close", "Content-Length": str(len(body))}
        request = h11.Request(
            method="POST", target=parts.path or "/", headers=list((headers | dict(head)).items())
        )
        sent = self._http.send(request) or b""
        part = body[: round(len(body) * share)]
        sent += self._http.send(h11.Data(data=part)) or b""
        if len(part) == len(body):
            sent += self._http.send(h11.EndOfMessage()) or b""
        await self._wire.send(sent)

    async def head(self) -> None:
        """Wait for status and headers."""
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise ExchangeError("the endpoint closed the connection")
        self.status = event.status_code
        self.headers = CIMultiDict(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers
        )

    async def iter_any(self) -> AsyncIterator[bytes]:
        """The body as it comes, without the marks of its chunks."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def _next(self) -> object:
        """The next event of the answer."""
        ended = False
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                piece = await self._wire.receive()
                ended = not piece
                self._http.receive_data(piece)
        except h11.RemoteProtocolError:
            if not ended:
                raise ExchangeError(
                    "the endpoint answers with something that is not HTTP"
                ) from None
            if not self.status:
                raise ExchangeError("the endpoint closed the connection") from None
            raise ExchangeError("the answer ended before it was complete") from None
        return event


class _Wire:
    """One connection; under https its TLS runs in memory, since asyncio's cannot be half closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._finished = False
        writer.transport.set_write_buffer_limits(high=0)  # what is drained is with the system

    @classmethod
    async def opened(cls, url: str, context: ssl.SSLContext | None) -> "_Wire":
        """A connection to the host of ``url``."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            wire = cls(*await asyncio.open_connection(parts.hostname, port))
        except OSError:
            raise UnreachedError("no connection to the endpoint: refused or no such host") from None
        if parts.scheme == "https":
            try:
                await wire._shake(context or ssl.create_default_context(), parts.hostname or "")
            except ssl.SSLError:
                wire.close()
                raise UnreachedError("the endpoint's TLS certificate is not accepted") from None
            except BaseException:
                wire.close()
                raise
        return wire

    async def send(self, data: bytes) -> None:
        """All of it."""
        if self._tls is not None:
            self._tls.write(data)
            data = self._out.read()
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Some bytes; none at the end."""
        if self._tls is None:
            return await self._reader.read(_PIECE)
        while True:
            try:
                return self._tls.read(_PIECE)
            except ssl.SSLWantReadError:
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    async def finish(self) -> None:
        """Close the sending half."""
        if self._tls is not None:
            # It asks for the other side's answer, which comes after all that it still sends.
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.unwrap()
            self._writer.write(self._out.read())
        self._writer.write_eof()
        self._finished = True
        await self._writer.drain()

    def close(self) -> None:
        """At once, both halves."""
        self._writer.transport.abort()

    async def _shake(self, context: ssl.SSLContext, host: str) -> None:
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=host)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._fill()
            else:
                self._writer.write(self._out.read())
                return

    async def _fill(self) -> None:
        """Hand over what TLS wants to send, and bring what it wants to read."""
        wanted = self._out.read()
        if wanted and not self._finished:
            self._writer.write(wanted)
            await self._writer.drain()
        piece = await self._reader.read(_PIECE)
        if piece:
            self._in.write(piece)
        else:
            self._in.write_eof()
