"""Requests that the probe leaves, against real local servers: what was sent arrived, the
connection is closed, what had come is kept, paid for and logged."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probe_kit import (
    KEY_A,
    STREAM_HEAD,
    Request,
    Server,
    Speak,
    completion,
    endpoint,
    event,
    http,
    refusal,
    saying,
    serving,
    stream,
)
from sekisho.probe.budget import Budget
from sekisho.probe.cut import LEFT, Cut, exchange
from sekisho.probe.exchange import Answer, Ask, Inconclusive, Outcome, Refused, UnreachedError
from sekisho.probe.reading import Seen

ASK = Ask(prompt="What is it?", answer_tokens=8)
STREAMED = Ask(prompt="What is it?", answer_tokens=8, stream=True)


def left(
    speak: Speak, after_s: float | None, ask: Ask = ASK, **options: Any
) -> tuple[Outcome, Server, list[Outcome]]:
    """The outcome, the server, and what the log was told."""
    log: list[Outcome] = []
    cut = {name: options.pop(name) for name in ("share", "half_close") if name in options}

    async def main() -> tuple[Outcome, Server]:
        async with serving(speak) as server, endpoint(server, log=log.append, **options) as found:
            outcome = await found.ask_and_leave(found.accounts[0], ask, after_s, **cut)
            for _ in range(200):  # the server's side of it
                if server.requests or server.halves or not outcome_sent(outcome):
                    break
                await asyncio.sleep(0.01)
            return outcome, server

    outcome, server = asyncio.run(main())
    return outcome, server, log


def outcome_sent(outcome: Outcome) -> bool:
    return not isinstance(outcome, Inconclusive) or outcome.sent


async def silent(_request: Request, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


def test_a_stream_is_left_and_what_had_come_is_kept_paid_and_logged() -> None:
    gone = asyncio.Event()

    async def drip(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        try:
            while True:
                writer.write(event(f"drip {KEY_A} "))
                await writer.drain()
                await asyncio.sleep(0.01)
        except OSError:
            gone.set()

    async def main() -> None:
        log: list[Outcome] = []
        async with serving(drip) as server, endpoint(server, log=log.append) as found:
            outcome = await found.ask_and_leave(found.accounts[0], STREAMED, 0.3)
            assert isinstance(outcome, Inconclusive)
            assert (outcome.reason, outcome.sent, outcome.status) == (LEFT, True, 200)
            assert (outcome.account, outcome.serial) == ("A", 1)
            assert outcome.text.startswith("drip redacted drip")
            assert KEY_A not in outcome.raw
            assert log == [outcome]
            assert found.purse.spent == found.cost(STREAMED)
            await asyncio.wait_for(gone.wait(), 30)  # the connection is closed, not kept

    asyncio.run(main())


def test_who_leaves_at_once_has_sent_the_whole_request() -> None:
    ask = Ask(prompt="word " * 100_000, answer_tokens=8, fields={"user": "u"})
    outcome, server, _ = left(silent, 0)
    assert isinstance(outcome, Inconclusive)
    assert (outcome.reason, outcome.sent, outcome.status) == (LEFT, True, 0)
    assert server.requests[0].prompt == ASK.prompt
    assert server.requests[0].account == "A"
    _, server, _ = left(silent, 0, ask)
    assert server.requests[0].prompt == ask.prompt
    assert server.requests[0].fields["user"] == "u"


@pytest.mark.parametrize("after_s", [30, None])
def test_an_answer_that_came_in_time_is_an_answer(after_s: float | None) -> None:
    outcome, _, log = left(saying(http(completion("It is here."))), after_s)
    assert isinstance(outcome, Answer)
    assert outcome.whole.text == "It is here."
    assert log == [outcome]
    outcome, _, _ = left(saying(STREAM_HEAD + b"".join(stream(["a", "b"]))), after_s, STREAMED)
    assert isinstance(outcome, Answer)
    assert outcome.whole.text == "ab"
    assert len(outcome.whole.events) == 4
    outcome, _, _ = left(saying(refusal("too long")), after_s)
    assert isinstance(outcome, Refused)
    assert outcome.message == "too long"


def test_a_chunked_answer_is_read() -> None:
    body = completion("It is here.")
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    cut = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (body[:9], body[9:]))
    outcome, _, _ = left(saying(head + cut + b"0\r\n\r\n"), None)
    assert isinstance(outcome, Answer)
    assert outcome.whole.text == "It is here."


def test_a_half_closed_connection_is_read_to_its_end() -> None:
    ends: list[bytes] = []

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        ends.append(await asyncio.wait_for(request.reader.read(), 30))  # until the client's end
        writer.write(http(completion("It is here.")))

    outcome, _, _ = left(speak, None, half_close=True)
    assert isinstance(outcome, Answer)
    assert ends == [b""]


def test_half_of_a_body_is_sent_and_no_more() -> None:
    outcome, server, _ = left(silent, 0, share=0.5)
    assert isinstance(outcome, Inconclusive)
    assert (outcome.reason, outcome.sent) == (LEFT, True)
    assert server.requests == []
    [half] = server.halves
    assert half.startswith(b'{"model"')
    assert not half.endswith(b"}")


BROKEN = {
    "closed at once": (b"", "closed the connection", 0),
    "no HTTP": (b"hello\r\n\r\n", "not HTTP", 0),
    "half a head": (b"HTTP/1.1 200 OK\r\nConte", "closed the connection", 0),
    "half a body": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        "before it was complete",
        200,
    ),
    "html": (http(b"<html>"), "HTML", 200),
    "compressed": (http(b"x", headers={"Content-Encoding": "gzip"}), "compressed", 200),
    "failed": (http(b"{}", 500), "answers 500", 500),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_a_sentence(name: str) -> None:
    raw, sentence, status = BROKEN[name]
    outcome, _, _ = left(saying(raw), None)
    assert isinstance(outcome, Inconclusive)
    assert sentence in outcome.reason
    assert (outcome.status, outcome.sent) == (status, True)


def test_the_time_limit_of_the_endpoint_holds() -> None:
    outcome, _, _ = left(silent, None, timeout_s=0.2)
    assert isinstance(outcome, Inconclusive)
    assert "did not finish within 0.2 s" in outcome.reason


def test_nothing_is_sent_beyond_the_budget_or_where_nobody_listens() -> None:
    outcome, server, log = left(silent, 0, budget=Budget(tokens_max=1))
    assert isinstance(outcome, Inconclusive)
    assert not outcome.sent
    assert server.requests == []
    assert log == [outcome]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def main() -> Outcome:
        async with endpoint(Server(f"http://127.0.0.1:{port}/v1")) as found:
            return await found.ask_and_leave(found.accounts[0], ASK, 1)

    outcome = asyncio.run(main())
    assert isinstance(outcome, Inconclusive)
    assert (outcome.sent, outcome.reason) == (
        False,
        "no connection to the endpoint: refused or no such host",
    )


@contextlib.contextmanager
def tls_server(folder: Path, ends: list[bytes]) -> Iterator[tuple[str, ssl.SSLContext]]:
    """Answers one request after the client has closed its half; with the context that trusts it."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve() -> None:
        with contextlib.suppress(ssl.SSLError, OSError):
            raw, _ = listener.accept()
            with context.wrap_socket(raw, server_side=True) as connection:
                connection.settimeout(30)
                got = b""
                while piece := connection.recv(65_536):
                    got += piece
                ends.append(got)
                connection.sendall(http(completion("It is here.")))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            url = f"https://localhost:{listener.getsockname()[1]}/v1/completions"
            yield url, ssl.create_default_context(cafile=str(certificate))
        finally:
            thread.join(60)


def test_a_half_closed_connection_under_tls_is_read_to_its_end(tmp_path: Path) -> None:
    ends: list[bytes] = []
    with tls_server(tmp_path, ends) as (url, context):
        cut = Cut(half_close=True)
        body = b"x" * 200_000
        found = asyncio.run(
            exchange(url, {"X-A": "b"}, body, Seen(), cut, stream=False, context=context)
        )
    assert not isinstance(found, str)
    assert found.text == "It is here."
    assert ends[0].endswith(b"\r\n\r\n" + body)
    assert b"\r\nX-A: b\r\n" in ends[0]


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    ends: list[bytes] = []
    with tls_server(tmp_path, ends) as (url, _), pytest.raises(UnreachedError, match="TLS"):
        asyncio.run(exchange(url, {}, b"x", Seen(), Cut(), stream=False))
    assert ends == []
