"""A pair of local HTTP servers that play SGLang with answers that real ones gave.

``fixtures/sglang_engine`` holds them: the bytes of real streams of guarded servers, both roles.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gateway.engines.fleet import EngineFleet
from sekisho.gateway.engines.replica import Replica
from sekisho.gateway.engines.scope import ScopeKeys
from sekisho.gateway.engines.sglang import SglangEngine

FIXTURES = Path(__file__).parent / "fixtures" / "sglang_engine"
GATE = Path(__file__).parent / "fixtures" / "gate"
PORT = 8998
LIMIT = 1000

Role = Literal["prefill", "decode"]
Play = Callable[["Server", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def recorded(name: str, role: Role, version: str = "0.5.23") -> bytes:
    """The body of one real answer."""
    return (FIXTURES / version / f"{name}.{role}.txt").read_bytes()


def guard(of: str, **changed: Any) -> dict[str, Any]:
    return {"active": True, "version": "0.1.0", "role": of, "limit": LIMIT, **changed}


def described(
    role: Role, version: str = "0.5.23", said: Any = None, pool: int = 8192, **changed: Any
) -> bytes:
    """``/server_info`` of a real server with ``pool`` tokens, and a guard that says ``said``."""
    info = json.loads((GATE / f"sglang-{version}-{role}" / "server_info.json").read_text())
    info |= {"max_total_num_tokens": pool, "max_req_input_len": min(pool, 4096) - 6}
    info |= {"context_length": 4096, "disaggregation_bootstrap_port": PORT}
    info |= {"served_model_name": "smollm2", **changed}
    for state in info["internal_states"]:
        state.get("memory_usage", {})["token_capacity"] = pool
        if said is not None:
            state["sekisho_guard"] = said
    return json.dumps(info).encode()


@dataclass
class Server:
    """One server. ``play`` answers ``/generate``; ``asked`` and ``aborted`` note what came."""

    role: Role
    play: Play
    info: bytes
    window: int = 4096
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/server_info", self._info),
                web.get("/v1/models", self._models),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
            ]
        )
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _info(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.Response(body=self.info, content_type="application/json")

    async def _models(self, _request: web.Request) -> web.Response:
        entry = {"id": "smollm2", "owned_by": "sglang", "max_model_len": self.window}
        return web.json_response({"object": "list", "data": [entry]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
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

    async def _abort(self, request: web.Request) -> web.Response:
        self._note(request)
        self.aborted.append((await request.json())["rid"])
        return web.Response()


def saying(data: bytes, status: int = 200) -> Play:
    """Exactly this answer, in small pieces."""

    async def play(_server: Server, request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for start in range(0, len(data), 700):
            await response.write(data[start : start + 700])
        await response.write_eof()
        return response

    return play


def cut(data: bytes) -> Play:
    """This much of an answer, and then the connection is dropped without an end."""

    async def play(_server: Server, request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(data)
        await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort()
        return response

    return play


def silent(before: bytes = b"") -> Play:
    """``before``, and then nothing, until the connection is closed."""

    async def play(_server: Server, request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if before:
            await response.write(before)
        await asyncio.Event().wait()
        return response

    return play


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a recorded answer, without ``[DONE]``."""
    blocks = [block.removeprefix(b"data: ") for block in data.split(b"\n\n") if block]
    return [json.loads(block) for block in blocks if block != b"[DONE]"]


def stream_of(events: list[dict[str, Any]], done: bool = True) -> bytes:
    """The opposite of `events_of`."""
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return data + b"data: [DONE]\n\n" if done else data


@dataclass
class Pair:
    """Both servers and the gateway's side of them."""

    prefill: Server
    decode: Server
    fleet: EngineFleet

    async def ask(self, tokens: list[int], scope: str = "tenant:a", **params: Any) -> list[Any]:
        """Every event of one request."""
        wanted = SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **params})
        return [event async for event in self.fleet.generate(scope, tokens, wanted)]


def server(role: Role, play: Play, said: Any = None, **changed: Any) -> Server:
    """One with an active guard, if ``said`` says nothing else; False: without a guard."""
    told = guard(role) if said is None else said or None
    return Server(role, play, described(role, said=told, **changed))


def replicas(*servers: Server) -> list[Replica]:
    counts = {"prefill": 0, "decode": 0}
    made = []
    for each in servers:
        counts[each.role] += 1
        made.append(Replica(each.role, each.url, f"{each.role}-{counts[each.role]}"))
    return made


@asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[None]:
    """The servers, for as long as it is entered."""
    try:
        for each in servers:
            await each.start()
        yield
    finally:
        for each in servers:
            await each.stop()


@asynccontextmanager
async def fleet_over(
    *servers: Server, tokenizer: Tokenizer, window: int | None = None
) -> AsyncIterator[EngineFleet]:
    """A started fleet over running servers."""
    scopes = ScopeKeys(bytes(range(32)))
    fleet = EngineFleet(SglangEngine(tokenizer), replicas(*servers), scopes, window)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.stop(0.0)


@asynccontextmanager
async def pair(
    prefill: Play, decode: Play, tokenizer: Tokenizer, window: int | None = None
) -> AsyncIterator[Pair]:
    """A pair whose two answers are given."""
    first, second = server("prefill", prefill), server("decode", decode)
    async with (
        serving(first, second),
        fleet_over(first, second, tokenizer=tokenizer, window=window) as fleet,
    ):
        yield Pair(first, second, fleet)


def text_of(events: list[Delta | Ended]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def end_of(events: list[Delta | Ended]) -> Ended:
    """The last event; no other is an end."""
    ends = [event for event in events if isinstance(event, Ended)]
    assert len(ends) == 1
    assert events[-1] is ends[0]
    return ends[0]
