"""Reading an HTTP answer that may be anything: bounded, never decompressed, kept if it breaks."""

import email.utils
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from sekisho.probe.exchange import (
    Body,
    Event,
    Events,
    ExchangeError,
    Whole,
    decode,
    error_message,
    is_refusal,
    status_means,
)

BODY_MAX = 8 * 1024 * 1024
"""Bytes of one answer: a stream of 4,096 tokens with usage in every event has 2 MB."""
FAULTS = (
    aiohttp.ClientError,
    HttpProcessingError,
    OSError,
    EOFError,
    TimeoutError,
    ValueError,
    RecursionError,
)
"""What a hostile answer can raise below us."""


class Seen:
    """What has come of one exchange so far.

    Attributes:
        busy: it may be tried again, after ``wait_s`` where the endpoint named a time.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.status = 0
        self.body = bytearray()
        self.events: list[Event] = []
        self.busy = False
        self.wait_s: float | None = None

    def seconds(self) -> float:
        """Since the request was sent."""
        return time.perf_counter() - self.start

    def text(self) -> str:
        """Of the stream so far."""
        return "".join(event.text for event in self.events)


class Pieces(Protocol):
    """A body that comes."""

    def iter_any(self) -> AsyncIterator[bytes]:
        """Each piece as it comes."""


class Received(Protocol):
    """An HTTP answer whose head has come: aiohttp's or `cut`'s."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def content(self) -> Pieces: ...


async def pieces(response: Received, seen: Seen) -> AsyncIterator[bytes]:
    """The body as it comes; all of it is kept in ``seen.body``.

    Raises:
        ExchangeError: it is compressed, or too long.
    """
    seen.status = response.status
    if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise ExchangeError("the endpoint answers compressed, though asked not to")
    async for piece in response.content.iter_any():
        if len(seen.body) + len(piece) > BODY_MAX:
            raise ExchangeError(f"the endpoint answers with more than {BODY_MAX >> 20} MiB")
        seen.body += piece
        yield piece


async def read(response: Received, seen: Seen, stream: bool) -> Whole | str:
    """A whole answer, or the message of a refusal.

    Raises:
        ExchangeError: neither.
    """
    if response.status == 200 and stream:
        return await _read_stream(response, seen)
    async for _ in pieces(response, seen):
        pass
    raw = bytes(seen.body)
    if is_refusal(response.status, raw):
        return error_message(raw) or ""
    if response.status != 200:
        named = response.headers.get("Retry-After")
        seen.busy = response.status == 429 or (response.status == 503 and named is not None)
        seen.wait_s = _retry_after(named) if named else None
        raise ExchangeError(status_means(response.status))
    body = decode(raw)
    if body.error is not None:
        raise ExchangeError("the endpoint answers 200 with an error")
    if not body.choices:
        raise ExchangeError("the endpoint answers 200 without a choice")
    return Whole(
        text=body.text(),
        aside=body.aside(),
        finish_reason=body.finish_reason(),
        prompt_tokens=body.usage.prompt_tokens if body.usage else None,
        completion_tokens=body.usage.completion_tokens if body.usage else None,
        answer_name=body.id or "",
        created=body.made_at(),
    )


async def _read_stream(response: Received, seen: Seen) -> Whole:
    events = Events()
    bodies: list[Body] = []
    async for piece in pieces(response, seen):
        at_s = seen.seconds()
        for data in events.feed(piece):
            body = decode(data)
            bodies.append(body)
            seen.events.append(
                Event(at_s=at_s, text=body.text() + body.aside(), answer_name=body.id or "")
            )
            if body.error is not None:
                raise ExchangeError("the stream ends in an error")
        if events.done:
            break
    if seen.body.lstrip().startswith((b"<", b"{")):
        raise ExchangeError("the endpoint answers HTML or JSON where a stream was asked for")
    reasons = [reason for body in bodies if (reason := body.finish_reason())]
    if events.rest() or not (events.done or reasons):
        raise ExchangeError("the stream was cut off")
    if not any(body.choices for body in bodies):
        raise ExchangeError("the stream ends without a choice")
    usages = [body.usage for body in bodies if body.usage]
    return Whole(
        text="".join(body.text() for body in bodies),
        aside="".join(body.aside() for body in bodies),
        finish_reason=reasons[-1] if reasons else "",
        prompt_tokens=usages[-1].prompt_tokens if usages else None,
        completion_tokens=usages[-1].completion_tokens if usages else None,
        events=tuple(seen.events),
        answer_name=next((body.id for body in bodies if body.id), ""),
        created=next((at for body in bodies if (at := body.made_at()) is not None), None),
    )


def sentence(error: BaseException, timeout_s: float) -> str:
    """One sentence for one of `FAULTS`; its text is not repeated, since it may hold anything."""
    if isinstance(error, TimeoutError):
        return f"the endpoint did not finish within {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer ended before it was complete"
    if isinstance(error, (ssl.SSLError, aiohttp.ClientSSLError)):
        return "the endpoint's TLS certificate is not accepted"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "no connection to the endpoint: refused or no such host"
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, OSError)):
        return "the endpoint closed the connection"
    return "the endpoint answers with something that is not HTTP"


def _retry_after(value: str) -> float | None:
    """Seconds, from either form of RFC 9110 10.2.3; None where it is neither."""
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        when = email.utils.parsedate_to_datetime(value)
        return max(0.0, when.timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return None
