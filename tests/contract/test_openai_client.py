"""The official client against a real server on loopback, as a customer's program would use it."""

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import openai
import pytest
import uvicorn

from gateway_kit import (
    MODEL,
    Gateway,
    Hold,
    ScriptedBackend,
    Step,
    fail,
    open_gateway,
    say,
)
from sekisho.core.outcome import CODES
from sekisho.engine.output import Delta
from sekisho.engine.params import SamplingParams

HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@contextmanager
def served(gateway: Gateway) -> Iterator[str]:
    """The base URL of the gateway under uvicorn, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(gateway.app, log_config=None, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, str]]:
    gateway = open_gateway(tmp_path_factory.mktemp("gateway"), ScriptedBackend())
    with served(gateway) as url:
        yield gateway, url
    gateway.store.close()


@pytest.fixture
def backend(opened: tuple[Gateway, str]) -> ScriptedBackend:
    opened[0].backend.reset()
    return opened[0].backend


@pytest.fixture
def client(opened: tuple[Gateway, str]) -> Iterator[openai.OpenAI]:
    gateway, url = opened
    with openai.OpenAI(api_key=gateway.key, base_url=url, max_retries=0, timeout=60) as client:
        yield client


def test_chat(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, temperature=0, seed=1, stop=["x"], logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["Hel", "lo"]
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")


def test_an_answer_can_be_sent_back(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    message = client.chat.completions.create(model=MODEL, messages=HI).choices[0].message
    turns = [*HI, message.model_dump(), *HI]
    client.chat.completions.create(model=MODEL, messages=turns)  # type: ignore[arg-type]
    assert "".join(map(chr, backend.calls[1].tokens)) == "<u>Hi<a>Hello<u>Hi"


def test_stream(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7


def test_completions(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello"] * 4
    assert answer.choices[3].logprobs is not None
    assert answer.choices[3].logprobs.tokens == ["Hel", "lo"]
    stream = client.completions.create(model=MODEL, prompt=[97, 98], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello"


def test_models(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_extra == {"max_model_len": 200}
    assert client.models.retrieve(MODEL) == model


def test_client_errors(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model=MODEL, messages=HI, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError) as bad:
        create(model=MODEL, messages=[{"role": "user", "content": "x" * 1000}])
    assert (bad.value.param, bad.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as bad:
        create(model=MODEL, messages=HI, extra_body={"colour": 1})
    assert (bad.value.param, bad.value.code) == ("colour", "unknown_parameter")
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-x", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-x")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.AuthenticationError) as unknown:
        client.with_options(api_key="sk-sekisho-wrong").models.list()
    assert unknown.value.code == "invalid_api_key"
    assert backend.calls == []


def test_server_errors(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = fail("queue_full")
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as limited:
            client.chat.completions.create(model=MODEL, messages=HI, stream=stream)
        assert limited.value.code == "queue_full"
        assert limited.value.response.headers["retry-after"] == "1"
    for code in ("ownership_violation", "transfer_failed", "node_lost"):
        backend.script = fail(code)
        with pytest.raises(openai.InternalServerError) as broken:
            client.chat.completions.create(model=MODEL, messages=HI)
        assert (broken.value.status_code, broken.value.code) == (CODES[code][1], code)
        assert broken.value.type == "server_error"


def test_the_client_tries_again_after_429(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    def script(request: int, params: SamplingParams) -> Iterable[Step]:
        return (fail("queue_full") if request == 1 else say("Hel", "lo"))(request, params)

    backend.script = script
    answer = client.with_options(max_retries=1).completions.create(model=MODEL, prompt="a")
    assert answer.choices[0].text == "Hello"
    assert len(backend.calls) == 2


def test_a_failure_within_a_stream_is_an_exception(
    client: openai.OpenAI, backend: ScriptedBackend
) -> None:
    backend.script = fail("node_lost", after=("Hel",))
    text = ""
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    with pytest.raises(openai.APIError) as caught:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            assert chunk.choices[0].finish_reason is None
    assert text == "Hel"
    assert caught.value.code == "node_lost"


def test_leaving_a_stream_closes_the_backend_request(
    client: openai.OpenAI, backend: ScriptedBackend
) -> None:
    def script(request: int, params: SamplingParams) -> Iterable[Step]:
        yield Delta(request, 0, [5], "x", [])
        yield Hold()

    backend.script = script
    with client.completions.create(model=MODEL, prompt="a", stream=True) as stream:
        assert next(iter(stream)).choices[0].text == "x"
    wait_until_closed(backend)


def test_leaving_a_whole_answer_closes_the_backend_request(
    client: openai.OpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda request, params: [Hold()]
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt="a", timeout=1)
    wait_until_closed(backend)


def wait_until_closed(backend: ScriptedBackend) -> None:
    """The test's own time limit ends a wait in vain."""
    pause = threading.Event()
    while backend.closed != [1]:
        pause.wait(0.005)


def test_ten_streams_at_once_keep_to_themselves(
    opened: tuple[Gateway, str], backend: ScriptedBackend
) -> None:
    gateway, url = opened

    texts: dict[int, str] = {}

    def own(request: int, params: SamplingParams) -> Iterable[Step]:
        return say(*[f"{params.seed} "] * 50)(request, params)

    backend.script = own

    def work(seed: int) -> None:
        with openai.OpenAI(api_key=gateway.key, base_url=url, max_retries=0) as client:
            stream = client.completions.create(model=MODEL, prompt="a", seed=seed, stream=True)
            texts[seed] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {seed: f"{seed} " * 50 for seed in range(10)}
