"""One request inside an engine: its tokens, its text, its pages, its one outcome."""

import enum

import numpy as np
from numpy.typing import NDArray

from sekisho.core.outcome import Outcome, OutcomeCell
from sekisho.core.table import BlockTable
from sekisho.engine.output import Delta
from sekisho.engine.pages import Text
from sekisho.engine.params import SamplingParams, TokenInfo, TokenLogprob
from sekisho.engine.sampler import History, Sampled, sample
from sekisho.engine.tokenizer import Detokenizer, Tokenizer


class Phase(enum.Enum):
    """WAITING for pages · TRANSFERRING, a remote writer fills them · PREFILLING, this node does ·
    DECODING · ENDED."""

    WAITING = "waiting"
    TRANSFERRING = "transferring"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class Sequence:
    """Everything a request owns. Nothing of it lives in an array indexed by batch slot, so that
    no later request can inherit it (GHSA-v97p-wpxp-px84, GHSA-fpch-3xrf-7q96).

    ``tokens`` are prompt and answer; their keys and values are in ``table``, all but the last
    one's, which the next decode step computes. ``wanted`` is what it waits to get pages for.
    ``since``: when it began to wait, seconds. ``vocab_size`` is the model's, which may be larger
    than the tokenizer's.

    Raises:
        ValueError: the prompt is empty or holds a token outside the vocabulary.
    """

    def __init__(
        self,
        request: int,
        scope: str,
        tokens: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        vocab_size: int,
        since: float,
    ) -> None:
        if not tokens or min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError("the prompt is empty or holds a token outside the vocabulary")
        self.request = request
        self.scope = scope
        self.tokens = list(tokens)
        self.prompt_count = len(tokens)
        self.params = params
        self.since = since
        self.phase = Phase.WAITING
        self.wanted: Text | None = None
        self.table: BlockTable | None = None
        self.cached_tokens = 0
        self.outcome = OutcomeCell()
        self.output_count = 0
        self._tokenizer = tokenizer
        self._history = History(params, tokens, vocab_size)
        self._detokenizer = Detokenizer(tokenizer, params.stop)

    def held(self) -> list[int]:
        """The tokens whose keys and values must be in the pages before decoding."""
        return self.tokens[:-1]

    def next_token(self, logits: NDArray[np.float32]) -> tuple[Delta, Outcome | None]:
        """Sample from ``logits`` [vocab] and take the token: what to release, and the end if it
        is one.

        Raises:
            ValueError: the logits allow no honest token.
        """
        index = self.output_count
        sampled = sample(logits, self.params, index, self._history)
        self._history.add(sampled.token)
        self.output_count += 1
        if sampled.token in self.params.stop_token_ids:
            return Delta(self.request, index, [], self._detokenizer.flush(), []), Outcome("stop")
        self.tokens.append(sampled.token)
        text = self._detokenizer.push(sampled.token)
        end = None
        if self._detokenizer.stopped:
            end = Outcome("stop")
        elif self.output_count == self.params.max_tokens:
            text += self._detokenizer.flush()
            end = Outcome("stop" if self._detokenizer.stopped else "length")
        return Delta(self.request, index, [sampled.token], text, self._infos(sampled)), end

    def _infos(self, sampled: Sampled) -> list[TokenInfo]:
        if sampled.logprob is None:
            return []
        chosen = TokenLogprob(sampled.token, self._tokenizer.piece(sampled.token), sampled.logprob)
        top = tuple(
            TokenLogprob(token, self._tokenizer.piece(token), logprob)
            for token, logprob in sampled.top
        )
        return [TokenInfo(chosen, top)]
