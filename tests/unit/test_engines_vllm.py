"""Requests at a pair of local servers that answer as real, guarded vLLM servers did, or break."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points
from typing import Any

import pytest

from sekisho.engine.demo import ensure_demo_model
from sekisho.engine.output import Delta
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer, load_tokenizer
from sekisho.gateway.engines import fleet as fleet_module
from sekisho.gateway.engines.replica import EngineError, Replica
from sglang_kit import cut, end_of, events_of, saying, silent, stream_of, text_of
from vllm_kit import (
    BOOTSTRAP,
    PROMPT,
    RECORDED,
    Pair,
    Play,
    computing,
    fleet_over,
    pair,
    recorded,
    server,
    without_guard,
)

EOS = (2,)
GREEDY = recorded("greedy", "decode")
LENGTH = str(len(PROMPT)).encode()
Change = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ensure_demo_model())


def run(
    tokenizer: Tokenizer, prefill: Play, decode: Play, test: Callable[[Pair], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), pair(prefill, decode, tokenizer) as both:
            await test(both)

    asyncio.run(main())


def altered(change: Change, name: str = "greedy") -> Play:
    """Decode's recorded answer after ``change`` of its events."""
    events = events_of(recorded(name, "decode"))
    change(events)
    return saying(stream_of(events))


def prefilled(**changed: Any) -> bytes:
    """Prefill's recorded answer with other fields; of the manifest where they are its own."""
    answer = json.loads(recorded("greedy", "prefill"))
    manifest = answer["kv_transfer_params"]["sekisho_manifest"]
    for name, value in changed.items():
        (manifest if name in manifest else answer)[name] = value
    return json.dumps(answer).encode()


def vllm_text(answer: bytes) -> str:
    """What vLLM itself makes of its tokens; ours must be the same."""
    return "".join(each["text"] for event in events_of(answer) for each in event["choices"])


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


# -- answers


