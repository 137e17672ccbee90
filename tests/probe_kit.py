"""Real local servers for the probe: raw ones that misbehave, and the bytes of good answers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sekisho.gate.fetch import Key
from sekisho.probe.endpoint import Account, Endpoint

KEY_A, KEY_B = "sk-planted-a-5f0c9d", "sk-planted-b-77e1aa"
MODEL = "toy"


@dataclass
class Request:
    """One request as it came; its reader is at the end once the client sends no more."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def account(self) -> str:
        return {f"Bearer {KEY_A}": "A", f"Bearer {KEY_B}": "B"}[self.headers["authorization"]]

    @property
    def prompt(self) -> str:
        fields = self.fields
        return str(fields["prompt"] if "prompt" in fields else fields["messages"][0]["content"])


Speak = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """A server of this loop; ``requests`` in the order of their arrival. ``halves``: of each that
    its client left in the middle of the body, what came of that."""

    url: str
    requests: list[Request] = field(default_factory=list)
    halves: list[bytes] = field(default_factory=list)


@contextlib.asynccontextmanager
async def serving(
    speak: Speak, half: Callable[[bytes], None] = lambda _body: None
) -> AsyncIterator[Server]:
    """Answers every request by ``speak`` on a connection of its own; ``half`` is told of halves."""
    server = Server("")
    tasks: set[asyncio.Task[None]] = set()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        try:
            with contextlib.suppress(OSError):
                try:
                    request = await _request(reader)
                except asyncio.IncompleteReadError as error:
                    server.halves.append(error.partial)
                    half(error.partial)
                    return
                server.requests.append(request)
                await speak(request, writer)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        finally:
            writer.transport.abort()

    listening = await asyncio.start_server(hear, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        listening.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # the loop closes the sockets of what was aborted


async def _request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    pairs = [line.split(": ", 1) for line in head[1:] if ": " in line]
    headers = {name.lower(): value for name, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body, reader)


def http(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> bytes:
    """One whole HTTP answer."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    return head.encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def saying(raw: bytes) -> Speak:
    """Sends exactly these bytes and closes."""

    async def speak(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return speak


def completion(
    text: str, *, prompt_tokens: int = 5, finish_reason: str = "stop", **more: Any
) -> bytes:
    """The body of a good answer of either path."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(text.split())}
    choice = {"index": 0, "finish_reason": finish_reason, "text": text}
    choice["message"] = {"role": "assistant", "content": None}
    return json.dumps({"id": "c-1", "choices": [choice], "usage": usage, **more}).encode()


def event(text: str, name: str = "c-1", reason: str | None = None) -> bytes:
    """One event of a chat stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return b"data: " + json.dumps({"id": name, "choices": [choice]}).encode() + b"\n\n"


def stream(texts: Sequence[str], name: str = "c-1", prompt_tokens: int = 5) -> list[bytes]:
    """The events of a good stream, with usage and end."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)}
    last = b"data: " + json.dumps({"id": name, "choices": [], "usage": usage}).encode() + b"\n\n"
    found = [event(text, name) for text in texts]
    return [*found, event("", name, "stop"), last, b"data: [DONE]\n\n"]


def refusal(message: str, status: int = 400) -> bytes:
    """An error as OpenAI writes it."""
    body = {"error": {"message": message, "type": "invalid_request_error", "code": None}}
    return http(json.dumps(body).encode(), status)


def accounts() -> tuple[Account, Account]:
    return Account("A", Key(KEY_A)), Account("B", Key(KEY_B))


def endpoint(server: Server, **options: Any) -> Endpoint:
    """Of the two accounts that `Request.account` knows."""
    return Endpoint(server.url, MODEL, accounts(), **options)
