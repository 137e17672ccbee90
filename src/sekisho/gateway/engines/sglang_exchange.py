"""One request at a prefill/decode pair: both are asked at once, and either can end it.

    prefill   POST /generate ──────── whole prompt computed and moved ── its one event, [DONE]
    decode    POST /generate ── reserves, waits, commits ── tokens ───── tokens ── finish, [DONE]
    released                                             |── from here on

Text is released once prefill too has ended cleanly and has named the length of our prompt, so that
a prompt that prefill refused or replaced is never answered, whatever decode makes of it.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from msgspec.structs import replace

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gateway.engines.answer import Answer
from sekisho.gateway.engines.events import EventsError, events
from sekisho.gateway.engines.replica import Replica
from sekisho.gateway.engines.sglang_events import Reader
from sekisho.gateway.engines.side import FailureError, Step, broken, refusal_of

PREFILL_LATE_S = 30.0
"""How long prefill may stay silent after decode's first token: it answers between two passes."""
_AHEAD_MAX = 64  # decode's events that may wait for a slow client


@dataclass(frozen=True, slots=True)
class _Clean:
    """A side has ended as it should. ``cached``: prompt tokens that it had."""

    role: str
    cached: int


class Exchange:
    """Runs one request; `events` may be used once. At the end `close` must be called, and before it
    the servers that `busy` names be asked to abort.

    ``body`` is the same for both sides; the address of prefill's bootstrap server and the number of
    the hand-off are added here, and minted here.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prefill: Replica,
        decode: Replica,
        body: dict[str, Any],
        tokenizer: Tokenizer,
        params: SamplingParams,
    ) -> None:
        self._session = session
        self._sides = (prefill, decode)
        self._body = {
            **body,
            "bootstrap_host": urlsplit(prefill.url).hostname,
            "bootstrap_port": prefill.port,
            "bootstrap_room": secrets.randbits(63) or 1,  # 0 is SGLang's own, for health checks
        }
        self._tokenizer = tokenizer
        self._params = params
        self._told: asyncio.Queue[Step | _Clean | FailureError] = asyncio.Queue()
        self._ahead = asyncio.Semaphore(_AHEAD_MAX)
        self._cached = 0
        self._running: dict[str, asyncio.Task[None]] = {}
        self._watches = [replica.watch(self._end) for replica in self._sides]

    async def events(self, request: int) -> AsyncGenerator[Delta | Ended, None]:
        """Deltas and one `Ended`."""
        for replica in self._sides:
            self._running[replica.role] = asyncio.create_task(self._ask(replica))
        answer = Answer(request, self._params, self._tokenizer)
        try:
            async with aclosing(self._steps()) as steps:
                async for step in steps:
                    yield answer.take(step.tokens, step.infos)
                    if answer.cut and not step.finish:
                        break
                    if step.finish and not answer.end:
                        yield answer.close(step.finish)
        except FailureError as failure:
            yield Ended(request, failure.code, failure.message, answer.count, self._cached)
            return
        yield Ended(request, answer.end, "", answer.count, self._cached)

    def busy(self) -> list[Replica]:
        """The servers that may still work on it."""
        return [r for r in self._sides if (t := self._running.get(r.role)) and not t.done()]

    def close(self) -> None:
        """End both connections."""
        for unwatch in self._watches:
            unwatch()
        for task in self._running.values():
            task.cancel()

    async def _steps(self) -> AsyncGenerator[Step, None]:
        """Decode's steps, from when prefill has ended cleanly; returns when both have."""
        clock = asyncio.get_running_loop().time
        held: list[Step] = []
        ended: set[str] = set()
        late_at: float | None = None
        while len(ended) < 2:
            told = await self._next(None if "prefill" in ended else late_at)
            if isinstance(told, FailureError):
                raise told
            if isinstance(told, _Clean):
                ended.add(told.role)
                self._cached = max(self._cached, told.cached)
            else:
                held.append(told)
            late_at = late_at or clock() + PREFILL_LATE_S if held else None
            if "prefill" in ended:
                for step in held:
                    self._ahead.release()
                    yield step
                held.clear()

    async def _next(self, deadline: float | None) -> Step | _Clean | FailureError:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._told.get()
        except TimeoutError:
            return FailureError("transfer_failed", f"{self._sides[0].name} says nothing")

    async def _ask(self, replica: Replica) -> None:
        """One side, to its end, which is told whatever it is."""
        try:
            cached = await self._answer(replica)
            self._told.put_nowait(_Clean(replica.role, cached))
        except Exception as error:  # a request that waits for its end gets one
            self._told.put_nowait(broken(error, replica))

    async def _answer(self, replica: Replica) -> int:
        """Read one side up to its clean end; returns the prompt tokens it had in its cache."""
        is_decode = replica.role == "decode"
        params = self._params if is_decode else replace(self._params, logprobs=None)
        reader = Reader(replica.name, len(self._body["input_ids"]), params, self._tokenizer)
        cached = 0
        async with self._session.post(f"{replica.url}/generate", json=self._body) as response:
            if response.status != 200:
                raise reader.refused(response.status, await refusal_of(response))
            finished = False
            async for data in events(response.content.iter_any()):
                if finished:
                    raise EventsError("an event after the finish")
                step = reader.read(data)
                finished, cached = bool(step.finish), step.cached
                if is_decode:  # prefill's event holds the first token, which decode gives out
                    await self._ahead.acquire()
                    self._told.put_nowait(step)
            if not finished:
                raise EventsError("the answer ended without a finish_reason")
        return cached

    def _end(self, code: str, why: str) -> None:
        self._told.put_nowait(FailureError(code, why))
