"""From logits to a token: a pure function of one request's own state.

The token depends on (logits, params, step, history) and on nothing else: not on other requests,
not on earlier calls, not on the order of calls. So a request that is preempted and recomputed goes
on with the same tokens, and nobody's traffic changes anybody's answer. Engines that kept sampling
state by batch slot have leaked it to the slot's next owner (GHSA-fpch-3xrf-7q96,
GHSA-v97p-wpxp-px84); here a `History` is owned by the request and handed in.

Order of operations, as in vLLM and Hugging Face transformers:

1. logprobs are taken from the logits as the model gave them: a natural log-softmax before
   everything below (vLLM calls these raw logprobs);
2. logit_bias is added;
3. repetition penalty (x / r where x > 0, else x * r; CTRL, arXiv:1909.05858), over the tokens of
   prompt and answer; then the frequency and presence penalties (x - f * count - p; OpenAI), over
   the tokens of the answer;
4. temperature 0 takes the largest logit; otherwise logits are divided by the temperature;
5. top_k, then top_p (the fewest best tokens with at least that share of the mass that top_k left),
   then min_p (at least that share of the best token's probability);
6. one token is drawn from what is left, by inverse CDF in the order of token ids, so that a filter
   that removes nothing changes nothing.

Equal logits rank by token id, lowest first, everywhere: top_k = 1 is greedy, and a filter never
keeps more tokens than it says. Weights are fp32, sums of them fp64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from sekisho.engine.params import SamplingParams

_BLOCK = 256
_UNSEEN = -1
# Differences of logits are divided by the temperature in fp32; this keeps the divisor normal.
_TEMPERATURE_MIN = 1e-30


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token; its logprob and the best alternatives as (token, logprob), best first, if asked
    for. Alternatives that the model itself makes impossible are left out."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class History:
    """Which tokens one request has seen, for its penalties. It belongs to the request.

    Holds int32 [vocab_size], and only where a penalty is set: -1 for a token not seen, otherwise
    how often it was generated (0: in the prompt only).
    """

    __slots__ = ("_counts",)

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        """Raises ValueError for a prompt token outside the vocabulary."""
        self._counts: NDArray[np.int32] | None = None
        if (
            params.repetition_penalty == 1.0
            and params.frequency_penalty == 0.0
            and params.presence_penalty == 0.0
        ):
            return
        self._counts = np.full(vocab_size, _UNSEEN, dtype=np.int32)
        tokens = np.fromiter(prompt, dtype=np.int64, count=len(prompt))
        if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
            raise ValueError("prompt: token id outside the vocabulary")
        self._counts[tokens] = 0

    def add(self, token: int) -> None:
        """Count one released token of the answer. Raises ValueError outside the vocabulary."""
        counts = self._counts
        if counts is None:
            return
        if not 0 <= token < counts.size:
            raise ValueError(f"token id {token} outside the vocabulary")
        counts[token] = max(int(counts[token]), 0) + 1

    @property
    def used(self) -> bool:
        """Whether a penalty is set."""
        return self._counts is not None

    def penalize(self, logits: NDArray[np.float32], params: SamplingParams) -> None:
        """Change ``logits`` [vocab_size] in place, seen tokens only."""
        if self._counts is None:
            return
        seen = np.flatnonzero(self._counts > _UNSEEN)
        counts = self._counts[seen]
        values = logits[seen].astype(np.float64)
        rate = params.repetition_penalty
        values = np.where(values > 0.0, values / rate, values * rate)
        values -= params.frequency_penalty * counts
        values -= params.presence_penalty * (counts > 0)
        logits[seen] = values


def sample(
    logits: NDArray[np.float32], params: SamplingParams, step: int, history: History
) -> Sampled:
    """Choose the next token of one request.

    Args:
        logits: fp32 [vocab], not changed; -inf means impossible.
        step: number of tokens generated so far.
        history: this request's own; not changed (call `History.add` once the token is released).

    Raises:
        ValueError: NaN or +inf among the logits, or no possible token, or a logit_bias id outside
            the vocabulary. No token is better than a made-up one.
    """
    with np.errstate(over="ignore"):  # a tiny temperature turns differences into -inf, rightly
        best = _best(logits)
        adjusted = _adjust(logits, params, history)
        token = best if adjusted is logits else _best(adjusted)
        if params.temperature > 0.0:
            token = _draw(adjusted, token, params, uniform(params.seed, step))
        if params.logprobs is None:
            return Sampled(token, None, ())
        return _with_logprobs(logits, best, token, params.logprobs)


def uniform(seed: int, step: int) -> float:
    """The random number of one step: 53 bits in [0, 1) from BLAKE2b(seed u64, step u64).

    Counter-based, so that there is no generator state to keep, to lose or to share; and a hash, so
    that neighbouring seeds have nothing in common.
    """
    message = seed.to_bytes(8, "little") + step.to_bytes(8, "little")
    digest = blake2b(message, digest_size=8, person=b"sekisho.sampler").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _best(logits: NDArray[np.float32]) -> int:
    """The largest logit's lowest id. NaN counts as largest in NumPy, so one look finds it."""
    best = int(logits.argmax())
    if not math.isfinite(logits[best]):
        raise ValueError(f"logits: {logits[best]} is the largest value, no token can be chosen")
    return best


