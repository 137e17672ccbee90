"""Requests at a pair of local servers that answer as real SGLang servers did, or break."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sekisho.engine.demo import ensure_demo_model
from sekisho.engine.output import Delta
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer, load_tokenizer
from sekisho.gateway.engines import sglang_exchange
from sekisho.gateway.engines.sglang_events import Reader
from sekisho.gateway.engines.side import FailureError
from sekisho.gateway.errors import ApiError
from sglang_kit import (
    Pair,
    Play,
    cut,
    end_of,
    events_of,
    pair,
    recorded,
    saying,
    silent,
    stream_of,
    text_of,
)

PROMPT = list(range(100, 140))  # as long as the one that was recorded
EOS = (2,)
TEXT = (
    "A checkpoint is a critical area where a team of medical professionals, including doctors, "
    "nurses, and other healthcare professionals, work together to provide medical care to patients."
)


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


def played(name: str) -> tuple[Play, Play]:
    return saying(recorded(name, "prefill")), saying(recorded(name, "decode"))


def altered(name: str, change: Callable[[list[dict[str, Any]]], None]) -> Play:
    """Decode's recorded answer after ``change`` of its events."""
    events = events_of(recorded(name, "decode"))
    change(events)
    return saying(stream_of(events))


async def settled(condition: Callable[[], bool]) -> None:
    """Return once ``condition`` holds; the test's own limit ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.01)


# -- answers


def test_a_real_answer_becomes_its_text_and_one_end(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        events = await both.ask(PROMPT, stop_token_ids=EOS)
        assert text_of(events) == TEXT
        end = end_of(events)
        assert (end.code, end.output_tokens) == ("stop", 33)
        assert [e.index for e in events if isinstance(e, Delta)] == list(range(33))
        await both.fleet.stop(1.0)  # returns after every abort
        assert both.prefill.aborted == both.decode.aborted == []

    run(tokenizer, *played("greedy"), test)


def test_both_servers_get_the_same_request_with_names_that_we_mint(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        await both.ask(PROMPT, stop_token_ids=EOS)
        await both.ask(PROMPT, stop_token_ids=EOS)
        await both.ask(PROMPT, scope="tenant:b", stop_token_ids=EOS)
        first, again, other = both.prefill.asked
        assert both.decode.asked == both.prefill.asked
        assert first["input_ids"] == PROMPT
        assert first["stream"] is True
        assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", 8998)
        rooms = {body["bootstrap_room"] for body in both.prefill.asked}
        assert len(rooms) == 3
        assert all(0 < room < 2**63 for room in rooms)
        rids = {body["rid"] for body in both.prefill.asked}
        # One is never the beginning of another: SGLang aborts by beginnings.
        assert len(rids) == 3
        assert len({len(rid) for rid in rids}) == 1
        assert first["extra_key"] == again["extra_key"] != other["extra_key"]
        assert "tenant" not in first["extra_key"]

    run(tokenizer, *played("greedy"), test)


def test_sampling_parameters_reach_both(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        given: dict[str, Any] = {
            "max_tokens": 64,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "presence_penalty": 0.2,
            "frequency_penalty": -0.3,
            "repetition_penalty": 1.5,
            "logit_bias": {5: -2.5},
            "stop": ("zzz",),
            "stop_token_ids": EOS,
        }
        await both.ask(PROMPT, seed=2**64 - 1, **given)
        told = both.decode.asked[0]["sampling_params"]
        assert told.pop("max_new_tokens") == given.pop("max_tokens")
        assert told.pop("logit_bias") == {"5": -2.5}
        assert told.pop("sampling_seed") == 2**63 - 1
        assert told.pop("skip_special_tokens") is True
        assert told.pop("stop") == ["zzz"]
        assert told.pop("stop_token_ids") == [2]
        assert told == {
            k: v for k, v in given.items() if k not in ("logit_bias", "stop", "stop_token_ids")
        }

    run(tokenizer, *played("greedy"), test)


def test_a_parameter_that_sglang_does_not_take_is_refused_by_name(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        with pytest.raises(ApiError) as refused:
            await both.ask(PROMPT, repetition_penalty=2.5)
        assert (refused.value.status, refused.value.param) == (400, "repetition_penalty")
        assert both.prefill.asked == both.decode.asked == []

    run(tokenizer, *played("greedy"), test)


def test_log_probabilities_are_those_of_the_tokens(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        events = await both.ask(PROMPT, max_tokens=4, logprobs=2)
        infos = [info for e in events if isinstance(e, Delta) for info in e.infos]
        assert [info.chosen.piece for info in infos] == [b"A", b" checkpoint", b" is", b" a"]
        assert infos[0].chosen.logprob == pytest.approx(-0.0389719)
        assert [top.piece for top in infos[1].top] == [b" checkpoint", b" **"]
        assert both.prefill.asked[0]["top_logprobs_num"] == 2
        assert end_of(events).code == "length"

    run(tokenizer, *played("logprobs"), test)


def test_new_tokens_alone_are_an_answer_too(tokenizer: Tokenizer) -> None:
    """As under --incremental-streaming-output."""

    def only_new(events: list[dict[str, Any]]) -> None:
        seen = 0
        for event in events:
            count = len(event["output_ids"])
            event["output_ids"] = event["output_ids"][seen:]
            for key in ("output_token_logprobs", "output_top_logprobs"):
                event["meta_info"][key] = event["meta_info"][key][seen:]
            seen = count

    async def test(both: Pair) -> None:
        events = await both.ask(PROMPT, max_tokens=4, logprobs=2)
        assert text_of(events) == "A checkpoint is a"
        infos = [info for e in events if isinstance(e, Delta) for info in e.infos]
        assert len(infos) == 4

    prefill, _ = played("logprobs")
    run(tokenizer, prefill, altered("logprobs", only_new), test)


def test_a_stop_string_is_cut_and_the_pair_told_to_stop(tokenizer: Tokenizer) -> None:
    """The recorded servers were asked without it, and would go on."""

    async def test(both: Pair) -> None:
        events = await both.ask(PROMPT, stop=("critical",), stop_token_ids=EOS)
        assert text_of(events) == "A checkpoint is a "
        assert end_of(events).code == "stop"
        await settled(lambda: both.decode.aborted == [both.decode.asked[0]["rid"]])

    part = stream_of(events_of(recorded("greedy", "decode"))[:8], done=False)
    run(tokenizer, saying(recorded("greedy", "prefill")), silent(part), test)


# -- limits


def test_a_prompt_above_the_guards_limit_is_refused_before_anything_is_sent(
    tokenizer: Tokenizer,
) -> None:
    async def test(both: Pair) -> None:
        end = end_of(await both.ask([7] * 1001))
        assert end.code == "context_length_exceeded"
        assert "1001" in end.message
        assert "1000" in end.message
        assert both.prefill.asked == both.decode.asked == []

    run(tokenizer, *played("greedy"), test)


def refused_for_length(prompt: int, text: str, status: int = 400) -> bytes:
    reason = {"type": "abort", "message": text, "status_code": status}
    meta = {"id": "x", "finish_reason": reason, "prompt_tokens": prompt, "completion_tokens": 0}
    return stream_of([{"text": "", "output_ids": [], "meta_info": meta}])


@pytest.mark.parametrize(
    "text",
    [
        "the prompt has 40 tokens, this deployment holds 30 in every role",
        "Input length (40 tokens) exceeds the maximum allowed length (30 tokens). Use less.",
    ],
)
def test_a_refusal_for_length_tells_both_numbers(tokenizer: Tokenizer, text: str) -> None:
    async def test(both: Pair) -> None:
        end = end_of(await both.ask(PROMPT))
        assert end.code == "context_length_exceeded"
        assert "40" in end.message
        assert "30" in end.message
        await settled(lambda: bool(both.decode.aborted))

    run(tokenizer, saying(refused_for_length(40, text)), silent(), test)


def test_a_real_refusal_for_length_is_one(tokenizer: Tokenizer) -> None:
    """4,093 tokens and an answer of 16 against a context of 4,096."""
    reader = Reader("decode", 4093, SamplingParams(max_tokens=16), tokenizer)
    with pytest.raises(FailureError) as failed:
        reader.read(recorded("overlong", "decode").split(b"\n\n")[0].removeprefix(b"data: "))
    assert failed.value.code == "context_length_exceeded"
    assert "4096" in failed.value.message


# -- what is no clean end

REASON = "finish_reason"


def _no_reason(events: list[dict[str, Any]]) -> None:
    events[-1]["meta_info"][REASON] = None


def _unknown_reason(events: list[dict[str, Any]]) -> None:
    events[-1]["meta_info"][REASON] = {"type": "bored"}


def _abort(events: list[dict[str, Any]]) -> None:
    events[5]["meta_info"][REASON] = {"type": "abort", "message": "secret", "status_code": None}


def _after_the_end(events: list[dict[str, Any]]) -> None:
    events.append(events[-1])


def _a_gap(events: list[dict[str, Any]]) -> None:
    events[5]["output_ids"].pop()


def _another_prompt(events: list[dict[str, Any]]) -> None:
    events[5]["meta_info"]["prompt_tokens"] = 41


def _another_shape(events: list[dict[str, Any]]) -> None:
    events[5]["output_ids"] = "secret"


def _no_meta(events: list[dict[str, Any]]) -> None:
    del events[5]["meta_info"]


@pytest.mark.parametrize(
    ("change", "code", "shown"),
    [
        (_no_reason, "internal_error", 33),
        (_unknown_reason, "internal_error", 32),
        (_abort, "internal_error", 5),
        (_after_the_end, "internal_error", 33),
        (_a_gap, "internal_error", 5),
        (_another_prompt, "ownership_violation", 5),
        (_another_shape, "internal_error", 5),
        (_no_meta, "internal_error", 5),
    ],
)
def test_an_answer_that_does_not_end_cleanly_is_an_error_and_no_text_follows(
    tokenizer: Tokenizer,
    change: Callable[[list[dict[str, Any]]], None],
    code: str,
    shown: int,
) -> None:
    async def test(both: Pair) -> None:
        events = await both.ask(PROMPT, stop_token_ids=EOS)
        end = end_of(events)
        assert end.code == code
        assert "secret" not in end.message
        assert len(events) - 1 <= shown

    run(tokenizer, saying(recorded("greedy", "prefill")), altered("greedy", change), test)


@pytest.mark.parametrize(
    ("play", "code"),
    [
        (saying(b'{"error":{"message":"secret"}}', 500), "internal_error"),
        (saying(b"<html>secret</html>", 502), "transfer_failed"),
        (saying(b"", 503), "node_lost"),
        (saying(b'{"message":"slow down"}', 429), "queue_full"),
        (saying(refused_for_length(40, "The request queue is full.", 503)), "queue_full"),
        (
            saying(refused_for_length(40, "ownership_violation: foreign", 500)),
            "ownership_violation",
        ),
        (saying(refused_for_length(40, "of no status", 0)), "internal_error"),
        (saying(b"secret"), "internal_error"),
        (saying(b"data: {nonsense\n\ndata: [DONE]\n\n"), "internal_error"),
        (saying(recorded("greedy", "decode")[:9000]), "internal_error"),
        (saying(recorded("greedy", "decode")[: -len(b"data: [DONE]\n\n")]), "internal_error"),
        (saying(recorded("aborted", "decode")), "transfer_failed"),
        (saying(recorded("invalid", "decode")), "internal_error"),
        (cut(recorded("greedy", "decode")[:9000]), "node_lost"),
        (cut(b""), "node_lost"),
    ],
)
@pytest.mark.parametrize("broken", ["prefill", "decode"])
def test_what_breaks_on_one_side_ends_the_request_on_the_other(
    tokenizer: Tokenizer, play: Play, code: str, broken: str
) -> None:
    other = silent()

    async def test(both: Pair) -> None:
        events = await both.ask(PROMPT, stop_token_ids=EOS)
        assert events == [end_of(events)]  # of decode's text nothing, before prefill has ended
        assert end_of(events).code == code
        assert "secret" not in end_of(events).message
        sound = both.decode if broken == "prefill" else both.prefill
        await settled(lambda: sound.aborted == [sound.asked[0]["rid"]])
        await sound.gone.wait()

    plays = (play, other) if broken == "prefill" else (other, play)
    run(tokenizer, *plays, test)


def test_an_answer_to_a_prompt_that_prefill_has_replaced_is_never_shown(
    tokenizer: Tokenizer,
) -> None:
    """The incident of 2026 (sglang#30233): prefill puts one token in the place of a prompt, and
    decode answers 200 with the text of pages that it was never sent."""
    replaced = events_of(recorded("greedy", "prefill"))
    replaced[0]["meta_info"]["prompt_tokens"] = 1

    async def test(both: Pair) -> None:
        events = await both.ask(PROMPT, stop_token_ids=EOS)
        assert text_of(events) == ""
        assert end_of(events).code == "ownership_violation"

    run(tokenizer, saying(stream_of(replaced)), saying(recorded("greedy", "decode")), test)


def test_prefill_that_never_ends_is_not_waited_for(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_exchange, "PREFILL_LATE_S", 0.2)

    async def test(both: Pair) -> None:
        events = await both.ask(PROMPT, stop_token_ids=EOS)
        assert [event.code for event in events] == ["transfer_failed"]
        await settled(lambda: bool(both.prefill.aborted))

    run(tokenizer, silent(), saying(recorded("greedy", "decode")), test)


def test_closing_early_aborts_on_both_sides(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        stream = both.fleet.generate("tenant:a", PROMPT, SamplingParams(max_tokens=64))
        first = asyncio.ensure_future(anext(stream))
        await settled(lambda: bool(both.prefill.asked and both.decode.asked))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()
        rid = both.decode.asked[0]["rid"]
        await settled(lambda: both.prefill.aborted == both.decode.aborted == [rid])
        await both.prefill.gone.wait()
        await both.decode.gone.wait()

    run(tokenizer, silent(), silent(), test)


def test_leaving_between_two_tokens_aborts_decode(tokenizer: Tokenizer) -> None:
    async def test(both: Pair) -> None:
        stream = both.fleet.generate("tenant:a", PROMPT, SamplingParams(max_tokens=64))
        assert isinstance(await anext(stream), Delta)
        await stream.aclose()
        await settled(lambda: both.decode.aborted == [both.decode.asked[0]["rid"]])
        await both.decode.gone.wait()
        assert both.prefill.aborted == []

    part = stream_of(events_of(recorded("greedy", "decode"))[:3], done=False)
    run(tokenizer, saying(recorded("greedy", "prefill")), silent(part), test)


def test_neither_scopes_nor_keys_nor_text_reach_the_log(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def test(both: Pair) -> None:
        await both.ask(PROMPT, scope="tenant:alpha")
        keys = {body["extra_key"] for body in both.prefill.asked}
        for secret in ("tenant:alpha", "secret", *keys):
            assert secret not in caplog.text

    run(tokenizer, saying(b'{"message":"secret"}', 500), cut(b"data: secret"), test)
    assert "sekisho.engines" in {record.name for record in caplog.records}
