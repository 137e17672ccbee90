"""What one side of a request can say, in our words: new tokens, or a failure."""

import re
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec

from sekisho.engine.params import TokenInfo
from sekisho.gateway.engines.events import EventsError
from sekisho.gateway.engines.replica import Replica

_NUMBER = re.compile(r"(?<![\w.])\d{1,15}(?![\w.]*\w)")
_STATUS = {429: "queue_full", 502: "transfer_failed", 503: "node_lost", 504: "transfer_failed"}
_REFUSAL_MAX = 64 * 1024  # bytes of an HTTP error that are read


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""What a tokenizer can be asked about."""


class FailureError(Exception):
    """A side did not end cleanly. ``code`` is one of `CODES`; the message may reach a client if the
    code is a rejection, and the log always: it holds numbers, and nothing that an engine said."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Step:
    """New tokens of an answer; ``infos`` one a token if asked for. ``finish``: stop, length or
    nothing yet. ``cached``: prompt tokens that this side had."""

    tokens: list[int]
    infos: list[TokenInfo]
    finish: str
    cached: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Answer(msgspec.Struct):
    """An HTTP error: an engine's own, FastAPI's, or a text of anybody."""

    error: _Error | str | None = None
    message: str | None = None
    detail: msgspec.Raw | None = None


def text_of(body: bytes) -> str:
    """What an HTTP error says, for `refused`; empty where it is none that we know."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if isinstance(answer.error, _Error):
        return answer.error.message
    if answer.error is not None:
        return answer.error
    if answer.message is not None:
        return answer.message
    return (
        "" if answer.detail is None else bytes(answer.detail).decode("utf-8", "replace").strip('"')
    )


async def refusal_of(response: aiohttp.ClientResponse) -> str:
    """The text of an HTTP error, bounded."""
    return text_of(await response.content.read(_REFUSAL_MAX))


def refused(side: str, status: int, text: str, prompt: int, answer: int) -> FailureError:
    """The outcome behind an HTTP status, or one inside an event, for a request of ``prompt`` tokens
    and at most ``answer`` more."""
    if status in (400, 413) and (limit := _limit(text, prompt, answer)) is not None:
        more = f" and the answer up to {answer}" if answer > 1 else ""
        told = f"the prompt has {prompt} tokens{more}, the servers hold {limit}"
        return FailureError("context_length_exceeded", told)
    if status == 503 and "queue" in text and "full" in text:
        return FailureError("queue_full", "too many requests are waiting; try again later")
    return FailureError(_STATUS.get(status, "internal_error"), f"{side} answers status {status}")


def broken(error: Exception, replica: Replica) -> FailureError:
    """The outcome behind what reading an answer raised; the server is doubted if it may be gone."""
    if isinstance(error, FailureError):
        return error
    if isinstance(error, EventsError):
        return FailureError("internal_error", f"{replica.name}: {error}")
    if not isinstance(error, aiohttp.ClientError | OSError):
        return FailureError("internal_error", f"{replica.name}: {type(error).__name__}")
    why = f"connection failed ({type(error).__name__})"
    replica.doubt(f"a {why}")
    return FailureError("node_lost", f"{replica.name}: the {why}")


def _limit(text: str, prompt: int, answer: int) -> int | None:
    """The limit in a refusal for length: the largest number beside those of our request that
    our request does not fit into. None if the text is about something else.

    Engines name our numbers once or twice; the limit may happen to be one of them.
    """
    numbers = [int(number) for number in _NUMBER.findall(text)]
    ours = (prompt + answer, prompt, answer)
    if not {prompt, prompt + answer} & set(numbers):
        return None
    others = [number for number in numbers if number not in ours]
    for own in ours:
        if own in numbers:
            numbers.remove(own)
    possible = [[n for n in found if 0 < n <= prompt + answer] for found in (others, numbers)]
    return max(possible[0] or possible[1], default=None)
