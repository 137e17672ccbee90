"""The two answer formats of the OpenAI API, whole and in chunks, as JSON objects."""

import codecs
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sekisho.engine.params import TokenInfo, TokenLogprob

Json = dict[str, object]

# JSON has no minus infinity; OpenAI documents this number for "very unlikely".
LOGPROB_MIN = -9999.0


@dataclass
class Usage:
    """Tokens of one HTTP request: each prompt once, all answers, prompt tokens from cache."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class Whole:
    """One choice as received so far."""

    texts: list[str] = field(default_factory=list)
    infos: list[TokenInfo] = field(default_factory=list)
    finish_reason: str = ""


class Format(Protocol):
    """Objects of one HTTP request; the index of a choice is ``choice``."""

    def answer(self, choices: Sequence[Whole], usage: Usage) -> Json: ...

    def chunk(self, choices: list[Json]) -> Json: ...

    def opening(self, choice: int) -> list[Json]: ...

    def piece(self, choice: int, text: str, infos: Sequence[TokenInfo]) -> Json: ...

    def closing(self, choice: int, finish_reason: str) -> Json: ...


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, model: str) -> None:
        self._envelope = _envelope("chatcmpl-", model)

    def answer(self, choices: Sequence[Whole], usage: Usage) -> Json:
        rendered = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(choice.texts),
                    "refusal": None,
                },
                "logprobs": _chat_logprobs(choice.infos),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        kind = {"object": "chat.completion"}
        return {**self._envelope, **kind, "choices": rendered, "usage": usage.json()}

    def chunk(self, choices: list[Json]) -> Json:
        return {**self._envelope, "object": "chat.completion.chunk", "choices": choices}

    def opening(self, choice: int) -> list[Json]:
        return [_chat_choice(choice, {"role": "assistant", "content": ""})]

    def piece(self, choice: int, text: str, infos: Sequence[TokenInfo]) -> Json:
        return _chat_choice(choice, {"content": text}, infos)

    def closing(self, choice: int, finish_reason: str) -> Json:
        return {**_chat_choice(choice, {}), "finish_reason": finish_reason}


class CompletionFormat:
    """/v1/completions."""

    def __init__(self, model: str, choice_count: int) -> None:
        self._envelope = {**_envelope("cmpl-", model), "object": "text_completion"}
        self._offsets = [_Offsets() for _ in range(choice_count)]

    def answer(self, choices: Sequence[Whole], usage: Usage) -> Json:
        rendered = [
            {
                **self.piece(index, "".join(choice.texts), choice.infos),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._envelope, "choices": rendered, "usage": usage.json()}

    def chunk(self, choices: list[Json]) -> Json:
        return {**self._envelope, "choices": choices}

    def opening(self, choice: int) -> list[Json]:
        return []

    def piece(self, choice: int, text: str, infos: Sequence[TokenInfo]) -> Json:
        return {
            "index": choice,
            "text": text,
            "logprobs": _completion_logprobs(infos, self._offsets[choice]),
            "finish_reason": None,
        }

    def closing(self, choice: int, finish_reason: str) -> Json:
        return {**self.piece(choice, "", ()), "finish_reason": finish_reason}


class _Offsets:
    """Where in the text each token begins, in characters, however the bytes are cut."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, piece: bytes) -> int:
        begin = self._length
        self._length += len(self._decoder.decode(piece))
        return begin


def _envelope(prefix: str, model: str) -> Json:
    return {"id": prefix + secrets.token_hex(16), "created": int(time.time()), "model": model}


def _chat_choice(choice: int, delta: Json, infos: Sequence[TokenInfo] = ()) -> Json:
    return {
        "index": choice,
        "delta": delta,
        "logprobs": _chat_logprobs(infos),
        "finish_reason": None,
    }


def _chat_logprobs(infos: Sequence[TokenInfo]) -> Json | None:
    if not infos:
        return None
    content = [
        {**_chat_token(info.chosen), "top_logprobs": [_chat_token(each) for each in info.top]}
        for info in infos
    ]
    return {"content": content, "refusal": None}


def _chat_token(entry: TokenLogprob) -> Json:
    return {
        "token": entry.piece.decode("utf-8", "replace"),
        "logprob": max(entry.logprob, LOGPROB_MIN),
        "bytes": list(entry.piece),
    }


def _completion_logprobs(infos: Sequence[TokenInfo], offsets: _Offsets) -> Json | None:
    if not infos:
        return None
    return {
        "tokens": [_label(info.chosen.piece) for info in infos],
        "token_logprobs": [max(info.chosen.logprob, LOGPROB_MIN) for info in infos],
        "top_logprobs": [
            # The chosen token is always among them, as OpenAI documents.
            {
                _label(each.piece): max(each.logprob, LOGPROB_MIN)
                for each in (*info.top, info.chosen)
            }
            for info in infos
        ],
        "text_offset": [offsets.next(info.chosen.piece) for info in infos],
    }


def _label(piece: bytes) -> str:
    """A token as a JSON key; part of a character is spelt out, so that two never share a key."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
