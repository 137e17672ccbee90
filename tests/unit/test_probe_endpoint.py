"""The probe's client against real local servers: what is good is read whole, what is bad in any
way is inconclusive with a sentence, what was received is kept, and keys are in no text."""

import asyncio
import email.utils
import gzip
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from probe_kit import (
    KEY_A,
    KEY_B,
    STREAM_HEAD,
    Request,
    Speak,
    accounts,
    completion,
    endpoint,
    event,
    http,
    refusal,
    saying,
    serving,
    stream,
)
from sekisho.gate.model import ClaimError
from sekisho.gate.run import read_key
from sekisho.probe.budget import Budget, Cost, Prices, Purse, estimate_tokens
from sekisho.probe.endpoint import Account, Endpoint
from sekisho.probe.exchange import Answer, Ask, Events, Inconclusive, Outcome, Refused

ASK = Ask(prompt="What is it?", answer_tokens=8)
STREAMED = Ask(prompt="What is it?", answer_tokens=8, stream=True)


def asked(speak: Speak, ask: Ask = ASK, **options: Any) -> Outcome:
    async def main() -> Outcome:
        async with serving(speak) as server, endpoint(server, **options) as found:
            return await found.ask(found.accounts[1], ask)

    return asyncio.run(main())


@pytest.mark.parametrize("chat", [True, False])
def test_a_good_answer_is_read_whole(chat: bool) -> None:
    ask = Ask(prompt="What is it?", answer_tokens=8, chat=chat, fields={"user": "u"})
    requests: list[Request] = []

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        requests.append(request)
        writer.write(http(completion("It is here.")))

    found = asked(speak, ask)
    assert isinstance(found, Answer)
    assert (found.account, found.serial, found.status) == ("B", 1, 200)
    assert found.whole.text == "It is here."
    assert found.whole.finish_reason == "stop"
    assert (found.whole.prompt_tokens, found.whole.completion_tokens) == (5, 3)
    assert found.whole.events == ()
    [request] = requests
    assert request.path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert request.fields["user"] == "u"
    assert request.fields["temperature"] == 0
    assert request.prompt == "What is it?"
    assert request.account == "B"


def test_a_stream_is_read_event_by_event_however_it_is_cut() -> None:
    raw = b": hello\r\nevent: x\r\n\r\n" + b"".join(stream(["It", " is", " here"], name="c-7"))

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        assert request.fields["stream_options"] == {"include_usage": True}
        writer.write(STREAM_HEAD)
        for index in range(0, len(raw), 7):
            writer.write(raw[index : index + 7])
            await writer.drain()
            await asyncio.sleep(0)

    found = asked(speak, STREAMED)
    assert isinstance(found, Answer)
    assert found.whole.text == "It is here"
    assert found.whole.completion_tokens == 3
    assert [e.text for e in found.whole.events] == ["It", " is", " here", "", ""]
    assert {e.answer_name for e in found.whole.events} == {"c-7"}
    times = [e.at_s for e in found.whole.events]
    assert times == sorted(times)
    assert 0 < times[0] <= found.seconds


def test_events_read_every_line_end_at_every_cut() -> None:
    raw = b'data: {"a":1}\r\n\r\ndata:{"b":2}\n\n: x\ndata: [DONE]\n\ndata: {"c":3}\n\n'
    for cut in range(len(raw)):
        events = Events()
        found = [*events.feed(raw[:cut]), *events.feed(raw[cut:])]
        assert found == [b'{"a":1}', b'{"b":2}']
        assert events.done
        assert not events.rest()


def test_a_stream_without_its_last_line_counts_if_it_gave_its_reason() -> None:
    found = asked(saying(STREAM_HEAD + event("It") + event("", reason="stop")), STREAMED)
    assert isinstance(found, Answer)
    assert found.whole.text == "It"


