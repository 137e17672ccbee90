"""Running servers of a foreign engine as a `Backend`: which are fit, and which takes a request."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Protocol

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.gateway.backend import Capacity, NodeCapacity
from sekisho.gateway.engines.judging import refusal
from sekisho.gateway.engines.replica import EngineError, Examined, Replica, Role, UnfitError
from sekisho.gateway.engines.scope import ScopeKeys

log = logging.getLogger("sekisho.engines")

POLL_S = 3.0
"""Between two examinations of a server: less than any engine needs to start again, so that a
restart is always seen."""
_STOP_S = 6.0
_ROLES: tuple[Role, Role] = ("prefill", "decode")


class Engine(Protocol):
    """What differs by engine."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def check(self, params: SamplingParams) -> None:
        """Raises ApiError, 400 with the field, for what the engine cannot do."""
        ...

    async def examine(self, replica: Replica) -> Examined:
        """Raises UnfitError."""
        ...

    def generate(
        self,
        request: int,
        pair: tuple[Replica, Replica],
        scope_key: str,
        tokens: list[int],
        params: SamplingParams,
    ) -> AsyncGenerator[Delta | Ended, None]:
        """Deltas, then one `Ended`; closed early, it aborts on both servers."""
        ...


class EngineFleet:
    """Implements `Backend` over ``replicas``.

    ``window``: tokens that a request may have, prompt and answer; None: what the smallest server
    holds at the start. It never changes: a server that comes back with less stays out.
    """

    def __init__(
        self, engine: Engine, replicas: Sequence[Replica], scopes: ScopeKeys, window: int | None
    ) -> None:
        self._engine = engine
        self._replicas = list(replicas)
        self._scopes = scopes
        self._window = window or 0
        self._prompt_max = 0
        self._numbers = itertools.count(1)
        self._turns = itertools.count(1)
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._polls: list[asyncio.Task[None]] = []
        self._is_open = False

    # -- life

    async def start(self) -> None:
        """Examine every server, let the gate judge, and go on examining.

        Raises:
            EngineError: a server cannot be used, or they do not hold the window.
        """
        await self._engine.open()
        self._is_open = True
        told = await asyncio.gather(*map(self._first, self._replicas), return_exceptions=True)
        fleet: list[tuple[Replica, Examined]] = []
        for replica, one in zip(self._replicas, told, strict=True):
            if isinstance(one, BaseException):
                raise one
            fleet.append((replica, one))
        self._window = self._window or min(examined.held for _, examined in fleet)
        stated = [examined.prompt_max for _, examined in fleet]
        self._prompt_max = min(self._window - 1, *stated)
        if why := refusal(self._window, self._prompt_max, fleet):
            raise EngineError(why)
        for replica, examined in fleet:
            replica.fit(examined)
        self._polls = [asyncio.create_task(self._poll(replica)) for replica in self._replicas]

    async def stop(self, grace: float) -> None:
        """Refuse new requests, give those under way ``grace`` seconds, end the rest."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._idle.wait()
        for poll in self._polls:
            poll.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        for replica in self._replicas:
            replica.end_all("shutting_down", "the server is shutting down")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._idle.wait()
        if self._is_open:
            self._is_open = False
            await self._engine.close()

    # -- Backend

    def tokens_max(self) -> int:
        """The window; 0 while a role has no server that may be used."""
        return self._window if self._fit("prefill") and self._fit("decode") else 0

    def refusal(self) -> str:
        """Why no server of a role may be used, by names without addresses."""
        return "; ".join(
            f"{replica.label}: {replica.why}"
            for role in _ROLES
            if not self._fit(role)
            for replica in self._replicas
            if replica.role == role and replica.why
        )

    def capacity(self) -> Capacity:
        """What the smallest rank of each server that may be used can hold."""
        return Capacity(
            window=self._window or None,
            missing=[role for role in _ROLES if not self._fit(role)],
            nodes=[_capacity(replica.label, replica.role, one) for replica, one in self._usable()],
        )

    def ready(self) -> bool:
        """Every role has a server that answers, holds the window and has an active guard."""
        return self.tokens_max() > 0 and not self._draining

    async def generate(
        self, scope: str, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[Delta | Ended, None]:
        """See `Backend.generate`.

        Raises:
            ApiError: 400 that names a field, for what the engine cannot do; nothing is sent.
        """
        self._engine.check(params)
        request = next(self._numbers)
        if not self.ready():
            yield Ended(request, "not_ready", "no server of each role is fit to be used", 0, 0)
            return
        if len(tokens) > self._prompt_max:
            told = f"the prompt has {len(tokens)} tokens, the servers take {self._prompt_max}"
            yield Ended(request, "context_length_exceeded", told, 0, 0)
            return
        pair = self._least_busy("prefill"), self._least_busy("decode")
        with self._counted(pair):
            stream = self._engine.generate(request, pair, self._scopes.key(scope), tokens, params)
            try:
                async for event in stream:
                    yield event
            finally:
                await stream.aclose()

    # -- private

    @contextlib.contextmanager
    def _counted(self, pair: tuple[Replica, Replica]) -> Iterator[None]:
        self._open += 1
        self._idle.clear()
        for replica in pair:
            replica.busy += 1
            replica.turn = next(self._turns)
        try:
            yield
        finally:
            self._open -= 1
            for replica in pair:
                replica.busy -= 1
            if not self._open:
                self._idle.set()

    def _usable(self) -> list[tuple[Replica, Examined]]:
        return [(r, r.examined) for r in self._replicas if r.examined is not None]

    def _fit(self, role: Role) -> list[Replica]:
        return [replica for replica, _ in self._usable() if replica.role == role]

    def _least_busy(self, role: Role) -> Replica:
        """Of equally busy ones, the one whose turn was longest ago."""
        return min(self._fit(role), key=lambda replica: (replica.busy, replica.turn))

    async def _first(self, replica: Replica) -> Examined:
        try:
            return await self._engine.examine(replica)
        except UnfitError as error:
            raise EngineError(f"{replica.name}: {error}") from None

    async def _poll(self, replica: Replica) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await replica.wanted.wait()
            replica.wanted.clear()
            try:
                examined = await self._engine.examine(replica)
                self._judge(replica, examined)
            except UnfitError as error:
                replica.unfit(error)
            except Exception as error:  # the poll must outlive a fault of its own
                log.error("%s cannot be examined: %s", replica.name, type(error).__name__)
                replica.leave("it cannot be examined")

    def _judge(self, replica: Replica, examined: Examined) -> None:
        if examined.held < self._window:
            raise UnfitError(f"it holds {examined.held} tokens, the window is {self._window}")
        if examined.prompt_max < self._prompt_max:
            found = f"it takes prompts up to {examined.prompt_max} tokens"
            raise UnfitError(f"{found}, others up to {self._prompt_max}")
        replica.fit(examined)


def _capacity(label: str, role: Role, examined: Examined) -> NodeCapacity:
    rank = min(examined.reading.ranks, key=lambda rank: rank.pool_tokens)
    return NodeCapacity(
        name=label,
        role=role,
        pool_tokens=rank.pool_tokens,
        page_size=rank.page_size,
        pages=rank.pool_tokens // rank.page_size,
        tokens_max=examined.held,
    )
