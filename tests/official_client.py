"""What a customer does with the official ``openai`` client: every call, every mistake.

    python tests/official_client.py URL KEY [KEY …]      # URL as `sekisho serve` prints it

Each function of `CHECKS` is one promise; the end-to-end tests run them one by one.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import httpx2
import openai
from openai.types.chat import ChatCompletionMessageParam


class Customer:
    """The official client with one key, and what it found out about the server's model."""

    def __init__(self, url: str, key: str) -> None:
        self.key = key
        self.client = openai.OpenAI(api_key=key, base_url=url, max_retries=0, timeout=240.0)
        [model] = self.client.models.list().data
        self.model = model.id
        extra = model.model_extra or {}
        self.limit = int(extra["max_model_len"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def chat(self, text: str = "Name three rivers.", **fields: Any) -> Any:
        turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
        asked = {"model": self.model, "messages": turns, "max_tokens": 12, **fields}
        return self.client.chat.completions.create(**asked)

    def post(self, body: bytes) -> httpx2.Response:
        """What the client's own types do not let through."""
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        url = f"{self.client.base_url}chat/completions"
        return httpx2.post(url, content=body, headers=headers, timeout=240.0, trust_env=False)


@contextlib.contextmanager
def refused(kind: type[openai.APIStatusError], code: str, param: str | None) -> Iterator[None]:
    """The block ends with this error of the client, which names the field at fault."""
    try:
        yield
    except kind as error:
        found = (error.code, error.param)
        assert found == (code, param), found
    else:
        raise AssertionError(f"no {kind.__name__}")


def chat(customer: Customer) -> None:
    answer = customer.chat(temperature=0)
    [choice] = answer.choices
    assert choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def stream(customer: Customer) -> None:
    whole = customer.chat(temperature=0)
    chunks = list(customer.chat(temperature=0, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def logprobs(customer: Customer) -> None:
    answer = customer.chat(temperature=0, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob, "greedy takes the best"
        assert len(entry.top_logprobs) == 3
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001


def stop(customer: Customer) -> None:
    whole = customer.chat(temperature=0).choices[0].message.content
    mark = whole.split()[2]
    cut = customer.chat(temperature=0, stop=[mark, "never said"]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole.partition(mark)[0]


def seed(customer: Customer) -> None:
    def sampled(seed: int) -> str:
        text: str = customer.chat(temperature=1.5, seed=seed).choices[0].message.content
        return text

    texts = [sampled(number) for number in (1, 2, 3)]
    assert len(set(texts)) == 3, "another seed, another text"
    assert [sampled(number) for number in (1, 2, 3)] == texts


def completions(customer: Customer) -> None:
    answer = customer.client.completions.create(
        model=customer.model, prompt=["The capital of France is", "The sea is"], max_tokens=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text for choice in answer.choices)


def over_long_prompts(customer: Customer) -> None:
    def length(text: str) -> int:
        return int(customer.chat(text, max_tokens=1).usage.prompt_tokens)

    # One token a word; what is left of the window is what the chat template itself takes.
    template = length("a") - 1
    fits = "a" + " a" * (customer.limit - template - 2)
    assert length(fits) == customer.limit - 1
    too_long = (
        (fits + " a", 1),  # only with the chat template is it too long
        ("a" + " a" * customer.limit, 1),  # just over
        ("a" + " a" * (8 * customer.limit), 1),  # far over
        ("Hello", customer.limit),  # because of the answer
    )
    for text, wanted in too_long:
        try:
            customer.chat(text, max_tokens=wanted)
        except openai.BadRequestError as error:
            assert (error.code, error.param) == ("context_length_exceeded", "messages")
            assert str(customer.limit) in error.message, "the limit"
            assert error.message.count("tokens") >= 2, "and what was asked for"
        else:
            raise AssertionError("an over-long request was served")


def bad_input(customer: Customer) -> None:
    bad = openai.BadRequestError
    with refused(bad, "invalid_value", "messages"):
        customer.chat(messages=[])
    with refused(bad, "missing_required_parameter", "messages[0].content"):
        customer.chat(messages=[{"role": "user"}])
    with refused(bad, "invalid_value", "messages[0].role"):
        customer.chat(messages=[{"role": "king", "content": "x"}])
    for field, value in (
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("max_tokens", -5),
        ("max_tokens", True),
        ("seed", -1),
        ("n", 0),
        ("presence_penalty", 3),
        ("stop", [""]),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", [1]),
        ("logit_bias", {"x": 1}),
    ):
        with refused(bad, "invalid_value", field):
            customer.chat(extra_body={field: value})
    with refused(bad, "unsupported_parameter", "tools"):
        customer.chat(tools=[{"type": "function", "function": {"name": "f"}}])
    with refused(bad, "unsupported_parameter", "response_format"):
        customer.chat(response_format={"type": "json_object"})
    with refused(bad, "unknown_parameter", "colour"):
        customer.chat(extra_body={"colour": 1})
    with refused(openai.NotFoundError, "model_not_found", "model"):
        customer.chat(model="gpt-x")
    with refused(openai.AuthenticationError, "invalid_api_key", None):
        customer.client.with_options(api_key=f"{customer.key[:-1]}!").models.list()


def bad_bodies(customer: Customer) -> None:
    turns = b'"messages": [{"role": "user", "content": "x"}]'
    model = b'"model": "' + customer.model.encode() + b'", '
    for body, code, param in (
        (b'{"model": ', "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b'{"model": "\xff"}', "invalid_utf8", None),
        (b"{" + model + turns + b', "temperature": NaN}', "invalid_value", "temperature"),
        (b"{" + model + turns + b', "top_p": Infinity}', "invalid_value", "top_p"),
        (b"{" + model + turns + b', "seed": 1, "seed": 2}', "invalid_json", "seed"),
    ):
        answer = customer.post(body)
        error = answer.json()["error"]
        found = (answer.status_code, error["code"], error["param"])
        assert found == (400, code, param), (body, found)


CHECKS: tuple[Callable[[Customer], None], ...] = (
    chat,
    stream,
    logprobs,
    stop,
    seed,
    completions,
    over_long_prompts,
    bad_input,
    bad_bodies,
)


def main(arguments: list[str]) -> int:
    """Run every check with every key; 1 and a line of the finding at the first that fails."""
    url, *keys = arguments
    for number, key in enumerate(keys, 1):
        with Customer(url, key) as customer:
            for check in CHECKS:
                try:
                    check(customer)
                except (AssertionError, openai.OpenAIError) as error:
                    print(f"key {number}: {check.__name__}: {error!r}", file=sys.stderr)
                    return 1
                print(f"key {number}: {check.__name__}: holds")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
