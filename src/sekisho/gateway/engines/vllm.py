"""vLLM servers behind our gateway: how one is examined, and how a request is run."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Protocol

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gate.fetch import Client, Key, clip
from sekisho.gate.judge import Need, window_of
from sekisho.gate.model import Reading
from sekisho.gate.readers import vllm
from sekisho.gate.readers.base import Ask
from sekisho.gate.readers.prometheus import samples
from sekisho.gateway.engines.asking import examining, getter, session
from sekisho.gateway.engines.replica import Examined, Replica, UnfitError
from sekisho.gateway.engines.vllm_exchange import Exchange

_GUARD = "sekisho_guard_active"


class Servers(Protocol):
    """Servers that are started with the gateway."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class VllmEngine:
    """An `Engine`. ``tokenizer`` is that of the served model; ``key`` is sent to every server;
    ``servers`` are started first and stopped last."""

    def __init__(
        self, tokenizer: Tokenizer, key: Key | None = None, servers: Servers | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._key = key
        self._servers = servers
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        """Before anything else.

        Raises:
            EngineError: a server that is to be started does not start.
        """
        async with AsyncExitStack() as stack:
            if self._servers is not None:
                stack.push_async_callback(self._servers.stop)
                await self._servers.start()
            self._client = await stack.enter_async_context(Client())
            self._session = await stack.enter_async_context(session(self._key))
            self._stack = stack.pop_all()

    async def close(self) -> None:
        await self._stack.aclose()

    def check(self, params: SamplingParams) -> None:
        """vLLM takes all that the gateway lets through."""

    async def examine(self, replica: Replica) -> Examined:
        """Read a server's capacity as the gate does, and its guard.

        Raises:
            UnfitError: it does not answer, is of another role, or has no active guard.
        """
        get = getter(self._client, replica.url, self._key)
        async with examining():
            await get("/health")  # 503 where the engine behind the server has died
            reading = await vllm.read(Ask(replica.url, get, replica.role))
            said = list(samples(await get("/metrics"), _GUARD))
        guards = [sample.labels for sample in said if sample.value == 1]
        return _examined(replica, reading, guards)

    async def generate(
        self,
        request: int,
        pair: tuple[Replica, Replica],
        scope_key: str,
        tokens: list[int],
        params: SamplingParams,
    ) -> AsyncGenerator[Delta | Ended, None]:
        """Deltas, then one `Ended`. ``pair``: prefill, decode."""
        exchange = Exchange(self._session, *pair, tokens, scope_key, self._tokenizer, params)
        async with aclosing(exchange.events(request)) as stream:
            async for event in stream:
                yield event


def _examined(replica: Replica, reading: Reading, guards: list[dict[str, str]]) -> Examined:
    guarded = {f"engine {clip(guard.get('engine', '0'), 20)}" for guard in guards}
    if not guards or not {rank.name for rank in reading.ranks} <= guarded:
        raise UnfitError("Sekisho's guard is not active there (docs/guard-vllm.md)")
    for guard in guards:
        if guard.get("role") != replica.role:
            stated = clip(guard.get("role", ""), 20)
            raise UnfitError(f"it is named as {replica.role}, and its guard is of {stated or '?'}")
    if reading.advertised is None:
        raise UnfitError("/v1/models states no max_model_len")
    if replica.role == "prefill" and not replica.bootstrap_port:
        raise UnfitError("Mooncake's bootstrap port is not named (http://host:port@PORT)")
    need = Need(0, 0, 0)
    return Examined(
        reading=reading,
        held=min(window_of(rank, reading.role, need)[0] for rank in reading.ranks),
        prompt_max=reading.advertised - 1,
        guard=clip(guards[0].get("version", ""), 40),
    )