def test_a_real_answer_becomes_its_text_and_one_end(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        events = await both.ask(stop_token_ids=EOS)
        tokens = [t for e in events_of(GREEDY) for c in e["choices"] for t in c["token_ids"]]
        assert tokens[-1] == EOS[0]
        assert text_of(events) == vllm_text(GREEDY)
        end = end_of(events)
        assert (end.code, end.output_tokens) == ("stop", len(tokens))

    run(tokenizer, computing(), saying(GREEDY), test)


def test_each_role_is_asked_with_names_that_we_mint(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        for scope in ("tenant:a", "tenant:a", "tenant:b"):
            await both.ask(scope, stop_token_ids=EOS)
        first, again, other = both.prefill.asked
        begun = [asked["kv_transfer_params"] for asked in both.prefill.asked]
        assert len({params["transfer_id"] for params in begun}) == 3
        assert all(params["do_remote_decode"] for params in begun)
        assert (first["max_tokens"], first["min_tokens"], first["ignore_eos"]) == (1, 1, True)
        assert first["cache_salt"] == again["cache_salt"] != other["cache_salt"]
        assert "tenant" not in first["cache_salt"]
        for asked, params, second in zip(both.prefill.asked, begun, both.decode.asked, strict=True):
            assert second["prompt"] == asked["prompt"] == PROMPT
            assert second["cache_salt"] == asked["cache_salt"]
            told = second["kv_transfer_params"]
            assert told["transfer_id"] == params["transfer_id"]
            assert told["sekisho_manifest"]["transfer"] == params["transfer_id"]
            assert told["remote_engine_id"] == told["sekisho_manifest"]["engine"]
            assert told["remote_bootstrap_addr"] == f"http://127.0.0.1:{BOOTSTRAP}"

    run(tokenizer, computing(), saying(GREEDY), test)


def test_sampling_parameters_reach_decode(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        given: dict[str, Any] = {
            "max_tokens": 64,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "presence_penalty": 0.2,
            "frequency_penalty": -0.3,
            "repetition_penalty": 2.5,
        }
        more: dict[str, Any] = {"logit_bias": {5: -2.5}, "stop": ("zzz",), "stop_token_ids": EOS}
        await both.ask(seed=2**64 - 1, **given, **more)
        told = both.decode.asked[0]
        assert {name: told[name] for name in given} == given
        assert told["logit_bias"] == {"5": -2.5}
        assert (told["stop"], told["stop_token_ids"], told["ignore_eos"]) == (["zzz"], [2], True)
        assert told["seed"] == 2**63 - 1

    run(tokenizer, computing(), saying(GREEDY), test)


def test_log_probabilities_are_those_of_the_tokens(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        events = await both.ask(max_tokens=6, logprobs=2)
        infos = [info for e in events if isinstance(e, Delta) for info in e.infos]
        assert len(infos) == 6
        assert b"".join(info.chosen.piece for info in infos).decode() == text_of(events)
        for info in infos:
            assert len(info.top) == 2
            assert info.top[0].logprob >= info.top[1].logprob
            assert info.chosen.token == info.top[0].token, "it was asked for the most likely"
        assert both.decode.asked[0]["logprobs"] == 2
        assert end_of(events).code == "length"

    run(tokenizer, computing(), saying(recorded("logprobs", "decode")), test)


def test_a_token_that_was_certain_has_its_log_probability(tokenizer: Tokenizer) -> None:
    """Zero is a value like any other; vLLM writes minus infinity as -9999."""

    def certain(events: list[dict[str, Any]]) -> None:
        events[0]["choices"][0]["logprobs"]["token_logprobs"] = [0.0]
        events[1]["choices"][0]["logprobs"]["token_logprobs"] = [-9999.0]

    async def test(both: Pair) -> None:
        events = await both.ask(max_tokens=6, logprobs=2)
        infos = [info for e in events if isinstance(e, Delta) for info in e.infos]
        assert [info.chosen.logprob for info in infos[:2]] == [0.0, float("-inf")]

    run(tokenizer, computing(), altered(certain, "logprobs"), test)


def test_a_stop_string_is_cut_and_the_connection_closed(tokenizer: Tokenizer) -> None:
    """The recorded server was asked without it, and would go on."""
    part = stream_of(events_of(GREEDY)[:8], done=False)
    word = vllm_text(part).split()[-1]

    async def test(both: Pair) -> None:
        events = await both.ask(stop=(word,), stop_token_ids=EOS)
        assert text_of(events) == vllm_text(part).partition(word)[0]
        assert end_of(events).code == "stop"
        await both.decode.gone.wait()

    run(tokenizer, computing(), silent(part), test)


# -- limits


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_sent(
    tokenizer: Tokenizer,
) -> None:
    async def test(both: Pair) -> None:
        wanted = SamplingParams(max_tokens=4)
        end = end_of([e async for e in both.fleet.generate("t", [7] * 2048, wanted)])
        assert end.code == "context_length_exceeded"
        assert "2048" in end.message
        assert "2047" in end.message
        assert both.prefill.asked == both.decode.asked == []

    run(tokenizer, computing(), saying(GREEDY), test)


def test_a_real_refusal_for_length_tells_both_numbers(tokenizer: Tokenizer) -> None:
    """The recorded prompt had 2,090 tokens; the server's limit is its own to say."""
    text = recorded("overlong", "prefill").replace(b"2048", b"12").replace(b"2090", LENGTH)

    async def test(both: Pair) -> None:
        end = end_of(await both.ask())
        assert end.code == "context_length_exceeded"
        assert LENGTH.decode() in end.message
        assert "12" in end.message
        assert not both.decode.asked

    run(tokenizer, saying(text, 400), silent(), test)


# -- what is no clean end


def _no_reason(events: list[dict[str, Any]]) -> None:
    events[-2]["choices"][0]["finish_reason"] = None


def _unknown_reason(events: list[dict[str, Any]]) -> None:
    events[-2]["choices"][0]["finish_reason"] = "bored"


def _no_count(events: list[dict[str, Any]]) -> None:
    events.pop()


def _another_count(events: list[dict[str, Any]]) -> None:
    events[-1]["usage"]["completion_tokens"] += 1


def _a_lost_event(events: list[dict[str, Any]]) -> None:
    del events[3]


def _after_the_end(events: list[dict[str, Any]]) -> None:
    events.append(events[-1])


def _a_second_answer(events: list[dict[str, Any]]) -> None:
    events[3]["choices"] *= 2


def _another_prompt(events: list[dict[str, Any]]) -> None:
    events[0]["choices"][0]["prompt_token_ids"][5] += 1


def _no_prompt(events: list[dict[str, Any]]) -> None:
    del events[0]["choices"][0]["prompt_token_ids"]


def _no_ids(events: list[dict[str, Any]]) -> None:
    del events[3]["choices"][0]["token_ids"]


def _an_absurd_id(events: list[dict[str, Any]]) -> None:
    events[3]["choices"][0]["token_ids"] = [1 << 40]


def _another_shape(events: list[dict[str, Any]]) -> None:
    events[3]["choices"] = "secret"


def _an_error(events: list[dict[str, Any]]) -> None:
    events[3:] = [{"error": {"message": "secret", "type": "InternalServerError", "code": 500}}]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_no_reason, "internal_error"),
        (_unknown_reason, "internal_error"),
        (_no_count, "internal_error"),
        (_another_count, "internal_error"),
        (_a_lost_event, "internal_error"),
        (_after_the_end, "internal_error"),
        (_a_second_answer, "internal_error"),
        (_another_prompt, "ownership_violation"),
        (_no_prompt, "ownership_violation"),
        (_no_ids, "internal_error"),
        (_an_absurd_id, "internal_error"),
        (_another_shape, "internal_error"),
        (_an_error, "internal_error"),
    ],
)
def test_an_answer_that_does_not_end_cleanly_is_an_error(
    tokenizer: Tokenizer, change: Change, code: str
) -> None:
    async def test(both: Pair) -> None:
        end = end_of(await both.ask(stop_token_ids=EOS))
        assert end.code == code
        assert "secret" not in end.message

    run(tokenizer, computing(), altered(change), test)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (prefilled(kv_transfer_params=None), "transfer_failed"),
        (prefilled(kv_transfer_params={"sekisho_manifest": {"tokens": 1}}), "transfer_failed"),
        (prefilled(tokens=len(PROMPT) - 1), "ownership_violation"),
        (prefilled(transfer="another"), "ownership_violation"),
        (prefilled(usage={"prompt_tokens": 1, "completion_tokens": 1}), "ownership_violation"),
        (b"secret", "internal_error"),
        (b"[" * 5000, "internal_error"),
        (b" " * (1 << 21), "internal_error"),
    ],
)
def test_decode_is_not_asked_where_prefill_has_not_signed_this_very_prompt(
    tokenizer: Tokenizer, body: bytes, code: str
) -> None:
    """Reports: sglang#30233; vllm PR#49796 (one transfer's id for another)."""

    async def test(both: Pair) -> None:
        events = await both.ask(stop_token_ids=EOS)
        assert [event.code for event in events] == [code]
        assert "secret" not in events[0].message
        assert both.decode.asked == []

    assert RECORDED in recorded("greedy", "prefill")
    run(tokenizer, computing(body), saying(GREEDY), test)


