"""Sends the answer of one generation, whole or as server-sent events, while watching the client.

Nothing is sent before the backend's first event, so that a refusal or an early failure still
gets its HTTP status. After that a failure is an event ``data: {"error": …}`` and the end of the
stream: no ``[DONE]`` and no made-up finish reason.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sekisho.engine.output import Ended
from sekisho.gateway.access import Record, record_of
from sekisho.gateway.answers import Format, Json, Usage, Whole
from sekisho.gateway.errors import ApiError, internal_error, where_raised
from sekisho.gateway.generation import Event, Generation
from sekisho.gateway.prompts import Call

KEEP_ALIVE_SECONDS = 15.0

T = TypeVar("T")


class GenerationResponse:
    """An ASGI response that runs ``generation``. ``usage_chunk`` asks for a last chunk with usage.

    Raises:
        ApiError: it failed before anything was sent.
        ClientDisconnect: the client left; the generation is aborted.
    """

    def __init__(
        self,
        generation: Generation,
        calls: Sequence[Call],
        answer_format: Format,
        stream: bool,
        usage_chunk: bool,
    ) -> None:
        self._generation = generation
        self._calls = calls
        self._format = answer_format
        self._stream = stream
        self._usage_chunk = usage_chunk
        self._opened: set[int] = set()
        self._left = len(calls)
        prompts = {call.prompt: len(call.tokens) for call in calls}
        self._usage = Usage(prompt_tokens=sum(prompts.values()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        record.prompt_tokens = self._usage.prompt_tokens
        try:
            async with self._generation:
                first = await self._generation.next()
                if self._stream:
                    await self._send_events(first, record, send)
                else:
                    body = msgspec.json.encode(await self._collect(first))
                    record.code = "ok"
                    await Response(body, media_type="application/json")(scope, receive, send)
        finally:
            record.completion_tokens = self._usage.completion_tokens

    async def _collect(self, event: Event) -> Json:
        wholes = [Whole() for _ in self._calls]
        while True:
            choice, part = event
            if isinstance(part, Ended):
                wholes[choice].finish_reason = part.code
                if self._count(choice, part) == 0:
                    return self._format.answer(wholes, self._usage)
            else:
                wholes[choice].texts.append(part.text)
                wholes[choice].infos.extend(part.infos)
            event = await self._generation.next()

    async def _send_events(self, first: Event, record: Record, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._send_chunks(first, send)
            record.code = "ok"
        except ApiError as error:
            await self._send_failure(error, record, send)
        except Exception as error:
            await self._send_failure(internal_error(where_raised(error)), record, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_failure(self, error: ApiError, record: Record, send: Send) -> None:
        record.failed(error)
        await _send_data(send, msgspec.json.encode(error.body(record.request_id)))

    async def _send_chunks(self, event: Event, send: Send) -> None:
        while True:
            choices, left = self._chunk_choices(event), self._left
            for choice in choices:
                chunk = self._format.chunk([choice])
                if self._usage_chunk:
                    chunk["usage"] = None
                await _send_data(send, msgspec.json.encode(chunk))
            if left == 0:
                break
            event = await self._next_or_keep_alive(send)
        if self._usage_chunk:
            chunk = {**self._format.chunk([]), "usage": self._usage.json()}
            await _send_data(send, msgspec.json.encode(chunk))
        await _send_data(send, b"[DONE]")

    def _chunk_choices(self, event: Event) -> list[Json]:
        choice, part = event
        opening = [] if choice in self._opened else self._format.opening(choice)
        self._opened.add(choice)
        if isinstance(part, Ended):
            self._count(choice, part)
            return [*opening, self._format.closing(choice, part.code)]
        if not part.text and not part.infos:  # bytes of a character that is not complete yet
            return opening
        return [*opening, self._format.piece(choice, part.text, part.infos)]

    async def _next_or_keep_alive(self, send: Send) -> Event:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    return await self._generation.next()
            except TimeoutError:
                await _send(send, b": keep-alive\n\n")

    def _count(self, choice: int, ended: Ended) -> int:
        """Add the end of ``choice`` to the usage; return how many choices still run."""
        self._usage.completion_tokens += ended.output_tokens
        if self._calls[choice].sample == 0:  # its siblings may hit what it left in the cache
            self._usage.cached_tokens += ended.cached_tokens
        self._left -= 1
        return self._left


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``, which is cancelled, to its end, once the client has disconnected.

    Raises:
        ClientDisconnect: the client left first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            gone.result()
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_data(send: Send, data: bytes) -> None:
    await _send(send, b"data: " + data + b"\n\n")


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
