"""Answers, whole and streamed; what the backend is asked; failures before and within a stream."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx2
import pytest

from gateway_kit import (
    MODEL,
    Gateway,
    ScriptedBackend,
    Step,
    error_of,
    events,
    fail,
    info,
    open_gateway,
    say,
)
from sekisho.core.outcome import CODES
from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = open_gateway(tmp_path_factory.mktemp("gateway"), ScriptedBackend())
    yield gateway
    gateway.store.close()


@pytest.fixture
def gateway(opened: Gateway) -> Gateway:
    opened.backend.reset()
    return opened


def content(chunks: list[Any]) -> str:
    deltas = [choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


def test_a_whole_chat_answer(gateway: Gateway) -> None:
    gateway.backend.script = say("Hel", "lo", cached=3)
    body = gateway.chat().json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


def test_a_streamed_chat_answer(gateway: Gateway) -> None:
    gateway.backend.script = say("Hel", "lo", code="length")
    response = gateway.chat(stream=True, stream_options={"include_usage": True})
    chunks = events(response)
    assert chunks[-1] == "[DONE]"
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
    assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}
    choices = [chunk["choices"] for chunk in chunks[:-1]]
    assert [each[0]["delta"] for each in choices[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    reasons = [each[0]["finish_reason"] for each in choices[:-1]]
    assert reasons == [None, None, None, "length"]
    assert choices[-1] == []
    assert [chunk["usage"] for chunk in chunks[:-2]] == [None] * 4
    assert chunks[-2]["usage"]["total_tokens"] == 7


def test_usage_chunk_only_if_asked_for(gateway: Gateway) -> None:
    for options in ({}, {"stream_options": {"include_usage": False}}):
        chunks = events(gateway.chat(stream=True, **options))
        assert all("usage" not in chunk for chunk in chunks[:-1])
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_half_a_character_is_not_a_chunk(gateway: Gateway) -> None:
    def script(request: int, params: SamplingParams) -> Iterable[Step]:
        yield Delta(request, 0, [5], "", [])
        yield Delta(request, 1, [6], "é", [])
        yield Ended(request, "stop", "", 2, 0)

    gateway.backend.script = script
    chunks = events(gateway.chat(stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "é"},
        {},
    ]


def test_an_empty_answer(gateway: Gateway) -> None:
    gateway.backend.script = say()
    assert gateway.chat().json()["choices"][0]["message"]["content"] == ""
    assert content(events(gateway.chat(stream=True))) == ""


def test_an_end_of_sequence_token_is_counted_and_not_shown(gateway: Gateway) -> None:
    gateway.backend.script = steps(
        lambda r: Delta(r, 0, [5], "x", []),
        lambda r: Delta(r, 1, [], "y", []),
        lambda r: Ended(r, "stop", "", 2, 0),
    )
    body = gateway.chat().json()
    assert body["choices"][0]["message"]["content"] == "xy"
    assert body["usage"]["completion_tokens"] == 2


def test_chat_logprobs(gateway: Gateway) -> None:
    gateway.backend.script = say("é")
    body = gateway.chat(logprobs=True, top_logprobs=2).json()
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                {"token": "\ufffd", "logprob": -9999.0, "bytes": [226, 130]},
            ],
        }
    ]
    streamed = events(gateway.chat(stream=True, logprobs=True))
    assert streamed[1]["choices"][0]["logprobs"]["content"][0]["token"] == "é"
    assert [call.params.logprobs for call in gateway.backend.calls] == [2, 0]


def test_completion_logprobs_and_offsets(gateway: Gateway) -> None:
    def script(request: int, params: SamplingParams) -> Iterable[Step]:
        for index, text in enumerate(("ab", "é", "c")):
            yield Delta(request, index, [5], text, [info(text)])
        yield Ended(request, "stop", "", 3, 0)

    gateway.backend.script = script
    whole = gateway.complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["ab", "é", "c"]
    assert whole["text_offset"] == [0, 2, 3]
    assert whole["token_logprobs"] == [-0.5] * 3
    assert whole["top_logprobs"][1] == {"é": -0.5, "bytes:\\xe2\\x82": -9999.0}
    streamed = events(gateway.complete(logprobs=2, stream=True))
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in streamed[:3]]
    assert offsets == [[0], [2], [3]]


def test_a_whole_and_a_streamed_completion(gateway: Gateway) -> None:
    body = gateway.complete().json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice]
    chunks = events(gateway.complete(stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["Hel", "lo", ""]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_forms_of_a_prompt(gateway: Gateway, prompt: object, tokens: list[list[int]]) -> None:
    body = gateway.complete(prompt=prompt).json()
    assert [call.tokens for call in gateway.backend.calls] == tokens
    assert [choice["index"] for choice in body["choices"]] == list(range(len(tokens)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert body["usage"]["completion_tokens"] == 2 * len(tokens)


def test_every_choice_is_a_request_of_its_own(gateway: Gateway) -> None:
    def script(request: int, params: SamplingParams) -> Iterable[Step]:
        return say(*f"r{request}", cached=1)(request, params)

    gateway.backend.script = script
    body = gateway.complete(prompt=["a", "b"], n=2, seed=9).json()
    assert [choice["text"] for choice in body["choices"]] == ["r1", "r2", "r3", "r4"]
    seeds = [call.params.seed for call in gateway.backend.calls]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] == 9 != seeds[1]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    gateway.backend.reset()
    gateway.backend.script = script
    chunks = events(gateway.chat(n=3, seed=9, stream=True))
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == f"r{index + 1}"
        assert [c["finish_reason"] for c in mine] == [None, None, None, "stop"]
    assert [call.params.seed for call in gateway.backend.calls][:2] == seeds[:2]


def test_a_seed_is_drawn_anew_where_none_is_given(gateway: Gateway) -> None:
    gateway.complete(prompt=["a", "a"], n=2)
    gateway.complete()
    seeds = {call.params.seed for call in gateway.backend.calls}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_parameters_reach_the_backend(gateway: Gateway) -> None:
    gateway.chat(
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        stop=["a", "bc"],
    )
    gateway.chat(stop="x", temperature=1e-9, max_tokens=3)
    gateway.complete()
    first, second, third = (call.params for call in gateway.backend.calls)
    assert first == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        logit_bias={5: -100.0, 6: 1.5},
        stop=("a", "bc"),
        stop_token_ids=(0, 1),
    )
    assert (second.stop, second.temperature, second.max_tokens) == (("x",), 0.0, 3)
    defaults = SamplingParams(max_tokens=198, seed=third.seed, stop_token_ids=(0, 1))
    assert third == defaults
    assert {call.scope for call in gateway.backend.calls} == {f"tenant:{gateway.tenant.id}"}


FAILURES = sorted(code for code, (_, status) in CODES.items() if status != 200)
SECRET = "page 7 of lease 00ab.1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", FAILURES)
def test_a_failure_before_the_first_token_has_its_status(
    gateway: Gateway, code: str, stream: bool
) -> None:
    gateway.backend.script = fail(code, SECRET)
    response = gateway.chat(stream=stream)
    kind, status = CODES[code]
    assert response.status_code == status
    error = error_of(response)
    assert error["code"] == code
    assert (SECRET in error["message"]) == (kind == "rejected")
    assert ("retry-after" in response.headers) == (status in {429, 503})
    if status >= 500:
        assert response.headers["x-request-id"] in error["message"]
        assert error["type"] == "server_error"
    assert gateway.backend.closed == [1]


@pytest.mark.parametrize("code", ["node_lost", "ownership_violation", "queue_full"])
def test_a_failure_within_a_stream_is_an_error_event_and_the_end(
    gateway: Gateway, code: str
) -> None:
    gateway.backend.script = fail(code, SECRET, after=("Hel",))
    chunks = events(gateway.chat(stream=True))
    assert chunks[-1].keys() == {"error"}
    assert chunks[-1]["error"]["code"] == code
    assert "[DONE]" not in chunks
    reasons = [choice["finish_reason"] for c in chunks[:-1] for choice in c["choices"]]
    assert reasons == [None, None]
    response = gateway.chat()
    assert response.status_code == CODES[code][1]
    assert error_of(response)["code"] == code


def test_one_failed_choice_fails_the_request_and_aborts_the_others(gateway: Gateway) -> None:
    def script(request: int, params: SamplingParams) -> Iterable[Step]:
        steps = fail("node_lost") if request == 2 else say(*"abcdefgh")
        return steps(request, params)

    gateway.backend.script = script
    assert gateway.chat(n=3).status_code == 503
    assert sorted(gateway.backend.closed) == [1, 2, 3]


def deltas(*parts: tuple[int, int]) -> Callable[[int, SamplingParams], Iterable[Step]]:
    """Deltas of (offset from the own request number, index), then a finish."""

    def script(request: int, params: SamplingParams) -> Iterable[Step]:
        for offset, index in parts:
            yield Delta(request + offset, index, [5], "x", [])
        yield Ended(request, "stop", "", len(parts), 0)

    return script


def steps(*make: Callable[[int], Step]) -> Callable[[int, SamplingParams], Iterable[Step]]:
    return lambda request, params: [each(request) for each in make]


CROSSED = {
    "gap": deltas((0, 0), (0, 2)),
    "repeat": deltas((0, 0), (0, 0)),
    "starts late": deltas((0, 3)),
    "foreign delta": deltas((0, 0), (1, 1)),
    "foreign end": steps(
        lambda r: Delta(r, 0, [5], "x", []), lambda r: Ended(r + 1, "stop", "", 1, 0)
    ),
    "lost last delta": steps(
        lambda r: Delta(r, 0, [5], "x", []), lambda r: Ended(r, "length", "", 2, 0)
    ),
    "lost two deltas": steps(
        lambda r: Delta(r, 0, [5], "x", []), lambda r: Ended(r, "stop", "", 3, 0)
    ),
    "fewer than came": steps(
        lambda r: Delta(r, 0, [5], "x", []), lambda r: Ended(r, "stop", "", 0, 0)
    ),
    "no end": steps(lambda r: Delta(r, 0, [5], "x", [])),
    "nothing": steps(),
    "unknown outcome": steps(lambda r: Ended(r, "fine", "", 0, 0)),
    "more than asked for": steps(
        lambda r: Delta(r, 0, [5] * 4, "xxxx", []), lambda r: Ended(r, "length", "", 4, 0)
    ),
    "exception": steps(lambda r: Delta(r, 0, [5], "x", []), lambda r: ValueError("the prompt")),
}


@pytest.mark.parametrize("name", CROSSED)
def test_a_crossed_stream_ends_in_an_error(
    gateway: Gateway, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.backend.script = CROSSED[name]
    response = gateway.chat(max_tokens=3)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "prompt" not in error_of(response)["message"]
    assert "the prompt" not in caplog.text
    streamed = gateway.chat(max_tokens=3, stream=True)
    if streamed.status_code == 200:
        chunks = events(streamed)
        assert chunks[-1]["error"]["code"] == "internal_error"
        assert content(chunks).count("x") <= 1
    else:
        assert error_of(streamed)["code"] == "internal_error"


def test_missing_logprobs_end_in_an_error(gateway: Gateway) -> None:
    gateway.backend.script = deltas((0, 0))
    assert gateway.chat(logprobs=True).status_code == 500


def test_two_streams_of_one_request_number_end_in_an_error(gateway: Gateway) -> None:
    def script(request: int, params: SamplingParams) -> Iterable[Step]:
        return say("a", "b")(77, params)

    gateway.backend.script = script
    assert gateway.chat(n=2).status_code == 500
    assert gateway.chat().status_code == 200  # both are over: the number is free again


def test_the_access_line_says_numbers_and_no_text(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway.backend.script = say("SECRET-answer")
    responses: list[httpx2.Response] = [
        gateway.chat(messages=[{"role": "user", "content": "SECRET-prompt"}]),
        gateway.chat(stream=True, messages=[{"role": "user", "content": "SECRET-prompt"}]),
        gateway.chat(model="SECRET-model"),
        gateway.request("GET", "/SECRET-path?SECRET-query", headers={"x-request-id": "SECRET"}),
    ]
    lines = [r.getMessage() for r in caplog.records if r.name == "sekisho.access"]
    assert len(lines) == 4
    for line, response in zip(lines, responses, strict=True):
        assert f"request={response.headers['x-request-id']} " in line
        assert f" status={response.status_code} " in line
    assert f"tenant={gateway.tenant.id} endpoint=chat_completions" in lines[0]
    assert " code=ok prompt_tokens=16 completion_tokens=1 ms=" in lines[0]
    assert " code=ok prompt_tokens=16 completion_tokens=1 ms=" in lines[1]
    assert " code=model_not_found " in lines[2]
    assert "tenant=- endpoint=- status=404 code=not_found" in lines[3]
    mine = [r.getMessage() for r in caplog.records if r.name.startswith("sekisho")]
    assert "SECRET" not in json.dumps(mine)
    assert gateway.key not in json.dumps(mine)


def test_the_evidence_of_a_failure_is_in_the_log(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.backend.script = fail("ownership_violation", SECRET, after=("x",))
    response = gateway.chat(stream=True)
    assert SECRET not in response.text
    request = response.headers["x-request-id"]
    assert f"request={request} code=ownership_violation {SECRET}" in caplog.text


def test_an_unforeseen_exception_is_500_without_detail(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> int:
        raise RuntimeError("SECRET")

    monkeypatch.setattr(gateway.backend, "tokens_max", broken)
    response = gateway.chat()
    assert response.status_code == 500
    error = error_of(response)
    assert error["code"] == "internal_error"
    assert response.headers["x-request-id"] in error["message"]
    assert "SECRET" not in response.text + caplog.text
    assert "RuntimeError at " in caplog.text
