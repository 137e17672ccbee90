"""A pair of local HTTP servers that play vLLM with answers that real, guarded ones gave.

``fixtures/vllm_engine`` holds them: real bodies of both roles, and what each said of itself.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gateway.engines.fleet import EngineFleet
from sekisho.gateway.engines.replica import Replica
from sekisho.gateway.engines.scope import ScopeKeys
from sekisho.gateway.engines.vllm import VllmEngine

FIXTURES = Path(__file__).parent / "fixtures" / "vllm_engine"
BOOTSTRAP = 8998
PROMPT: list[int] = json.loads((FIXTURES / "prompt.json").read_text())
RECORDED = b"sekisho-" + b"0" * 32
"""The transfer that the recorded manifest is of."""

Role = Literal["prefill", "decode"]
Play = Callable[[Any, web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def recorded(name: str, role: Role) -> bytes:
    """The body of one real answer."""
    return (FIXTURES / f"{name}.{role}.txt").read_bytes()


def computing(data: bytes | None = None) -> Play:
    """Prefill's recorded answer, or ``data``, for whatever transfer it is asked of."""
    body = recorded("greedy", "prefill") if data is None else data

    async def play(_server: Any, _request: web.Request, asked: dict[str, Any]) -> web.Response:
        transfer = asked["kv_transfer_params"]["transfer_id"].encode()
        answer = body.replace(RECORDED, transfer)
        return web.Response(body=answer, content_type="application/json")

    return play


@dataclass
class Server:
    """One server. ``play`` answers completions; ``asked`` notes what came. ``metrics``,
    ``models`` and ``version`` are what it says of itself."""

    role: Role
    play: Play
    metrics: bytes
    models: bytes
    version: bytes
    healthy: bool = True
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._said("metrics", "text/plain")),
                web.get("/v1/models", self._said("models", "application/json")),
                web.get("/version", self._said("version", "application/json")),
                web.post("/v1/completions", self._complete),
            ]
        )
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.Response(status=200 if self.healthy else 503)

    def _said(self, name: str, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            self._note(request)
            return web.Response(body=getattr(self, name), content_type=kind)

        return answer

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        body = await request.json()
        self.asked.append(body)
        try:
            return await self.play(self, request, body)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    def _note(self, request: web.Request) -> None:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})


def server(role: Role, play: Play, **changed: Any) -> Server:
    """One that says of itself what a real one did; ``changed``: fields of `Server`."""
    said = {
        "metrics": (FIXTURES / f"{role}.metrics").read_bytes(),
        "models": (FIXTURES / f"{role}.v1_models").read_bytes(),
        "version": (FIXTURES / "version").read_bytes(),
    }
    return Server(role, play, **(said | changed))


def without_guard(metrics: bytes, rank: int = 0) -> bytes:
    """``/metrics`` of the same server, stock; or with a stock ``rank`` beside the guarded one."""
    if not rank:
        return re.sub(rb"(?m)^(# (HELP|TYPE) )?sekisho_guard_.*\n", b"", metrics)
    [pool] = re.findall(rb"(?m)^vllm:cache_config_info.*\n", metrics)
    return metrics.replace(pool, pool + pool.replace(b'engine="0"', b'engine="%d"' % rank))


@dataclass
class Pair:
    """Both servers and the gateway's side of them."""

    prefill: Server
    decode: Server
    fleet: EngineFleet

    async def ask(self, scope: str = "tenant:a", **params: Any) -> list[Any]:
        """Every event of one request for the recorded prompt."""
        wanted = SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **params})
        return [event async for event in self.fleet.generate(scope, PROMPT, wanted)]


@asynccontextmanager
async def fleet_over(
    prefill: Server, decode: Server, tokenizer: Tokenizer, port: int = BOOTSTRAP
) -> AsyncIterator[EngineFleet]:
    """A started fleet over both, which run for as long as it is entered."""
    try:
        await prefill.start()
        await decode.start()
        replicas = [
            Replica("prefill", prefill.url, "prefill-1", port),
            Replica("decode", decode.url, "decode-1"),
        ]
        scopes = ScopeKeys(bytes(range(32)))
        fleet = EngineFleet(VllmEngine(tokenizer), replicas, scopes, None)
        try:
            await fleet.start()
            yield fleet
        finally:
            await fleet.stop(0.0)
    finally:
        await prefill.stop()
        await decode.stop()


@asynccontextmanager
async def pair(prefill: Play, decode: Play, tokenizer: Tokenizer) -> AsyncIterator[Pair]:
    """A pair whose two answers are given."""
    first, second = server("prefill", prefill), server("decode", decode)
    async with fleet_over(first, second, tokenizer) as fleet:
        yield Pair(first, second, fleet)
