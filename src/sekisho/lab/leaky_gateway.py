"""Defects of what stands before an engine: channels, collectors, ids, caches of answers.

`DirtyChannels` and `SharedCollector` are a `Backend` around a safe one; the gateway above checks
that an answer is of one request, which these two have mixed up before it looks. `Replaying` is
ASGI around the whole gateway.
"""

import asyncio
import itertools
import json
import math
import re
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.gateway.backend import Backend, Capacity

Event = Delta | Ended
_IDS = "request_id", "rid"
_ALIKE_MIN = 0.8  # the threshold of semantic-router#2134


class _Around:
    """A backend that passes everything on; ``generate`` is for its children to replace."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._numbers = itertools.count(1)
        self._pumps: set[asyncio.Task[None]] = set()

    def tokens_max(self) -> int:
        """See `Backend`."""
        return self._backend.tokens_max()

    def ready(self) -> bool:
        """See `Backend`."""
        return self._backend.ready()

    def refusal(self) -> str:
        """See `Backend`."""
        return self._backend.refusal()

    def capacity(self) -> Capacity:
        """See `Backend`."""
        return self._backend.capacity()

    def _keep(self, pump: asyncio.Task[None]) -> None:
        """A pump outlives its client: that is the defect."""
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)


async def _told(
    request: int, channel: asyncio.Queue[Event], tokens_max: int
) -> AsyncGenerator[Event, None]:
    """Whatever is in ``channel``, up to an end, as if it answered ``request``."""
    count = 0
    while True:
        event = await channel.get()
        if isinstance(event, Ended):
            yield Ended(request, event.code, event.message, count, event.cached_tokens)
            return
        if count + len(event.tokens) > tokens_max:
            yield Ended(request, "length", "", count, 0)
            return
        yield Delta(request, count, event.tokens, event.text, event.infos)
        count += len(event.tokens)


@dataclass(eq=False)
class _Channel:
    """Answers come in the order of their requests; ``last`` is the pump of the newest."""

    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    last: asyncio.Task[None] | None = None


class DirtyChannels(_Around):
    """Defect ``dirty-channel``: a channel goes back to the pool when its client leaves, and the
    engine, which was told nothing, still answers into it."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._free: deque[_Channel] = deque()

    async def generate(
        self, scope: str, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[Event, None]:
        """See `Backend`."""
        channel = self._free.popleft() if self._free else _Channel()
        channel.last = asyncio.create_task(self._fill(channel, channel.last, scope, tokens, params))
        self._keep(channel.last)
        events = _told(next(self._numbers), channel.events, params.max_tokens)
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._free.append(channel)

    async def _fill(
        self,
        channel: _Channel,
        before: asyncio.Task[None] | None,
        scope: str,
        tokens: list[int],
        params: SamplingParams,
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        async for event in self._backend.generate(scope, tokens, params):
            channel.events.put_nowait(event)


@dataclass(eq=False)
class _Call:
    channel: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)


class SharedCollector(_Around):
    """Defect ``shared-collector``: who calls while another waits for its first event takes that
    one's collector, and leaves it his own."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._waiting: _Call | None = None

    async def generate(
        self, scope: str, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[Event, None]:
        """See `Backend`."""
        call = _Call()
        own = call.channel
        if self._waiting is None:
            self._waiting = call
        else:
            call.channel, self._waiting.channel = self._waiting.channel, call.channel
            self._waiting = None
        self._keep(asyncio.create_task(self._fill(call, scope, tokens, params)))
        async with aclosing(_told(next(self._numbers), own, params.max_tokens)) as events:
            async for event in events:
                yield event

    async def _fill(
        self, call: _Call, scope: str, tokens: list[int], params: SamplingParams
    ) -> None:
        async for event in self._backend.generate(scope, tokens, params):
            if self._waiting is call:
                self._waiting = None
            call.channel.put_nowait(event)


@dataclass(eq=False)
class _Recording:
    """An answer, once it is whole. ``words`` are those of the question; ``stream``: its form."""

    name: str
    words: Counter[str]
    stream: bool
    messages: list[Message] = field(default_factory=list)
    whole: asyncio.Event = field(default_factory=asyncio.Event)
    good: bool = False


class Replaying:
    """Defects ``client-id`` and, with ``by_question``, ``similar-question``: what was answered
    before is answered again, to whoever asks; keys of tenants are not looked at."""

    def __init__(self, app: ASGIApp, *, by_question: bool) -> None:
        self._app = app
        self._by_question = by_question
        self._recordings: list[_Recording] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, asked = self._read(scope, await _body(receive))
        before = self._before(asked)
        if before is not None:
            await before.whole.wait()
            if before.good:
                for message in before.messages:
                    await send(message)
                return
        await self._record(asked, scope, _first(body, receive), send)

    async def _record(self, asked: _Recording, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_recorded(message: Message) -> None:
            asked.messages.append(message)
            await send(message)

        if asked.name or asked.words:
            self._recordings.append(asked)
        try:
            await self._app(scope, receive, send_recorded)
            asked.good = asked.messages[0].get("status") == 200
        finally:
            if not asked.good and asked in self._recordings:
                self._recordings.remove(asked)
            asked.whole.set()

    def _read(self, scope: Scope, body: bytes) -> tuple[bytes, _Recording]:
        """The body as the gateway may see it, which knows no ids, and what it is kept by."""
        try:
            fields = json.loads(body)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            return body, _Recording("", Counter(), False)
        stream = bool(fields.get("stream"))
        if self._by_question:
            return body, _Recording("", _words(fields), stream)
        heads = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        given = [heads.get("x-request-id"), *(fields.pop(name, None) for name in _IDS)]
        name = next((str(each) for each in given if each), "")
        return json.dumps(fields).encode(), _Recording(name, Counter(), stream)

    def _before(self, asked: _Recording) -> _Recording | None:
        for one in self._recordings:
            same = bool(asked.name) and one.name == asked.name
            if one.stream == asked.stream and (same or _alike(one.words, asked.words)):
                return one
        return None


def _words(fields: dict[str, object]) -> Counter[str]:
    """Of the last message, or of the prompt: how often each occurs."""
    messages = fields.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else fields
    text = last.get("content", last.get("prompt")) if isinstance(last, dict) else ""
    return Counter(re.findall(r"\w+", str(text).lower()))


def _alike(one: Counter[str], other: Counter[str]) -> bool:
    """By the cosine of their words; an embedding is finer and errs the same way."""
    lengths = [math.sqrt(sum(n * n for n in each.values())) for each in (one, other)]
    product = sum(count * other[word] for word, count in one.items())
    return bool(product) and product >= _ALIKE_MIN * lengths[0] * lengths[1]


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body", False):
            return body


def _first(body: bytes, receive: Receive) -> Receive:
    """``receive`` once more from the beginning."""
    left = [body]

    async def again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again
