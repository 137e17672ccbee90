"""Server-sent events of an engine, whole, cut and senseless; and answers from token ids."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from sekisho.engine.demo import ensure_demo_model
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer, load_tokenizer
from sekisho.gateway.engines import events as module
from sekisho.gateway.engines.answer import Answer
from sekisho.gateway.engines.events import EventsError, events

EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ensure_demo_model())


def read(*chunks: bytes) -> list[bytes]:
    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def collect() -> list[bytes]:
        return [event async for event in events(body())]

    return asyncio.run(collect())


def test_events_do_not_depend_on_how_the_bytes_are_cut() -> None:
    whole = b'data: {"a":1}\n\n: alive\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'
    wanted = [b'{"a":1}', b'{"b":2}']
    assert read(whole) == wanted
    assert read(*(whole[i : i + 1] for i in range(len(whole)))) == wanted
    for cut in range(len(whole)):
        assert read(whole[:cut], whole[cut:]) == wanted


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "cut off"),
        (b'data: {"a":1}\n\n', "cut off"),
        (b'data: {"a":1}\n\ndata: [DO', "cut off"),
        (b"data: [DONE]\n\ndata: {}\n\n", "after the end"),
        (b"data: [DONE]\n\nda", "cut off"),
        (b"<html>\n\n", "no events"),
        (b'{"error":"x"}\n\n', "no events"),
    ],
)
def test_what_is_no_whole_stream_of_events_is_an_error(body: bytes, why: str) -> None:
    with pytest.raises(EventsError, match=why):
        read(body)


def test_an_event_without_end_is_not_collected_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENT_MAX", 1000)
    with pytest.raises(EventsError, match="of more than"):
        read(*(b"data: xxxxxxxxxx" for _ in range(100)), b"\n\ndata: [DONE]\n\n")


def answered(tokenizer: Tokenizer, text: str, **params: object) -> tuple[str, Answer]:
    """The text of an answer whose tokens come one by one."""
    answer = Answer(1, SamplingParams(**{"max_tokens": 64, **params}), tokenizer)  # type: ignore[arg-type]
    shown = "".join(answer.take([token], []).text for token in [*tokenizer.encode(text), EOS])
    return shown, answer


def test_an_end_of_sequence_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    shown, answer = answered(tokenizer, "A checkpoint 関所 🎌", stop_token_ids=(EOS,))
    assert shown == "A checkpoint 関所 🎌"
    assert answer.end == "stop"
    assert answer.count == len(tokenizer.encode(shown)) + 1


def test_a_stop_string_ends_the_answer_before_it(tokenizer: Tokenizer) -> None:
    shown, answer = answered(tokenizer, "one two three four", stop=("o thr",))
    assert (shown, answer.end) == ("one tw", "stop")


def test_no_more_tokens_than_asked_for_are_shown(tokenizer: Tokenizer) -> None:
    shown, answer = answered(tokenizer, "one two three four", max_tokens=2)
    assert (shown, answer.end, answer.count) == ("one two", "length", 2)


def test_what_was_held_back_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    answer = Answer(1, SamplingParams(max_tokens=64, stop=("two three",)), tokenizer)
    text = "".join(answer.take([token], []).text for token in tokenizer.encode("one two"))
    assert text == "one "
    assert answer.close("length").text == "two"
    assert answer.end == "length"
