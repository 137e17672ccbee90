"""What SGLang answers: an event of its stream, held to its word, and errors as our codes."""

import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from sekisho.engine.params import SamplingParams, TokenInfo, TokenLogprob
from sekisho.engine.tokenizer import Tokenizer

T = TypeVar("T")
_NUMBER = re.compile(r"(?<![\w.])\d{1,15}(?![\w.]*\w)")
_STATUS = {429: "queue_full", 502: "transfer_failed", 503: "node_lost", 504: "transfer_failed"}
_TRANSFER = "KVTransferError"
_VIOLATION = "ownership_violation"  # how the guard's messages of this kind begin


class FailureError(Exception):
    """A side did not end cleanly. ``code`` is one of `CODES`; the message may reach a client if the
    code is a rejection, and the log always: it holds numbers, and nothing that SGLang said."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class _Reason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


_Entry = tuple[float | None, int, str | None]


class _Meta(msgspec.Struct):
    finish_reason: _Reason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    output_token_logprobs: list[_Entry] | None = None
    output_top_logprobs: list[list[_Entry] | None] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: _Error | None = None


class _Answer(msgspec.Struct):
    """An HTTP error: SGLang's own, FastAPI's, or a text of anybody."""

    error: _Error | str | None = None
    message: str | None = None
    detail: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """New tokens of an answer; ``infos`` one a token if asked for. ``finish``: stop, length or
    nothing yet."""

    tokens: list[int]
    infos: list[TokenInfo]
    finish: str
    cached: int


class Reader:
    """The events of one side of one request, in order.

    An event holds all tokens so far, or, under ``--incremental-streaming-output``, the new ones.
    Which of the two follows from its own count. A count that fits neither way is an error.
    """

    def __init__(
        self, side: str, prompt_count: int, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self._side = side
        self._prompt_count = prompt_count
        self._params = params
        self._tokenizer = tokenizer
        self._count = 0

    def read(self, data: bytes) -> Step:
        """The next event.

        Raises:
            FailureError: it is an error, an abort inside a 200, of another shape, or speaks of a
                prompt of another length than ours: SGLang before 0.5.20 refuses an over-long prompt
                by putting one token in its place, and goes on (sglang#30233).
        """
        try:
            event = msgspec.json.decode(data, type=_Event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._nonsense("an event cannot be read") from None
        if event.error is not None:
            raise self.refused(event.error.code or 500, event.error.message)
        meta = event.meta_info
        if meta is None:
            raise self._nonsense("an event without meta_info")
        reason = meta.finish_reason
        if reason is not None and reason.type == "abort":
            raise self.refused(reason.status_code or 500, reason.message or "")
        if reason is not None and reason.type not in ("stop", "length"):
            raise self._nonsense("an unknown finish_reason")
        if meta.prompt_tokens != self._prompt_count:
            message = f"{self._side} answers a prompt of {meta.prompt_tokens} tokens"
            raise FailureError("ownership_violation", f"{message}, not {self._prompt_count}")
        tokens = self._new(event.output_ids, meta.completion_tokens)
        infos = self._infos(tokens, meta)
        self._count += len(tokens)
        return Step(tokens, infos, "" if reason is None else reason.type, meta.cached_tokens)

    def refused(self, status: int, text: str) -> FailureError:
        """The outcome behind an HTTP status, or behind the one inside an abort."""
        where = f"{self._side} answers status {status}"
        if text.startswith(_VIOLATION):
            return FailureError("ownership_violation", f"{where}: its guard found a foreign page")
        if status in (400, 413) and (limit := self._limit(text)) is not None:
            told = f"the prompt has {self._prompt_count} tokens and the answer up to "
            told += f"{self._params.max_tokens}, the servers hold {limit}"
            return FailureError("context_length_exceeded", told)
        if status == 503 and "queue" in text and "full" in text:
            return FailureError("queue_full", "too many requests are waiting; try again later")
        moved = status == 500 and _TRANSFER in text
        code = "transfer_failed" if moved else _STATUS.get(status, "internal_error")
        return FailureError(code, where)

    def _limit(self, text: str) -> int | None:
        """The limit in a refusal for length: the largest number beside those of our request that
        our request does not fit into. None if the text is about something else."""
        numbers = [int(number) for number in _NUMBER.findall(text)]
        answer = self._params.max_tokens
        total = self._prompt_count + answer
        if self._prompt_count not in numbers and total not in numbers:
            return None
        for ours in (total, self._prompt_count, answer):
            if ours in numbers:
                numbers.remove(ours)
        return max((number for number in numbers if 0 < number <= total), default=None)

    def _new(self, ids: list[int] | None, count: int | None) -> list[int]:
        if ids is None or count is None or count < self._count:
            raise self._nonsense("an event without a count of tokens")
        if len(ids) == count:
            new = ids[self._count :]
        elif self._count + len(ids) == count:
            new = ids
        else:
            found = f"{len(ids)} tokens in an event of {count}, after {self._count}"
            raise self._nonsense(found)
        if any(token < 0 for token in new):
            raise self._nonsense("a negative token id")
        return new

    def _infos(self, tokens: list[int], meta: _Meta) -> list[TokenInfo]:
        if self._params.logprobs is None or not tokens:
            return []
        chosen = self._last(meta.output_token_logprobs, len(tokens))
        tops = (
            self._last(meta.output_top_logprobs, len(tokens))
            if self._params.logprobs
            else [None] * len(tokens)
        )
        if [entry[1] for entry in chosen] != tokens:
            raise self._nonsense("log-probabilities of other tokens")
        return [
            TokenInfo(self._logprob(entry), tuple(map(self._logprob, top or ())))
            for entry, top in zip(chosen, tops, strict=True)
        ]

    def _last(self, entries: list[T] | None, count: int) -> list[T]:
        if entries is None or len(entries) not in (count, self._count + count):
            raise self._nonsense("log-probabilities are missing")
        return entries[-count:]

    def _logprob(self, entry: _Entry) -> TokenLogprob:
        logprob, token, _ = entry
        if token < 0:
            raise self._nonsense("a negative token id")
        value = float("-inf") if logprob is None else logprob
        return TokenLogprob(token, self._tokenizer.piece(token), value)

    def _nonsense(self, found: str) -> FailureError:
        return FailureError("internal_error", f"{self._side}: {found}")


def text_of(body: bytes) -> str:
    """What an HTTP error says, for `Reader.refused`; empty where it is none that we know."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if isinstance(answer.error, _Error):
        return answer.error.message
    if answer.error is not None:
        return answer.error
    if answer.message is not None:
        return answer.message
    return (
        "" if answer.detail is None else bytes(answer.detail).decode("utf-8", "replace").strip('"')
    )
