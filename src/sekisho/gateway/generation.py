"""The backend requests of one HTTP request, run together and checked event by event.

An answer that is not provably its own ends in an error: a delta must carry the request number
that its stream began with, a number that no other live stream has, and must continue exactly
where the last one ended. (Crossed streams have served one user's text to another: OpenAI on
2023-03-20, langchain-oracle#256.)
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from sekisho.core.outcome import CODES, Kind, Outcome
from sekisho.engine.output import Delta, Ended
from sekisho.gateway.backend import Backend
from sekisho.gateway.errors import ApiError, from_outcome, internal_error, where_raised
from sekisho.gateway.prompts import Call

Event = tuple[int, Delta | Ended]

_AHEAD_MAX = 16  # events a choice's pump may be ahead of a slow client


class StreamCheck:
    """Holds one stream to its word: every event goes through `accept` before it is shown.

    ``live`` holds the request numbers of all running streams of the gateway.
    """

    def __init__(self, call: Call, live: set[int]) -> None:
        self._logprobs = call.params.logprobs is not None
        self._max_tokens = call.params.max_tokens
        self._live = live
        self._request: int | None = None
        self._received = 0

    def accept(self, event: Delta | Ended) -> None:
        """Raises ApiError unless ``event`` is the next one of this very stream."""
        if self._request is None:
            if event.request in self._live:
                raise self._crossed(f"a stream began as request {event.request}, which is live")
            self._request = event.request
            self._live.add(event.request)
        elif event.request != self._request:
            raise self._crossed(f"an event of request {event.request}")
        if isinstance(event, Delta):
            self._accept_delta(event)
        else:
            self._accept_end(event)

    def close(self) -> None:
        if self._request is not None:
            self._live.discard(self._request)

    def _accept_delta(self, delta: Delta) -> None:
        if delta.index != self._received:
            raise self._crossed(f"a delta at index {delta.index} after {self._received} tokens")
        if self._logprobs and len(delta.infos) != len(delta.tokens):
            raise self._crossed(f"{len(delta.infos)} logprobs for {len(delta.tokens)} tokens")
        self._received += len(delta.tokens)
        if self._received > self._max_tokens:
            raise self._crossed(f"{self._received} tokens of at most {self._max_tokens}")

    def _accept_end(self, ended: Ended) -> None:
        if ended.code not in CODES:
            raise self._crossed("an unknown outcome")
        outcome = Outcome(ended.code, ended.message)
        if outcome.kind is not Kind.FINISHED:
            raise from_outcome(outcome)
        # An end-of-sequence token is counted and not shown; nothing else may be missing.
        unshown = ended.output_tokens - self._received
        if unshown not in ((0, 1) if ended.code == "stop" else (0,)):
            raise self._crossed(f"{self._received} tokens came of {ended.output_tokens}")

    def _crossed(self, found: str) -> ApiError:
        return internal_error(f"crossed stream: request={self._request} found {found}")


class Generation:
    """Runs ``calls`` under ``scope`` while it is entered; leaving it aborts what still runs.

    ``live`` holds the request numbers of every running stream of the gateway.
    """

    def __init__(self, backend: Backend, scope: str, calls: Sequence[Call], live: set[int]) -> None:
        self._backend = backend
        self._scope = scope
        self._calls = calls
        self._live = live
        self._events: asyncio.Queue[Event | ApiError] = asyncio.Queue(_AHEAD_MAX * len(calls))
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._pumps = [
            asyncio.create_task(self._pump(choice, call)) for choice, call in enumerate(self._calls)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def next(self) -> Event:
        """The next event of any choice, in order within each; an `Ended` is always a finish.

        Raises:
            ApiError: one choice failed, and with it the whole HTTP request.
        """
        event = await self._events.get()
        if isinstance(event, ApiError):
            raise event
        return event

    async def _pump(self, choice: int, call: Call) -> None:
        checker = StreamCheck(call, self._live)
        stream = self._backend.generate(self._scope, call.tokens, call.params)
        try:
            async for event in stream:
                checker.accept(event)
                await self._events.put((choice, event))
                if isinstance(event, Ended):
                    return
            raise internal_error("the backend's stream ended without an outcome")
        except ApiError as error:
            await self._events.put(error)
        except Exception as error:
            await self._events.put(internal_error(where_raised(error)))
        finally:
            checker.close()
            await stream.aclose()
