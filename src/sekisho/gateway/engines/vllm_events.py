"""What vLLM answers: prefill's one answer and decode's events, held to their word.

(``CompletionResponse`` and ``CompletionStreamResponse`` of vLLM 0.32.0.)
"""

from typing import Any, TypeVar

import msgspec

from sekisho.engine.params import SamplingParams, TokenInfo, TokenLogprob
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gateway.engines.side import FailureError, Step, TokenId, refused

T = TypeVar("T")
_LOGPROB_MIN = -9999.0  # what vLLM writes for minus infinity
_TOKEN = "token_id:"
_MANIFEST = "sekisho_manifest"


class _Error(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Manifest(msgspec.Struct):
    """Of the guard's signed manifest, what the gateway itself can hold against its request."""

    transfer: str
    engine: str
    tokens: int


class _Prefilled(msgspec.Struct):
    usage: _Usage
    kv_transfer_params: dict[str, Any] | None = None


class Handed(msgspec.Struct, frozen=True):
    """What prefill said. ``params``: for decode; ``engine``: vLLM's id of the engine that has the
    blocks; ``cached``: prompt tokens that it had."""

    params: dict[str, Any]
    engine: str
    cached: int


def handed(side: str, body: bytes, prompt_count: int, transfer: str) -> Handed:
    """Prefill's answer.

    Raises:
        FailureError: it cannot be read, is about another prompt, or has no manifest.
    """
    answer = _decoded(side, body, _Prefilled)
    found = answer.usage.prompt_tokens
    if found != prompt_count:
        told = f"{side} answers a prompt of {found} tokens, not {prompt_count}"
        raise FailureError("ownership_violation", told)
    params = answer.kv_transfer_params or {}
    try:
        manifest = msgspec.convert(params.get(_MANIFEST), _Manifest)
    except msgspec.ValidationError:
        told = f"{side} has computed the prompt and signed nothing"
        raise FailureError("transfer_failed", told) from None
    if (manifest.transfer, manifest.tokens) != (transfer, prompt_count):
        raise FailureError("ownership_violation", f"{side} signs another hand-off")
    return Handed(params, manifest.engine, _cached(answer.usage))


class Reader:
    """Decode's events of one request, in order."""

    def __init__(
        self, side: str, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self._side = side
        self._prompt = prompt
        self._params = params
        self._tokenizer = tokenizer
        self._count = 0
        self._seen = False
        self._finish = ""
        self.is_over = False

    def read(self, data: bytes) -> Step | None:
        """The next event; None for the last, which only counts.

        Raises:
            FailureError: it is an error, of another shape, counts otherwise, or answers another
                prompt than ours.
        """
        event = _decoded(self._side, data, _Event)
        if event.error is not None:
            raise self.refused(event.error.code or 500, event.error.message)
        if self.is_over:
            raise self._nonsense("an event after the last")
        if not event.choices:
            self._last(event.usage)
            return None
        if len(event.choices) > 1 or self._finish:
            raise self._nonsense("another answer than the one that was asked for")
        return self._step(event.choices[0])

    def refused(self, status: int, text: str) -> FailureError:
        """The outcome behind an HTTP status, or behind the one inside an event."""
        return refused(self._side, status, text, len(self._prompt), self._params.max_tokens)

    def _step(self, choice: _Choice) -> Step:
        if not self._seen and choice.prompt_token_ids != self._prompt:
            raise FailureError("ownership_violation", f"{self._side} answers another prompt")
        self._seen = True
        reason = choice.finish_reason
        if reason not in (None, "stop", "length"):
            raise self._nonsense("an unknown finish_reason")
        tokens = choice.token_ids
        if tokens is None:
            raise self._nonsense("an event without token ids")
        self._count += len(tokens)
        self._finish = reason or ""
        return Step(tokens, self._infos(tokens, choice.logprobs), self._finish)

    def _last(self, usage: _Usage | None) -> None:
        if usage is None or not self._finish:
            raise self._nonsense("an event that says nothing")
        if (usage.prompt_tokens, usage.completion_tokens) != (len(self._prompt), self._count):
            raise self._nonsense("a count of other tokens than it gave out")
        self.is_over = True

    def _infos(self, tokens: list[int], said: _Logprobs | None) -> list[TokenInfo]:
        if self._params.logprobs is None or not tokens:
            return []
        if said is None or not (
            len(said.tokens) == len(said.token_logprobs) == len(said.top_logprobs) == len(tokens)
        ):
            raise self._nonsense("log-probabilities are missing")
        infos = []
        for token, name, value, top in zip(
            tokens, said.tokens, said.token_logprobs, said.top_logprobs, strict=True
        ):
            chosen = self._logprob(name, value)
            if chosen.token != token:
                raise self._nonsense("log-probabilities of other tokens")
            # The chosen one is among them, in addition where it is none of the best.
            best = [self._logprob(n, v) for n, v in (top or {}).items()]
            best.sort(key=lambda each: -each.logprob)
            infos.append(TokenInfo(chosen, tuple(best[: self._params.logprobs])))
        return infos

    def _logprob(self, name: str, value: float | None) -> TokenLogprob:
        digits = name.removeprefix(_TOKEN)
        if digits == name or not (digits.isascii() and digits.isdigit()) or len(digits) > 9:
            raise self._nonsense("a token without its id")
        token = int(digits)
        known = value if value is not None and value > _LOGPROB_MIN else float("-inf")
        return TokenLogprob(token, self._tokenizer.piece(token), known)

    def _nonsense(self, found: str) -> FailureError:
        return FailureError("internal_error", f"{self._side}: {found}")


def _cached(usage: _Usage) -> int:
    details = usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


def _decoded(side: str, data: bytes, of: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=of)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FailureError("internal_error", f"{side}: an answer cannot be read") from None
