"""A client that leaves, stalls or waits: its backend requests are closed, held back, kept alive."""

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import httpx2
import pytest
from starlette.types import Message

from gateway_kit import (
    CharTokenizer,
    Gateway,
    Hold,
    Script,
    ScriptedBackend,
    Step,
    chat_body,
    open_gateway,
)
from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.gateway import respond


def hold(request: int, params: SamplingParams) -> Iterable[Step]:
    yield Hold()


def two_then_hold(request: int, params: SamplingParams) -> Iterable[Step]:
    yield Delta(request, 0, [5], "x", [])
    yield Delta(request, 1, [5], "y", [])
    yield Hold()


async def until_called(gateway: Gateway, count: int) -> None:
    while len(gateway.backend.calls) < count:
        await asyncio.sleep(0.001)


async def until_sent(sent: list[Message], part: bytes, count: int = 1) -> None:
    while sum(part in message.get("body", b"") for message in sent) < count:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("script", [hold, two_then_hold])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_closes_every_backend_request(
    tmp_path: Path, stream: bool, script: Script, n: int
) -> None:
    gateway = open_gateway(tmp_path, ScriptedBackend(script))
    begun = stream and script is two_then_hold

    async def scenario() -> list[Message]:
        leave = asyncio.Event()
        sent, task = gateway.drive(chat_body(stream=stream, n=n), leave)
        await until_called(gateway, n)
        if begun:
            await until_sent(sent, b'"y"', n)
        assert gateway.backend.closed == []
        leave.set()
        await task
        # Within the loop: its end would close what the gateway forgot.
        assert sorted(gateway.backend.closed) == list(range(1, n + 1))
        return sent

    sent = asyncio.run(scenario())
    assert bool(sent) == begun
    assert not any(b"[DONE]" in message.get("body", b"") for message in sent)
    assert all(message.get("more_body", True) for message in sent)
    gateway.store.close()


def test_leaving_before_the_body_is_complete_reserves_nothing(tmp_path: Path) -> None:
    gateway = open_gateway(tmp_path, ScriptedBackend())
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"authorization", f"Bearer {gateway.key}".encode())],
    }
    asyncio.run(gateway.app(scope, receive, send))
    assert messages == []
    assert sent == []
    assert gateway.backend.calls == []
    gateway.store.close()


def test_a_client_that_stops_reading_holds_its_stream_back(tmp_path: Path) -> None:
    produced: list[int] = []

    def endless(request: int, params: SamplingParams) -> Iterable[Step]:
        for index in range(10_000):
            produced.append(index)
            yield Delta(request, index, [5], "x", [])

    gateway = open_gateway(tmp_path, ScriptedBackend(endless, limit=20_000))

    async def scenario() -> None:
        leave = asyncio.Event()
        _, task = gateway.drive(chat_body(stream=True), leave, stuck=True)
        await until_called(gateway, 1)
        for _ in range(1000):
            await asyncio.sleep(0)
        leave.set()
        await task
        assert gateway.backend.closed == [1]

    asyncio.run(scenario())
    assert 0 < len(produced) < 100
    gateway.store.close()


def test_a_silent_stream_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "KEEP_ALIVE_SECONDS", 0.001)
    backend = ScriptedBackend()
    gateway = open_gateway(tmp_path, backend)

    async def scenario() -> bytes:
        go_on = asyncio.Event()

        def script(request: int, params: SamplingParams) -> Iterable[Step]:
            yield Delta(request, 0, [5], "x", [])
            yield Hold(go_on)
            yield Delta(request, 1, [5], "y", [])
            yield Ended(request, "stop", "", 2, 0)

        backend.script = script
        sent, task = gateway.drive(chat_body(stream=True), asyncio.Event())
        await until_sent(sent, b": keep-alive\n\n", 3)
        go_on.set()
        await task
        return b"".join(message.get("body", b"") for message in sent)

    text = asyncio.run(scenario())
    assert text.index(b'"x"') < text.index(b": keep-alive") < text.index(b'"y"')
    assert text.endswith(b"data: [DONE]\n\n")
    gateway.store.close()


def test_slow_tokenisation_blocks_nobody(tmp_path: Path) -> None:
    class Slow(CharTokenizer):
        def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
            if not others_answered.wait(60):
                raise TimeoutError
            return super().encode_chat(messages)

    others_answered = threading.Event()
    gateway = open_gateway(tmp_path, ScriptedBackend(), Slow())

    async def scenario() -> list[int]:
        headers = {"authorization": f"Bearer {gateway.key}"}
        transport = httpx2.ASGITransport(gateway.app)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://test", headers=headers, timeout=60
        ) as client:
            path = "/v1/chat/completions"
            slow = [asyncio.create_task(client.post(path, content=chat_body())) for _ in range(8)]
            while not any(
                thread.name.startswith("sekisho-tok") for thread in threading.enumerate()
            ):
                await asyncio.sleep(0.001)
            models = await client.get("/v1/models")
            others_answered.set()
            return [models.status_code] + [(await each).status_code for each in slow]

    statuses = asyncio.run(scenario())
    assert statuses == [200] * 9
    gateway.store.close()
