"""One question to an endpoint and what came of it, read with suspicion.

Whatever comes is one of three: an answer, a refusal of the request as such, or inconclusive. All
three keep what was received, because a leak in a broken answer or an error text is a leak too.
"""

from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import msgspec

_TRIED = 400, 413, 422
"""Statuses by which servers refuse a request for what it asks. Other codes of 400 to 499 are about
keys, paths and rates."""
_STATUS_MEANS = {
    401: "it does not accept the key",
    403: "it does not accept the key",
    404: "it has no such path or model",
    408: "it gave up waiting",
    429: "it has had too many requests",
}

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request.

    Attributes:
        answer_tokens: the most tokens of the answer.
        chat: by ``/chat/completions``, one user message; else by ``/completions``.
        fields, headers: more of the body and of the head; they win over ours. Where ``fields``
            holds messages, ``prompt`` is their text, for estimates and reports.
        more_tokens: of what has no text, as images.
    """

    prompt: str
    answer_tokens: int
    chat: bool = True
    stream: bool = False
    fields: dict[str, Any] = {}
    headers: dict[str, str] = {}
    more_tokens: int = 0

    def body(self, model: str) -> dict[str, Any]:
        """The JSON object to send; greedy."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self.fields


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: when it came, in seconds since the request was sent, its text, and
    the id of the answer that it says it belongs to."""

    at_s: float
    text: str
    answer_name: str


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What all three have in common.

    Attributes:
        serial: counts the requests of an endpoint object.
        status: of HTTP; 0 where none came.
        raw: what came, decoded as well as it can be, without the key.
    """

    serial: int
    account: str
    ask: Ask
    seconds: float
    status: int
    raw: str

    def texts(self) -> tuple[str, ...]:
        """Everything that was received, to be searched."""
        return (self.raw,)


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole answer says.

    Attributes:
        text: of the first choice.
        aside: its reasoning and the arguments of its tool calls.
        finish_reason: empty where the endpoint states none.
        prompt_tokens, completion_tokens: as the endpoint counted them.
        events: of a stream; empty otherwise.
        answer_name: what the endpoint calls this answer (OpenAI's ``id``); empty where it does not.
        created: when it says that it was made, in seconds of Unix time.
    """

    text: str
    aside: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    events: tuple[Event, ...] = ()
    answer_name: str = ""
    created: int | None = None


class Answer(Exchange, frozen=True, kw_only=True, tag=True):
    """200, and whole."""

    whole: Whole

    def texts(self) -> tuple[str, ...]:
        return (self.whole.text, self.whole.aside, self.raw)


class Refused(Exchange, frozen=True, kw_only=True, tag=True):
    """400, 413 or 422 with an error object; ``message`` is the endpoint's."""

    message: str


class Inconclusive(Exchange, frozen=True, kw_only=True, tag=True):
    """Neither. ``reason`` is one sentence, without anything of what was received.

    Attributes:
        text: what a stream gave before it broke.
        sent: it reached the endpoint; not so where the budget or the network refused.
    """

    reason: str
    text: str = ""
    sent: bool = True

    def texts(self) -> tuple[str, ...]:
        return (self.text, self.raw)


Outcome: TypeAlias = Answer | Refused | Inconclusive


class ExchangeError(Exception):
    """What came cannot be used; one sentence, nothing of it.

    └── UnreachedError: nothing was sent.
    """


class UnreachedError(ExchangeError):
    """There is no connection to the endpoint."""


class _Function(msgspec.Struct):
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Body(msgspec.Struct):
    """An answer or one event of a stream. ``error`` stands instead of choices where it failed."""

    id: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    created: Any = None

    def text(self) -> str:
        """Of the first choice; empty where there is none."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        message = choice.message or choice.delta
        return (choice.text or "") + ((message.content or "") if message else "")

    def aside(self) -> str:
        """Reasoning and tool arguments of the first choice."""
        message = (self.choices[0].message or self.choices[0].delta) if self.choices else None
        if message is None:
            return ""
        calls = [call.function for call in message.tool_calls or [] if call.function]
        parts = [message.reasoning_content or "", message.reasoning or ""]
        return "".join(parts + [call.arguments or "" for call in calls])

    def finish_reason(self) -> str:
        """Of the first choice, if it is stated here."""
        return (self.choices[0].finish_reason or "") if self.choices else ""

    def made_at(self) -> int | None:
        """``created``, if it is a time."""
        is_time = isinstance(self.created, int) and not isinstance(self.created, bool)
        return self.created if is_time else None


def decode(raw: bytes) -> Body:
    """A body or the data of an event.

    Raises:
        ExchangeError: no JSON object of that shape.
    """
    if raw.lstrip()[:1] == b"<":
        raise ExchangeError("the endpoint answers with HTML or XML, not JSON")
    try:
        return msgspec.json.decode(raw, type=Body)
    except msgspec.ValidationError:
        raise ExchangeError("the endpoint answers JSON of another shape") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ExchangeError("the endpoint answers with something that is not JSON") from None


def error_message(raw: bytes) -> str | None:
    """The message of an error object, as OpenAI, vLLM, SGLang or FastAPI write it, if it is one."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for name in ("error", "detail", "message"):
        if isinstance(value, dict) and name in value:
            found = value[name]
            if isinstance(found, dict):
                found = found.get("message", "")
            return found if isinstance(found, str) else str(found)
    return None


def is_refusal(status: int, raw: bytes) -> bool:
    """Did the endpoint refuse the request for what it asks?"""
    return status in _TRIED and error_message(raw) is not None


def status_means(status: int) -> str:
    """One sentence for a status that is neither an answer nor a refusal."""
    meaning = _STATUS_MEANS.get(status)
    if meaning is None:
        meaning = "it failed" if status >= 500 else "that is no answer and no refusal"
    return f"the endpoint answers {status}: {meaning}"


class Events:
    """Server-sent events out of pieces of a body, cut anywhere; lines end as they like."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.done = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that is now complete, up to ``[DONE]``.

        Raises:
            ExchangeError: it holds something that is no event.
        """
        self._buffer += piece
        while (end := self._buffer.find(b"\n")) >= 0 and not self.done:
            line = bytes(self._buffer[:end]).rstrip(b"\r")
            del self._buffer[: end + 1]
            # Each line of data is an event of its own: all endpoints write their JSON on one.
            if line.startswith(b"data:"):
                data = line[5:].strip()
                self.done = data == b"[DONE]"
                if data and not self.done:
                    yield data
            elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise ExchangeError("the endpoint answers with something that is no stream")

    def rest(self) -> bool:
        """Is part of a line left over?"""
        return bool(self._buffer.strip()) and not self.done