def _adjust(
    logits: NDArray[np.float32], params: SamplingParams, history: History
) -> NDArray[np.float32]:
    """Bias and penalties, on a copy; ``logits`` itself if there are none."""
    bias = params.logit_bias
    if not bias and not history.used:
        return logits
    adjusted = logits.copy()
    if bias:
        ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        if ids.min() < 0 or ids.max() >= logits.size:
            raise ValueError("logit_bias: token id outside the vocabulary")
        adjusted[ids] += np.fromiter(bias.values(), dtype=np.float64, count=len(bias))
    history.penalize(adjusted, params)
    return adjusted


def _draw(
    logits: NDArray[np.float32], best: int, params: SamplingParams, uniform_number: float
) -> int:
    """One token by steps 4 to 6 of the module's order. ``best`` is the largest logit's id."""
    ids: NDArray[np.intp] | None = None
    values = logits
    if 0 < params.top_k < logits.size:
        ids = _top_k(logits, params.top_k)
        values = logits[ids]
    weights = values - logits[best]
    weights /= np.float32(max(params.temperature, _TEMPERATURE_MIN))
    np.exp(weights, out=weights)
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)  # the best token's weight is exp(0) = 1
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    place = _inverse_cdf(weights, uniform_number)
    return place if ids is None else int(ids[place])


def _top_k(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices, increasing, of the ``count`` largest values; by partition, not by sort."""
    cut = np.partition(values, values.size - count)[values.size - count]
    return _at_least(values, cut, count)


def _nucleus(weights: NDArray[np.float32], share: float) -> NDArray[np.intp]:
    """Indices, increasing, of the fewest best weights that hold ``share`` of the total.

    No full sort: all weights below t together are less than size * t, so that with
    t = (1 - share) * total / size the rest holds the share already. Half of t leaves room for
    rounding.
    """
    total = float(weights.sum(dtype=np.float64))
    floor = 0.5 * (1.0 - share) * total / weights.size
    descending = np.sort(weights[weights >= floor])[::-1]
    mass = np.cumsum(descending, dtype=np.float64)
    count = min(int(np.searchsorted(mass, share * total)) + 1, descending.size)
    return _at_least(weights, descending[count - 1], count)


def _at_least(values: NDArray[np.float32], cut: np.float32, count: int) -> NDArray[np.intp]:
    """Indices, increasing, of the ``count`` largest values, the last of which equals ``cut``."""
    kept = np.flatnonzero(values >= cut)
    surplus = kept.size - count
    if surplus > 0:  # values equal to the cut: the highest ids go
        kept = np.delete(kept, np.flatnonzero(values[kept] == cut)[-surplus:])
    return kept


def _inverse_cdf(weights: NDArray[np.float32], uniform_number: float) -> int:
    """The index at which the running sum of weights passes ``uniform_number`` of the total, first
    by block, then within the block (a running sum over a whole vocabulary is slow)."""
    starts = np.arange(0, weights.size, _BLOCK)
    block_ends = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = uniform_number * block_ends[-1]
    block = int(np.searchsorted(block_ends, target, side="right"))
    before = block_ends[block - 1] if block else 0.0
    start = block * _BLOCK
    ends = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    # The two sums of a block may round apart; the bound keeps to tokens of this block with weight.
    within = min(target - before, np.nextafter(ends[-1], 0.0))
    return start + int(np.searchsorted(ends, within, side="right"))


def _with_logprobs(logits: NDArray[np.float32], best: int, token: int, count: int) -> Sampled:
    """Logprobs of the model's own distribution: x - max - log(sum(exp(x - max)))."""
    largest = float(logits[best])
    normalizer = math.log(float(np.exp(logits - logits[best]).sum(dtype=np.float64)))
    top: list[tuple[int, float]] = []
    if count:
        ids = _top_k(logits, min(count, logits.size))
        for i in ids[np.argsort(-logits[ids], kind="stable")]:
            if logits[i] > -math.inf:
                top.append((int(i), float(logits[i]) - largest - normalizer))
    return Sampled(token, float(logits[token]) - largest - normalizer, tuple(top))
