"""A gateway over a backend that follows a script, for tests of the HTTP side alone."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.types import Message

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams, TokenInfo, TokenLogprob
from sekisho.engine.tokenizer import TemplateError
from sekisho.gateway.app import create_app
from sekisho.gateway.backend import Capacity, NodeCapacity
from sekisho.gateway.model import ServedModel
from sekisho.gateway.store import Tenant, TenantStore

MODEL = "org/tiny"
VOCAB = 0x110000
TOKENS_MAX = 200


class CharTokenizer:
    """A token a character; a turn of a conversation costs 3 tokens more than its content."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise TemplateError("the conversation must not begin with the assistant")
        turns = [f"<{turn['role'][0]}>{turn['content']}" for turn in messages]
        return self.encode("".join(turns))


@dataclass
class Hold:
    """A step of a script: wait for ``until``; without it, until the stream is closed."""

    until: asyncio.Event | None = None


Step = Delta | Ended | Hold | Exception
Script = Callable[[int, SamplingParams], Iterable[Step]]


def info(text: str, logprob: float = -0.5) -> TokenInfo:
    chosen = TokenLogprob(ord(text[0]), text.encode(), logprob)
    return TokenInfo(chosen, (chosen, TokenLogprob(7, b"\xe2\x82", float("-inf"))))


def say(*texts: str, code: str = "stop", cached: int = 0, message: str = "") -> Script:
    """A token a text, then ``code``."""

    def script(request: int, params: SamplingParams) -> Iterable[Step]:
        for index, text in enumerate(texts):
            infos = [] if params.logprobs is None else [info(text)]
            yield Delta(request, index, [ord(text[0])], text, infos)
        yield Ended(request, code, message, len(texts), cached)

    return script


def fail(code: str, message: str = "", after: tuple[str, ...] = ()) -> Script:
    return say(*after, code=code, message=message)


@dataclass
class Call:
    scope: str
    tokens: list[int]
    params: SamplingParams


@dataclass
class ScriptedBackend:
    """Follows ``script`` with each request; notes what was asked and what was closed."""

    script: Script = field(default_factory=lambda: say("Hel", "lo"))
    limit: int = TOKENS_MAX
    is_ready: bool = True
    refused: str = ""
    calls: list[Call] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    # Kept, so that only the gateway closes a stream, and never the garbage collector.
    _streams: list[AsyncGenerator[Delta | Ended, None]] = field(default_factory=list)

    def reset(self) -> None:
        """As new, so that one gateway can serve many tests."""
        self.script, self.limit, self.is_ready = say("Hel", "lo"), TOKENS_MAX, True
        self.refused = ""
        self.calls.clear()
        self.closed.clear()
        self._streams.clear()

    def tokens_max(self) -> int:
        return self.limit

    def ready(self) -> bool:
        return self.is_ready and not self.refused

    def refusal(self) -> str:
        return self.refused

    def capacity(self) -> Capacity:
        node = NodeCapacity(
            name="colocated-0.1",
            role="both",
            pool_tokens=256,
            page_size=16,
            pages=16,
            tokens_max=self.limit,
        )
        return Capacity(window=None, missing=[], nodes=[node])

    def generate(
        self, scope: str, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[Delta | Ended, None]:
        self.calls.append(Call(scope, tokens, params))
        stream = self._follow(len(self.calls), params)
        self._streams.append(stream)
        return stream

    async def _follow(
        self, request: int, params: SamplingParams
    ) -> AsyncGenerator[Delta | Ended, None]:
        try:
            for step in self.script(request, params):
                await asyncio.sleep(0)
                if isinstance(step, Hold):
                    await (step.until or asyncio.Event()).wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.closed.append(request)


@dataclass
class Gateway:
    backend: ScriptedBackend
    store: TenantStore
    tenant: Tenant
    key: str
    app: Starlette

    def request(self, method: str, path: str, **kwargs: Any) -> httpx2.Response:
        """One request with the tenant's key, in an event loop of its own."""
        headers = {"authorization": f"Bearer {self.key}", **kwargs.pop("headers", {})}

        async def send() -> httpx2.Response:
            transport = httpx2.ASGITransport(self.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, headers=headers, **kwargs)

        return asyncio.run(send())

    def chat(self, **fields: Any) -> httpx2.Response:
        return self.request("POST", "/v1/chat/completions", content=chat_body(**fields))

    def complete(self, **fields: Any) -> httpx2.Response:
        body = json.dumps({"model": MODEL, "prompt": "Hi", **fields})
        return self.request("POST", "/v1/completions", content=body.encode())

    def drive(
        self, body: bytes, leave: asyncio.Event, stuck: bool = False
    ) -> tuple[list[Message], "asyncio.Task[None]"]:
        """Start a raw ASGI chat request whose client disconnects once ``leave`` is set, and
        which, if ``stuck``, reads nothing. Returns what is sent to it, and the running request.
        """
        sent: list[Message] = []
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            if stuck:
                await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [(b"authorization", f"Bearer {self.key}".encode())],
        }
        return sent, asyncio.create_task(self.app(scope, receive, send))


def chat_body(**fields: Any) -> bytes:
    base = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps({**base, **fields}).encode()


def open_gateway(
    folder: Path, backend: ScriptedBackend, tokenizer: CharTokenizer | None = None
) -> Gateway:
    store = TenantStore.open(f"sqlite:///{folder / 'tenants.db'}", folder / "pepper")
    tenant = store.ensure_tenant("alpha")
    model = ServedModel(MODEL, tokenizer or CharTokenizer(), VOCAB, (0, 1), created=1_700_000_000)
    key = store.create_key(tenant)
    return Gateway(backend, store, tenant, key, create_app(backend, model, store))


def events(response: httpx2.Response) -> list[Any]:
    """The data of every server-sent event; ``[DONE]`` stays text."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [each if each == "[DONE]" else msgspec.json.decode(each) for each in data]


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error object of an answer, its form checked."""
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"].startswith("req_")
    error: dict[str, Any] = body["error"]
    return error
