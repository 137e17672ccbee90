"""Every bad input is a 4xx in the OpenAI format that names the field, with nothing reserved."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from gateway_kit import (
    MODEL,
    VOCAB,
    Gateway,
    ScriptedBackend,
    chat_body,
    error_of,
    open_gateway,
    say,
)

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = open_gateway(tmp_path_factory.mktemp("gateway"), ScriptedBackend())
    yield gateway
    gateway.store.close()


@pytest.fixture
def gateway(opened: Gateway) -> Gateway:
    opened.backend.reset()
    return opened


def refused(gateway: Gateway, response: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status
    assert gateway.backend.calls == []
    error = error_of(response)
    assert "Traceback" not in error["message"]
    return error


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "param", "code", "words"),
    [
        ({"temperature": -0.1}, "temperature", "invalid_value", "greater than or equal to 0"),
        ({"temperature": 2.1}, "temperature", "invalid_value", "less than or equal to 2"),
        ({"temperature": NAN}, "temperature", "invalid_value", "finite"),
        ({"temperature": INFINITY}, "temperature", "invalid_value", "finite"),
        ({"temperature": "1"}, "temperature", "invalid_value", "valid number"),
        ({"temperature": True}, "temperature", "invalid_value", "valid number"),
        ({"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
        ({"top_p": 1.5}, "top_p", "invalid_value", "less than or equal to 1"),
        ({"top_p": -INFINITY}, "top_p", "invalid_value", "finite"),
        ({"top_k": -1}, "top_k", "invalid_value", "greater than or equal to 0"),
        ({"top_k": 1.0}, "top_k", "invalid_value", "valid integer"),
        ({"min_p": 2}, "min_p", "invalid_value", "less than or equal to 1"),
        ({"seed": -1}, "seed", "invalid_value", "greater than or equal to 0"),
        ({"seed": 2**64}, "seed", "invalid_value", "less than or equal to 18446744073709551615"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value", "equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value", "equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value", "equal to 0.01"),
        ({"repetition_penalty": NAN}, "repetition_penalty", "invalid_value", "finite"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value", "greater than or equal to 1"),
        ({"max_tokens": -5}, "max_tokens", "invalid_value", "greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens", "invalid_value", "valid integer"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens", "invalid_value", "integer"),
        (
            {"max_tokens": 1, "max_completion_tokens": 1},
            "max_tokens",
            "invalid_value",
            "max_completion_tokens",
        ),
        ({"n": 0}, "n", "invalid_value", "greater than or equal to 1"),
        ({"n": 9}, "n", "invalid_value", "less than or equal to 8"),
        ({"stream": "true"}, "stream", "invalid_value", "boolean"),
        ({"stream": 1}, "stream", "invalid_value", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "stream"),
        (
            {"stream": True, "stream_options": {"x": 1}},
            "stream_options.x",
            "unknown_parameter",
            "not a known field",
        ),
        ({"stop": ""}, "stop", "invalid_value", "1 to 1024"),
        ({"stop": ["a", ""]}, "stop", "invalid_value", "1 to 1024"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value", "at most 4"),
        ({"stop": ["a", 1]}, "stop", "invalid_value", "list of strings"),
        ({"stop": {"a": 1}}, "stop", "invalid_value", "list of strings"),
        ({"stop": "x" * 1025}, "stop", "invalid_value", "1 to 1024"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_value", "object"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", "not a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value", "not a token id"),
        ({"logit_bias": {"01": 1}}, "logit_bias", "invalid_value", "not a token id"),
        ({"logit_bias": {"١": 1}}, "logit_bias", "invalid_value", "not a token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value", "-100 to 100"),
        ({"logit_bias": {"1": NAN}}, "logit_bias", "invalid_value", "-100 to 100"),
        ({"logit_bias": {"1": True}}, "logit_bias", "invalid_value", "-100 to 100"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", "invalid_value", str(VOCAB - 1)),
        ({"logprobs": 1}, "logprobs", "invalid_value", "boolean"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "equal to 20"),
        ({"user": 7}, "user", "invalid_value", "string"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_value", "string"),
        ({"messages": []}, "messages", "invalid_value", "at least 1"),
        ({"messages": None}, "messages", "invalid_value", "list"),
        ({"messages": "Hi"}, "messages", "invalid_value", "list"),
        ({"messages": ["Hi"]}, "messages[0]", "invalid_value", ""),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", ""),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter", ""),
        (message(role="tool"), "messages[0].role", "invalid_value", "assistant"),
        (message(role="User"), "messages[0].role", "invalid_value", "assistant"),
        (message(role=["user"]), "messages[0].role", "invalid_value", "assistant"),
        (message(content=None), "messages[0].content", "invalid_value", "text parts"),
        (message(content=7), "messages[0].content", "invalid_value", "text parts"),
        (message(content=[]), "messages[0].content", "invalid_value", "not empty"),
        (message(content=["x"]), "messages[0].content", "invalid_value", "part 0"),
        (
            message(content=[{"type": "text", "text": 1}]),
            "messages[0].content",
            "invalid_value",
            "part 0",
        ),
        (
            message(
                content=[{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]
            ),
            "messages[0].content",
            "unsupported_parameter",
            "part 1",
        ),
        (
            message(content=[{"type": "text", "text": "x", "cache_control": {}}]),
            "messages[0].content",
            "unsupported_parameter",
            "part 0",
        ),
        (message(name="Bob"), "messages[0].name", "unsupported_parameter", "not supported"),
        (message(tool_calls=[{}]), "messages[0].tool_calls", "unsupported_parameter", ""),
        (message(weight=1), "messages[0].weight", "unknown_parameter", "not a known field"),
        ({"messages": [*HI, {"role": "x"}]}, "messages[1].role", "invalid_value", ""),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "messages",
            "invalid_value",
            "begin",
        ),
        ({"model": None}, "model", "invalid_value", "string"),
        ({"model": 1}, "model", "invalid_value", "string"),
        ({"colour": 1}, "colour", "unknown_parameter", "not a known field"),
        ({"session_id": "x"}, "session_id", "unknown_parameter", "not a known field"),
        ({"prompt": "x"}, "prompt", "unknown_parameter", "not a known field"),
    ],
)
def test_chat_names_the_field_and_the_limit(
    gateway: Gateway, fields: dict[str, Any], param: str, code: str, words: str
) -> None:
    error = refused(gateway, gateway.chat(**fields))
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param.split("[", maxsplit=1)[0])
    assert words in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("cache_salt", "mine"),
        ("prompt_cache_key", "mine"),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("store", True),
        ("service_tier", "flex"),
    ],
)
def test_what_would_change_the_meaning_is_refused(
    gateway: Gateway, field: str, value: object
) -> None:
    error = refused(gateway, gateway.chat(**{field: value}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_what_changes_nothing_is_accepted(gateway: Gateway) -> None:
    nulls: list[str] = [
        "tools",
        "functions",
        "audio",
        "prediction",
        "n",
        "seed",
        "stop",
        "logit_bias",
    ]
    harmless: dict[str, Any] = {
        **dict.fromkeys(nulls),
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "metadata": {"a": "b"},
        "user": "u",
        "messages": [
            {"role": "developer", "content": "Be brief", "name": None},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
            {"role": "user", "content": ""},
        ],
    }
    assert gateway.chat(**harmless).status_code == 200
    (call,) = gateway.backend.calls
    assert "".join(map(chr, call.tokens)) == "<s>Be brief<u>a\nb<a>c<u>"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [""]}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": [1, True]}, "prompt", "invalid_value"),
        ({"prompt": [1.0]}, "prompt", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [VOCAB]}, "prompt", "invalid_value"),
        ({"prompt": [[1], [10**30]]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 65, "n": 2}, "n", "invalid_value"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"best_of": True}, "best_of", "unsupported_parameter"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"messages": HI}, "messages", "unknown_parameter"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
    ],
)
def test_completions_name_the_field(
    gateway: Gateway, fields: dict[str, Any], param: str, code: str
) -> None:
    error = refused(gateway, gateway.complete(**fields))
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"),
        (b"null", "invalid_json"),
        (b"{'model': 1}", "invalid_json"),
        (chat_body()[:-1] + b',"n":1,"n":2}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (chat_body() + b"x", "invalid_json"),
        (b"\xef\xbb\xbf" + chat_body(), "invalid_json"),
        (b'{"model": "\xff"}', "invalid_utf8"),
        (chat_body().decode().encode("utf-16"), "invalid_utf8"),
        (b'{"model": "\xed\xa0\x80"}', "invalid_utf8"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "invalid_unicode"),
        (b'{"prompt":"\\uDFFF x"}', "invalid_unicode"),
        (b'{"a\\ud800": 1}', "invalid_unicode"),
        (b'{"logit_bias":{"\\ud83d":1}}', "invalid_unicode"),
    ],
)
def test_a_broken_body_is_400(gateway: Gateway, body: bytes, code: str) -> None:
    for path in (CHAT, "/v1/completions"):
        assert refused(gateway, gateway.request("POST", path, content=body))["code"] == code


def test_a_paired_surrogate_escape_is_text(gateway: Gateway) -> None:
    body = (
        b'{"model":"%s","messages":[{"role":"user","content":"\\ud83d\\ude00"}]}' % MODEL.encode()
    )
    assert gateway.request("POST", CHAT, content=body).status_code == 200
    assert gateway.backend.calls[0].tokens[-1] == 0x1F600


def test_deep_nesting_within_a_field_is_400(gateway: Gateway) -> None:
    deep: object = "\\ud83d"
    for _ in range(400):
        deep = [deep]
    assert refused(gateway, gateway.chat(stop=deep))["param"] == "stop"


def test_the_unknown_name_is_echoed_clipped_and_printable(gateway: Gateway) -> None:
    error = refused(gateway, gateway.chat(**{"é\n" + "x" * 1000: 1}))
    assert error["param"] == "\\xe9\\n" + "x" * 62


@pytest.mark.parametrize(
    ("content", "declared"), [(b" " * (32 * 2**20 + 1), None), (b"{}", "9" * 30)]
)
def test_too_large_a_body_is_413(gateway: Gateway, content: bytes, declared: str | None) -> None:
    headers = {} if declared is None else {"content-length": declared}
    response = gateway.request("POST", CHAT, content=content, headers=headers)
    assert refused(gateway, response, 413)["code"] == "request_too_large"


def test_too_large_a_body_without_declared_length_is_413(gateway: Gateway) -> None:
    async def parts() -> Any:
        for _ in range(33):
            yield b" " * 2**20

    response = gateway.request("POST", CHAT, content=parts())
    assert refused(gateway, response, 413)["code"] == "request_too_large"


def test_an_unknown_model_is_404(gateway: Gateway) -> None:
    for response in (
        gateway.chat(model="gpt-x"),
        gateway.complete(model=""),
        gateway.request("GET", "/v1/models/gpt-x"),
    ):
        error = refused(gateway, response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_wrong_route_or_method(
    gateway: Gateway, method: str, path: str, status: int, code: str
) -> None:
    response = gateway.request(method, path)
    assert refused(gateway, response, status)["code"] == code
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic sk-sekisho-x",
        "Bearer sk-sekisho-x",
        "Bearer sk-sekisho-" + "A" * 43,
        "Bearer sk-sekisho-" + "é" * 43,
        "Bearer " + "x" * 5000,
    ],
)
def test_a_bad_key_is_401_before_anything_else(gateway: Gateway, header: str) -> None:
    headers = {"authorization": header.encode("latin-1")}
    for method, path in (("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models")):
        response = gateway.request(method, path, headers=headers)
        assert refused(gateway, response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_a_revoked_key_ends_at_once(gateway: Gateway) -> None:
    key = gateway.store.create_key(gateway.tenant)
    headers = {"authorization": f"Bearer {key}"}
    assert gateway.request("GET", "/v1/models", headers=headers).status_code == 200
    gateway.store.revoke(key)
    response = gateway.request("GET", "/v1/models", headers=headers)
    assert refused(gateway, response, 401)["code"] == "invalid_api_key"


def test_an_overlong_prompt_is_refused_with_both_numbers(gateway: Gateway) -> None:
    # 200 tokens at most; a chat turn costs 3 more than its content.
    for content, total in (("x" * 197, 200), ("x" * 9997, 10_000)):
        error = refused(gateway, gateway.chat(messages=[{"role": "user", "content": content}]))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "200 tokens" in error["message"]
        assert f"{total} tokens" in error["message"]
    error = refused(gateway, gateway.complete(prompt=["ok", "x" * 200]))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = refused(gateway, gateway.complete(prompt=[5] * 201))
    assert "201 tokens" in error["message"]


def test_the_longest_prompt_that_fits_is_served(gateway: Gateway) -> None:
    gateway.backend.script = say("x", code="length")
    assert gateway.chat(messages=[{"role": "user", "content": "x" * 196}]).status_code == 200
    assert gateway.complete(prompt="x" * 199).status_code == 200
    assert [call.params.max_tokens for call in gateway.backend.calls] == [1, 1]


def test_an_answer_that_cannot_fit_is_refused_and_not_cut(gateway: Gateway) -> None:
    error = refused(gateway, gateway.complete(prompt="x" * 100, max_tokens=101))
    assert error["code"] == "context_length_exceeded"
    assert "100 tokens" in error["message"]
    assert "101 tokens" in error["message"]
    assert refused(gateway, gateway.chat(max_completion_tokens=196))["param"] == "messages"
    assert gateway.complete(prompt="x" * 100, max_tokens=100).status_code == 200
    assert gateway.complete(prompt="x" * 100).status_code == 200
    assert [call.params.max_tokens for call in gateway.backend.calls] == [100, 100]


@pytest.mark.parametrize("limit_and_ready", [(0, True), (200, False)])
def test_not_ready_is_503_with_retry_after(
    gateway: Gateway, limit_and_ready: tuple[int, bool]
) -> None:
    gateway.backend.limit, gateway.backend.is_ready = limit_and_ready
    for response in (gateway.chat(), gateway.request("GET", "/health/readiness")):
        assert refused(gateway, response, 503)["code"] == "not_ready"
        assert int(response.headers["retry-after"]) > 0
    assert gateway.request("GET", "/health/liveness").status_code == 200
    assert refused(gateway, gateway.chat(n=0))["param"] == "n"


def test_nodes_below_the_window_are_503_for_every_length_and_the_probe_says_why(
    gateway: Gateway,
) -> None:
    gateway.backend.refused = "prefill-0.2: prefill holds 64 tokens, 200 are advertised"
    for prompt in ("Hi", "x" * 5000):
        response = gateway.complete(prompt=prompt)
        error = refused(gateway, response, 503)
        assert (error["code"], "prefill-0.2" in error["message"]) == ("not_ready", False)
    probe = gateway.request("GET", "/health/readiness", headers={"authorization": ""})
    assert refused(gateway, probe, 503)["message"].startswith(gateway.backend.refused)
    shown = gateway.request("GET", "/health/capacity", headers={"authorization": ""}).json()
    assert shown["ready"] is False


def test_capacity_shows_pools_without_a_key_and_names_no_tenant(gateway: Gateway) -> None:
    response = gateway.request("GET", "/health/capacity", headers={"authorization": ""})
    node = {
        "name": "colocated-0.1",
        "role": "both",
        "pool_tokens": 256,
        "page_size": 16,
        "pages": 16,
        "tokens_max": 200,
    }
    assert response.json() == {
        "model": MODEL,
        "ready": True,
        "window": None,
        "missing": [],
        "nodes": [node],
    }


def test_a_client_cannot_choose_the_request_id(gateway: Gateway) -> None:
    response = gateway.request("GET", "/v1/models", headers={"x-request-id": "req_mine"})
    assert response.headers["x-request-id"] != "req_mine"
    other = gateway.request("GET", "/v1/models")
    assert response.headers["x-request-id"] != other.headers["x-request-id"]


def test_models_and_health(gateway: Gateway) -> None:
    listed = gateway.request("GET", "/v1/models").json()
    expected = {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "sekisho",
        "max_model_len": 200,
    }
    assert listed == {"object": "list", "data": [expected]}
    assert gateway.request("GET", f"/v1/models/{MODEL}").json() == expected
    for path in ("/health", "/health/liveness", "/health/readiness"):
        assert gateway.request("GET", path, headers={"authorization": ""}).status_code == 200
    assert json.loads(gateway.request("GET", "/health/readiness").text) == {"status": "ready"}
