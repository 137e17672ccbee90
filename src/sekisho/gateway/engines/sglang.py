"""SGLang servers behind our gateway: how one is examined, and how a request is run and ended."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import aiohttp
import msgspec

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gate.fetch import Client, Key, clip
from sekisho.gate.judge import Need, window_of
from sekisho.gate.model import Reading
from sekisho.gate.readers import sglang
from sekisho.gate.readers.base import Ask, decode
from sekisho.gateway.engines.asking import CONNECT_S, examining, getter, session
from sekisho.gateway.engines.replica import Examined, Replica, UnfitError
from sekisho.gateway.engines.sglang_exchange import Exchange
from sekisho.gateway.engines.sglang_request import body, check

_ABORT_S = 5.0


class _Guard(msgspec.Struct):
    active: bool
    version: str
    role: str
    limit: int


class _State(msgspec.Struct):
    sekisho_guard: _Guard | None = None


class _Info(msgspec.Struct):
    """Of ``/server_info``, beside what the gate's reader takes from it."""

    internal_states: list[_State]
    disaggregation_bootstrap_port: int = 0


class SglangEngine:
    """An `Engine`. ``tokenizer`` is that of the served model; ``key`` is sent to every server."""

    def __init__(self, tokenizer: Tokenizer, key: Key | None = None) -> None:
        self._tokenizer = tokenizer
        self._key = key
        self._stack = AsyncExitStack()
        self._endings: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Before anything else."""
        self._client = await self._stack.enter_async_context(Client())
        self._session = await self._stack.enter_async_context(session(self._key))

    async def close(self) -> None:
        """Wait until every abort is delivered, and close the connections."""
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self._stack.aclose()

    def check(self, params: SamplingParams) -> None:
        """See `sglang_request.check`."""
        check(params)

    async def examine(self, replica: Replica) -> Examined:
        """Read a server's capacity as the gate does, and its guard.

        Raises:
            UnfitError: it does not answer, is of another role, or has no active guard.
        """
        get = getter(self._client, replica.url, self._key)
        async with examining():
            reading = await sglang.read(Ask(replica.url, get, replica.role))
            info = decode(await get("/server_info"), _Info, "/server_info")
        return _examined(replica, reading, info)

    async def generate(
        self,
        request: int,
        pair: tuple[Replica, Replica],
        scope_key: str,
        tokens: list[int],
        params: SamplingParams,
    ) -> AsyncGenerator[Delta | Ended, None]:
        """Deltas, then one `Ended`. ``pair``: prefill, decode."""
        # All of one length: SGLang aborts every request whose id begins with the one it is given.
        rid = f"sekisho-{secrets.token_hex(16)}"
        told = body(tokens, params, rid, scope_key)
        exchange = Exchange(self._session, *pair, told, self._tokenizer, params)
        stream = exchange.events(request)
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()
            ending = asyncio.create_task(self._end(exchange, rid))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _end(self, exchange: Exchange, rid: str) -> None:
        """Abort what still runs. The connections are closed after that: a closed one makes SGLang
        forget the id, before it aborts by itself two seconds later."""
        try:
            await asyncio.gather(*(self._abort(r, rid) for r in exchange.busy()))
        finally:
            exchange.close()

    async def _abort(self, replica: Replica, rid: str) -> None:
        timeout = aiohttp.ClientTimeout(total=_ABORT_S, sock_connect=CONNECT_S)
        url = f"{replica.url}/abort_request"
        try:
            async with self._session.post(url, json={"rid": rid}, timeout=timeout) as response:
                await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return  # it is gone, or will see that the connection is closed


def _examined(replica: Replica, reading: Reading, info: _Info) -> Examined:
    if reading.role != replica.role:
        raise UnfitError(f"it is named as {replica.role}, and states that it is {reading.role}")
    guards = [state.sekisho_guard for state in info.internal_states]
    active = [guard for guard in guards if guard is not None and guard.active]
    if not active or len(active) != len(guards):
        raise UnfitError("Sekisho's guard is not active there (docs/guard-sglang.md)")
    for guard in active:
        if guard.role != replica.role:
            raise UnfitError(f"its guard is that of another role, {clip(guard.role, 20)}")
        if guard.limit < 1:
            raise UnfitError(f"its guard lets in prompts up to {guard.limit} tokens: none")
    need = Need(0, 0, 0)
    return Examined(
        reading=reading,
        held=min(window_of(rank, reading.role, need)[0] for rank in reading.ranks),
        prompt_max=min(guard.limit for guard in active),
        guard=clip(active[0].version, 40),
        bootstrap_port=info.disaggregation_bootstrap_port,
    )
