"""What tenants meet at `sekisho serve` in front of a guarded pair, whatever the engine is."""

import concurrent.futures
import json
import time
from typing import Any

import httpx2
import pytest

from serve_kit import Served

QUESTION = "What is a checkpoint? Answer in one sentence."
PATIENCE_S = 120.0


def ask(served: Served, tenant: str, content: str, **fields: Any) -> httpx2.Response:
    body = {
        "model": served.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 48,
        **fields,
    }
    return httpx2.post(
        f"{served.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {served.keys[tenant]}"},
        timeout=PATIENCE_S,
    )


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def ready(served: Served) -> bool:
    return httpx2.get(f"{served.url}/health/readiness", timeout=PATIENCE_S).status_code == 200


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


class ServedPair:
    """One pair and one gateway, given as fixtures ``pair`` and ``served``; the last test kills
    decode."""

    def test_an_answer_is_the_same_whole_and_streamed(self, served: Served) -> None:
        whole = text_of(ask(served, "tenant-a", QUESTION))
        print(f"\n{whole}")
        streamed = ask(served, "tenant-a", QUESTION, stream=True).text.split("\n\n")
        assert streamed[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(each.removeprefix("data: ")) for each in streamed[:-2]]
        pieces = [c["choices"][0]["delta"].get("content", "") for c in chunks]
        assert "".join(pieces) == whole
        assert len(whole) > 20

    def test_a_prefix_is_reused_within_a_tenant_only(self, served: Served) -> None:
        content = "One two three four five six seven eight nine ten. " * 6 + QUESTION

        def cached(tenant: str) -> int:
            usage = ask(served, tenant, content, max_tokens=1).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached("tenant-a") < 32  # the template's own beginning, of earlier tests
        assert cached("tenant-a") > 60
        first = cached("tenant-b")
        print(f"\nb after a: {first} cached tokens, b again: {cached('tenant-b')}")
        assert first == 0

    def test_stop_strings_and_log_probabilities_work(self, served: Served) -> None:
        answer = ask(served, "tenant-a", QUESTION, logprobs=True, top_logprobs=2, max_tokens=6)
        told = answer.json()["choices"][0]
        content = told["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == told["message"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        word = content[3]["token"].strip()
        cut = ask(served, "tenant-a", QUESTION, stop=[word]).json()["choices"][0]
        assert cut["finish_reason"] == "stop"
        assert cut["message"]["content"] == told["message"]["content"].partition(word)[0]

    def test_an_over_long_request_gets_400_with_both_numbers(self, served: Served) -> None:
        began = time.monotonic()
        answer = ask(served, "tenant-a", "word " * 5000)
        print(f"\n{time.monotonic() - began:.2f} s: {answer.json()['error']['message']}")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(served.tokens_max) in error["message"]

    def test_a_client_that_leaves_frees_the_pair(self, served: Served) -> None:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(
                f"{served.url}/v1/chat/completions",
                json={
                    "model": served.model,
                    "messages": [{"role": "user", "content": "Tell a long story."}],
                    "logit_bias": {"2": -100},
                    "max_tokens": 3000,
                },
                headers={"authorization": f"Bearer {served.keys['tenant-a']}"},
                timeout=3.0,
            )
        until(lambda: "code=client_gone" in served.log())
        assert text_of(ask(served, "tenant-b", QUESTION))

    def test_concurrent_tenants_get_what_they_get_alone(self, served: Served) -> None:
        contents = [f"Say the number {n} in words." for n in range(4)]
        alone = [text_of(ask(served, "tenant-a", c, max_tokens=12)) for c in contents]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(ask, served, t, c, max_tokens=12)
                for t, c in zip(["tenant-a", "tenant-b"] * 2, contents, strict=True)
            ]
            assert [text_of(one.result()) for one in asked] == alone

    def test_a_killed_decode_is_an_error_and_then_503(self, served: Served, pair: Any) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            story = {"logit_bias": {"2": -100}, "max_tokens": 2000, "stream": True}
            asked = pool.submit(ask, served, "tenant-a", "Tell a long story.", **story)
            time.sleep(4.0)
            pair.decode.kill()
            began = time.monotonic()
            answer = asked.result()
        print(f"\nended {time.monotonic() - began:.2f} s after the kill")
        last = answer.text.split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "node_lost"
        until(lambda: not ready(served))
        assert ask(served, "tenant-a", QUESTION).status_code == 503