def test_reasoning_and_tool_calls_are_kept() -> None:
    message = {
        "content": None,
        "reasoning_content": "think ",
        "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    body = json.dumps({"id": "c", "choices": [{"message": message}]}).encode()
    found = asked(saying(http(body)))
    assert isinstance(found, Answer)
    assert found.whole.text == ""
    assert found.whole.aside == 'think {"x": 1}'
    assert found.whole.prompt_tokens is None


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long: 9 of 8"}},
        {"error": "too long: 9 of 8"},
        {"detail": "too long: 9 of 8"},
        {"object": "error", "message": "too long: 9 of 8"},
    ],
    ids=str,
)
def test_a_refusal_keeps_its_message(status: int, body: object) -> None:
    found = asked(saying(http(json.dumps(body).encode(), status)))
    assert isinstance(found, Refused)
    assert found.status == status
    assert found.message == "too long: 9 of 8"


async def slow(_request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(60)


async def silent(_request: Request, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def dripping(_request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    while True:
        writer.write(event("drip"))
        await writer.drain()
        await asyncio.sleep(0.01)


async def endless(_request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    while True:
        writer.write(event("flood" * 20_000))
        await writer.drain()


async def endless_line(_request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b"data: ")
    while True:
        writer.write(b"[" * 65536)
        await writer.drain()


GOOD = b"".join(stream(["a", "b"]))
HOSTILE: dict[str, tuple[Speak, str]] = {
    "html": (saying(http(b"<html>Welcome</html>")), "HTML"),
    "html error": (saying(http(b"<html>Bad gateway</html>", 502)), "502"),
    "html refusal": (saying(http(b"<html>Too large</html>", 413)), "413"),
    "empty": (saying(http(b"")), "not JSON|stream was cut"),
    "no JSON": (saying(http(b"{")), "not JSON|no stream|cut off|where a stream"),
    "latin-1": (
        saying(http('{"id": "\xe9"}'.encode("latin-1"))),
        "not JSON|no stream|cut off|where a stream",
    ),
    "utf-16": (
        saying(http('{"id": "x"}'.encode("utf-16"))),
        "not JSON|no stream|cut off|where a stream",
    ),
    "another shape": (saying(http(b"[1, 2]")), "another shape|no stream|cut off|where a stream"),
    "text is a number": (saying(http(b'{"choices":[{"text":1}]}')), "another shape|stream|cut off"),
    "no choice": (
        saying(http(b'{"choices":[]}')),
        "without a choice|no stream|cut off|where a stream",
    ),
    "negative count": (
        saying(http(completion("x", prompt_tokens=-1))),
        "another shape|no stream|cut off|where a stream",
    ),
    "deep": (
        saying(http(b"[" * 100_000)),
        "not JSON|another shape|no stream|cut off|where a stream",
    ),
    "200 with an error": (
        saying(http(b'{"error": {"message": "no"}}')),
        "200 with an error|no stream|cut off|where a stream",
    ),
    "cut off body": (
        saying(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"),
        "before it was complete",
    ),
    "cut off chunk": (
        saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n{}"),
        "before it was complete|not HTTP",
    ),
    "bad chunk": (
        saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"),
        "before it was complete|not HTTP",
    ),
    "no HTTP": (saying(b"220 mail ESMTP\r\n"), "not HTTP"),
    "long header": (saying(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n{}"), "not HTTP"),
    "closed": (saying(b""), "closed the connection"),
    "redirect": (saying(http(b"", 302, {"Location": "http://127.0.0.2:1/"})), "302"),
    "wants a key": (saying(http(b"{}", 401)), "key"),
    "no such model": (saying(refusal("no such model", 404)), "404"),
    "teapot": (saying(http(b"{}", 418)), "418"),
    "fails": (saying(refusal("oh", 500)), "500: it failed"),
    "gzip": (
        saying(http(gzip.compress(b" " * 50_000_000), headers={"Content-Encoding": "gzip"})),
        "compressed",
    ),
    "gzip unannounced": (
        saying(http(gzip.compress(b"{}"))),
        "not JSON|no stream|cut off|where a stream",
    ),
    "slow": (slow, "within 0.7 s"),
    "silent": (silent, "within 0.7 s"),
    "dripping": (dripping, "within 0.7 s"),
    "endless": (endless, "more than 8 MiB"),
    "endless line": (endless_line, "more than 8 MiB"),
}
BROKEN_STREAMS: dict[str, tuple[bytes, str]] = {
    "cut off": (event("a"), "cut off"),
    "half an event": (event("a", reason="stop")[:-9], "cut off"),
    "an error within": (event("a") + b'data: {"error": {"message": "x"}}\n\n', "ends in an error"),
    "no JSON": (event("a") + b"data: oh\n\n" + GOOD, "not JSON"),
    "HTML": (b"<html>\n</html>", "no stream"),
    "HTML within": (event("a") + b"data: <html>\n\n", "HTML"),
    "nothing": (b"", "cut off"),
    "only the end": (b"data: [DONE]\n\n", "without a choice"),
    "not UTF-8": (b'data: {"id": "\xff"}\n\n', "not JSON"),
}


def is_sentence(found: Outcome, pattern: str) -> None:
    assert isinstance(found, Inconclusive), found
    assert 10 < len(found.reason) < 120
    assert any(part in found.reason for part in pattern.split("|")), found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize("ask", [ASK, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_answer_is_inconclusive_with_a_sentence(name: str, ask: Ask) -> None:
    speak, pattern = HOSTILE[name]
    is_sentence(asked(speak, ask, timeout_s=0.7 if "within" in pattern else 60), pattern)


@pytest.mark.parametrize("name", BROKEN_STREAMS)
def test_a_broken_stream_is_inconclusive_and_keeps_what_came(name: str) -> None:
    raw, pattern = BROKEN_STREAMS[name]
    found = asked(saying(STREAM_HEAD + raw), STREAMED)
    is_sentence(found, pattern)
    assert isinstance(found, Inconclusive)
    if raw.startswith(event("a")):
        assert found.text == "a"


@pytest.mark.parametrize(
    ("speak", "ask"),
    [
        (saying(http(b"<html>7K3QD-M9XTR</html>", 502)), ASK),
        (saying(STREAM_HEAD + event("7K3Q") + event("D-M9XTR")), STREAMED),
        (saying(refusal("prompt 7K3QD-M9XTR is too long")), ASK),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n7K3QD-M9XTR"), ASK),
    ],
    ids=["an error page", "a cut stream", "a refusal", "a cut body"],
)
def test_what_a_bad_answer_held_is_kept_for_the_search(speak: Speak, ask: Ask) -> None:
    found = asked(speak, ask)
    assert not isinstance(found, Answer)
    assert any("7K3QD-M9XTR" in text for text in found.texts())


def test_nobody_there_is_inconclusive() -> None:
    async def main() -> Outcome:
        async with serving(saying(b"")) as server:
            pass
        async with endpoint(server) as found:
            return await found.ask(found.accounts[0], ASK)

    is_sentence(asyncio.run(main()), "refused or no such host")


# Rate limits


def limited(headers: list[dict[str, str]], status: int = 429) -> tuple[Speak, list[str]]:
    """Refuses as often as there are headers, then answers; notes who came."""
    came: list[str] = []
    left = list(headers)

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        came.append(request.account)
        writer.write(http(b"{}", status, left.pop(0)) if left else http(completion("ok")))

    return speak, came


def waits(speak: Speak, **options: Any) -> tuple[Outcome, list[float]]:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    return asked(speak, sleep=sleep, **options), slept


def test_429_is_obeyed_for_as_long_as_it_says() -> None:
    when = email.utils.formatdate(time.time() + 30, usegmt=True)
    headers = [{"Retry-After": "7"}, {"Retry-After": "0"}, {}, {"Retry-After": when}]
    speak, came = limited(headers)
    found, slept = waits(speak, backoff_s=0.5)
    assert isinstance(found, Answer)
    assert len(came) == 5
    assert slept[:3] == [7, 0, 2]
    assert 20 < slept[3] <= 30


def test_a_503_is_tried_again_only_if_it_says_when() -> None:
    speak, came = limited([{"Retry-After": "3"}], 503)
    found, slept = waits(speak)
    assert isinstance(found, Answer)
    assert slept == [3]
    speak, came = limited([{}], 503)
    found, slept = waits(speak)
    is_sentence(found, "503: it failed")
    assert (len(came), slept) == (1, [])


@pytest.mark.parametrize(("header", "tries"), [("99999999999", 1), ("3600", 1), ("1", 5)])
def test_it_does_not_wait_for_ever(header: str, tries: int) -> None:
    speak, came = limited([{"Retry-After": header}] * 20)
    found, slept = waits(speak)
    is_sentence(found, "429: it has had too many requests")
    assert (len(came), len(slept)) == (tries, tries - 1)


@pytest.mark.parametrize("header", ["soon", "-5", "", "1.5"])
def test_a_time_that_is_none_falls_back(header: str) -> None:
    speak, _ = limited([{"Retry-After": header}])
    found, slept = waits(speak, backoff_s=0.25)
    assert isinstance(found, Answer)
    assert slept == [0.25]


def test_all_requests_of_an_account_wait_and_the_other_account_does_not() -> None:
    release = asyncio.Event
    log: list[str] = []

    async def main() -> None:
        speak, came = limited([{"Retry-After": "5"}])
        gate = release()

        async def sleep(_seconds: float) -> None:
            log.append("waits")
            await gate.wait()

        async with serving(speak) as server, endpoint(server, sleep=sleep) as found:
            a, b = found.accounts
            first = asyncio.create_task(found.ask(a, ASK))
            while not log:
                await asyncio.sleep(0.001)
            second = asyncio.create_task(found.ask(a, ASK))
            assert isinstance(await found.ask(b, ASK), Answer)
            assert came == ["A", "B"]
            gate.set()
            assert isinstance(await first, Answer)
            assert isinstance(await second, Answer)
            assert came == ["A", "B", "A", "A"]

    asyncio.run(main())


# Budgets


def test_no_request_is_sent_above_the_budget() -> None:
    async def main() -> None:
        async with serving(saying(http(completion("ok")))) as server:
            async with endpoint(server, budget=Budget(requests_max=2)) as found:
                outcomes = [await found.ask(found.accounts[0], ASK) for _ in range(3)]
                assert [type(one) for one in outcomes] == [Answer, Answer, Inconclusive]
                is_sentence(outcomes[2], "budget of 2 requests")
                assert await found.models(found.accounts[0]) == {}
            assert len(server.requests) == 2
            async with endpoint(server, budget=Budget(tokens_max=11)) as found:
                is_sentence(await found.ask(found.accounts[0], ASK), "budget of 11 tokens")
            assert len(server.requests) == 2

    asyncio.run(main())


def test_what_was_not_used_comes_back() -> None:
    async def main() -> None:
        async with serving(saying(http(completion("ok ok")))) as server, endpoint(server) as found:
            await found.ask(found.accounts[0], ASK)
            assert found.purse.spent == Cost(1, 5, 2)
        async with serving(saying(refusal("no"))) as server, endpoint(server) as found:
            await found.ask(found.accounts[0], ASK)
            assert found.purse.spent == Cost(1)
        async with serving(saying(http(b"{"))) as server, endpoint(server) as found:
            await found.ask(found.accounts[0], ASK)
            assert found.purse.spent == Cost(1, estimate_tokens(ASK.prompt), 8)

    asyncio.run(main())


def test_a_retry_is_paid_too() -> None:
    speak, came = limited([{"Retry-After": "0"}] * 4)
    found, _ = waits(speak, budget=Budget(requests_max=3))
    is_sentence(found, "budget of 3 requests")
    assert len(came) == 3


def test_money_is_counted_by_both_prices() -> None:
    prices = Prices(prompt_per_million=2, answer_per_million=10)
    cost = Cost(3, 1_000_000, 200_000)
    assert cost.money(prices) == 4
    assert cost.times(2).money(prices) == 8
    assert Budget(money_max=4, prices=prices).refuses(cost) == ""
    assert "3.99" in Budget(money_max=3.99, prices=prices).refuses(cost)
    purse = Purse(Budget(money_max=4, prices=prices))
    assert purse.take(cost) == ""
    assert purse.take(Cost(1, 1, 0)) != ""
    assert purse.spent == cost


@pytest.mark.parametrize(
    "options",
    [
        {"requests_max": 0},
        {"tokens_max": -1},
        {"concurrency_max": 0},
        {"money_max": 1.0},
        {"money_max": float("nan"), "prices": Prices(prompt_per_million=1, answer_per_million=1)},
        {"prices": Prices(prompt_per_million=-1, answer_per_million=1)},
    ],
    ids=str,
)
def test_a_budget_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"budget|money"):
        Budget(**options)


def test_no_more_requests_are_open_than_allowed() -> None:
    open_now, most = 0, 0

    async def speak(_request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        writer.write(http(completion("ok")))

    async def main() -> None:
        budget = Budget(concurrency_max=3)
        async with serving(speak) as server, endpoint(server, budget=budget) as found:
            await asyncio.gather(*(found.ask(found.accounts[i % 2], ASK) for i in range(12)))

    asyncio.run(main())
    assert most == 3


def test_cancelling_cuts_the_connection() -> None:
    cut = asyncio.Event

    async def main() -> None:
        came, gone = cut(), cut()

        async def speak(_request: Request, writer: asyncio.StreamWriter) -> None:
            try:
                writer.write(STREAM_HEAD)
                while True:
                    writer.write(event("x"))
                    await writer.drain()
                    came.set()
                    await asyncio.sleep(0.001)
            except OSError:
                gone.set()

        async with serving(speak) as server, endpoint(server) as found:
            task = asyncio.create_task(found.ask(found.accounts[0], STREAMED))
            await came.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(gone.wait(), 30)

    asyncio.run(main())


# Models and keys


def test_models_are_read_with_their_window() -> None:
    async def main(body: bytes, status: int = 200) -> dict[str, int | None]:
        async with serving(saying(http(body, status))) as server, endpoint(server) as found:
            return await found.models(found.accounts[0])

    listed = {"data": [{"id": "toy", "max_model_len": 4096}, {"id": "other"}]}
    assert asyncio.run(main(json.dumps(listed).encode())) == {"toy": 4096, "other": None}
    for bad in (b"<html>", b"{}", b'{"data": [{"id": 1}]}', b"\xff"):
        assert asyncio.run(main(bad)) == {}


def test_a_key_is_in_no_text_and_goes_to_its_own_requests_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)

    async def echo(request: Request, writer: asyncio.StreamWriter) -> None:
        shown = f"{request.headers['authorization']} and {KEY_A} and {KEY_B}"
        if request.prompt == "error":
            writer.write(refusal(shown))
        elif request.fields.get("stream"):
            writer.write(STREAM_HEAD + b"".join(stream([shown, "x"])))
        else:
            writer.write(http(completion(shown), 500 if request.prompt == "fail" else 200))

    async def main() -> list[object]:
        async with serving(echo) as server, endpoint(server) as found:
            seen: list[object] = [found, found.accounts, found.accounts[0].key, repr(found)]
            for account in found.accounts:
                for prompt in ("error", "fail", "fine"):
                    ask = Ask(prompt=prompt, answer_tokens=4)
                    seen.append(await found.ask(account, ask))
                seen.append(await found.ask(account, STREAMED))
            assert [request.account for request in server.requests] == ["A"] * 4 + ["B"] * 4
            return seen

    text = repr(asyncio.run(main())) + caplog.text
    assert "redacted" in text
    assert KEY_A not in text
    assert KEY_B not in text


def test_a_key_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "b.key").write_text(f"{KEY_B}\n")
    key = read_key("", "b.key", {}, tmp_path)
    assert key is not None
    assert key.header() == f"Bearer {KEY_B}"
    assert KEY_B not in repr(Account("B", key))
    with pytest.raises(ClaimError):
        read_key("MISSING", "", {}, tmp_path)


@pytest.mark.parametrize("url", ["http://user:pw@host/v1", "ftp://host", "http://host/v1?key=x"])
def test_a_url_that_could_hold_a_key_is_refused(url: str) -> None:
    with pytest.raises(ClaimError) as raised:
        Endpoint(url, "m", accounts())
    assert "pw" not in str(raised.value)


def test_two_accounts_are_two() -> None:
    with pytest.raises(ValueError, match="two names"):
        Endpoint("http://host/v1", "m", (Account("A", None), Account("A", None)))