@pytest.mark.parametrize(
    ("play", "code"),
    [
        (saying(b'{"error":{"message":"secret"}}', 500), "internal_error"),
        (saying(recorded("violated", "prefill"), 500), "internal_error"),
        (saying(b"<html>secret</html>", 502), "transfer_failed"),
        (saying(b"", 503), "node_lost"),
        (saying(b'{"error":{"message":"slow down"}}', 429), "queue_full"),
        (saying(b"secret"), "internal_error"),
        (cut(b""), "node_lost"),
    ],
)
@pytest.mark.parametrize("broken", ["prefill", "decode"])
def test_what_breaks_on_either_side_ends_the_request(
    tokenizer: Tokenizer, play: Play, code: str, broken: str
) -> None:
    async def test(both: Pair) -> None:
        events = await both.ask(stop_token_ids=EOS)
        assert [event.code for event in events] == [code]
        assert "secret" not in events[0].message

    plays: tuple[Play, Play] = (play, silent()) if broken == "prefill" else (computing(), play)
    run(tokenizer, *plays, test)


@pytest.mark.parametrize(
    ("play", "code"),
    [
        (cut(GREEDY[:3000]), "node_lost"),
        (saying(GREEDY[:3000]), "internal_error"),
        (saying(GREEDY[: -len(b"data: [DONE]\n\n")]), "internal_error"),
        (saying(b"data: {nonsense\n\ndata: [DONE]\n\n"), "internal_error"),
    ],
)
def test_an_answer_that_is_cut_off_is_an_error(tokenizer: Tokenizer, play: Play, code: str) -> None:
    async def test(both: Pair) -> None:
        assert end_of(await both.ask(stop_token_ids=EOS)).code == code

    run(tokenizer, computing(), play, test)


