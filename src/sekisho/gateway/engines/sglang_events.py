"""What SGLang answers: an event of its stream, held to its word, and errors as our codes."""

from typing import TypeVar

import msgspec

from sekisho.engine.params import SamplingParams, TokenInfo, TokenLogprob
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gateway.engines.side import FailureError, Step, TokenId, refused

T = TypeVar("T")
_TRANSFER = "KVTransferError"
_VIOLATION = "ownership_violation"  # how the guard's messages of this kind begin


class _Reason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


_Entry = tuple[float | None, TokenId, str | None]


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
    output_ids: list[TokenId] | None = None
    meta_info: _Meta | None = None
    error: _Error | None = None


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
        if status == 500 and _TRANSFER in text:
            return FailureError("transfer_failed", where)
        return refused(self._side, status, text, self._prompt_count, self._params.max_tokens)

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
        value = float("-inf") if logprob is None else logprob
        return TokenLogprob(token, self._tokenizer.piece(token), value)

    def _nonsense(self, found: str) -> FailureError:
        return FailureError("internal_error", f"{self._side}: {found}")