@pytest.mark.parametrize("busy", ["prefill", "decode"])
def test_closing_early_closes_the_connection(tokenizer: Tokenizer, busy: str) -> None:
    async def test(both: Pair) -> None:
        at: Any = getattr(both, busy)
        stream = both.fleet.generate("tenant:a", PROMPT, SamplingParams(max_tokens=64))
        first = asyncio.ensure_future(anext(stream))
        await settled(lambda: bool(at.asked))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()
        await at.gone.wait()

    run(tokenizer, silent() if busy == "prefill" else computing(), silent(), test)


def test_neither_scopes_nor_text_reach_the_log(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def test(both: Pair) -> None:
        await both.ask("tenant:alpha")
        salts = {body["cache_salt"] for body in both.prefill.asked}
        for secret in ("tenant:alpha", "secret", *salts):
            assert secret not in caplog.text

    run(tokenizer, computing(), cut(b"data: secret"), test)


# -- no start without


DECODE = server("decode", silent()).metrics


@pytest.mark.parametrize(
    ("role", "changed", "port", "part"),
    [
        ("decode", {"metrics": without_guard(DECODE)}, BOOTSTRAP, "guard is not active"),
        ("decode", {"metrics": DECODE.replace(b'role="decode"', b'role="prefill"')}, 1, "is of"),
        ("decode", {"metrics": without_guard(DECODE, rank=1)}, 1, "guard is not active"),
        ("decode", {"metrics": DECODE.replace(b"} 1.0\n", b"} 0.0\n")}, 1, "guard is not active"),
        ("decode", {"metrics": b""}, BOOTSTRAP, "no vllm:cache_config_info"),
        ("decode", {"models": b'{"object":"list","data":[{"id":"x"}]}'}, 1, "max_model_len"),
        ("decode", {"models": b"<html>"}, BOOTSTRAP, "/v1/models"),
        ("decode", {"healthy": False}, BOOTSTRAP, "/health"),
        ("prefill", {}, 0, "bootstrap port is not named"),
    ],
)
def test_a_server_that_may_not_be_used_stops_the_start(
    tokenizer: Tokenizer, role: str, changed: dict[str, Any], port: int, part: str
) -> None:
    sides: dict[str, Any] = {"prefill": {}, "decode": {}, role: changed}

    async def main() -> None:
        first = server("prefill", computing(), **sides["prefill"])
        second = server("decode", saying(GREEDY), **sides["decode"])
        with pytest.raises(EngineError) as refused:
            async with fleet_over(first, second, tokenizer, port):
                pass
        assert part in str(refused.value)
        assert refused.value.args[0].startswith(f"{role} http://127.0.0.1:")

    asyncio.run(main())


@pytest.mark.parametrize("busy", [False, True])
def test_a_server_that_lost_its_guard_leaves_and_comes_back(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(fleet_module, "POLL_S", 0.02)

    async def test(both: Pair) -> None:
        if busy:
            asking = asyncio.create_task(both.ask())
            await settled(lambda: bool(both.decode.asked))
        before, both.decode.metrics = both.decode.metrics, without_guard(both.decode.metrics)
        await settled(lambda: not both.fleet.ready())
        assert both.fleet.capacity().missing == ["decode"]
        if busy:
            assert end_of(await asking).code == "node_lost"
        assert end_of(await both.ask()).code == "not_ready"
        both.decode.metrics = before
        await settled(both.fleet.ready)

    run(tokenizer, computing(), silent(GREEDY[:3000]) if busy else saying(GREEDY), test)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://p1:8000", "http://p1:8998"),
        ("http://p1", "http://p1:8998"),
        ("http://[fd00::1]:8000", "http://[fd00::1]:8998"),
        ("https://p1.example:443", "http://p1.example:8998"),
    ],
)
def test_decode_is_told_where_prefills_bootstrap_server_is(url: str, address: str) -> None:
    assert Replica("prefill", url, "prefill-1", BOOTSTRAP).bootstrap_url == address


def test_the_guard_is_found_by_vllm() -> None:
    names = {entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert "sekisho.guard.vllm.plugin:load" in names
