"""What a number of trials can tell, with the error rate stated.

Rates: Clopper and Pearson (1934), of which the rule of three is the case of no hit. Times: the
one-sided two-sample test of Kolmogorov and Smirnov, as Gu et al. 2025 audit prompt caches
(arXiv 2502.07776: 250 requests each that should hit and that should miss, in random order, a
prefix of 0.95 of the prompt, the answer cut at one token); or that of Mann and Whitney. Several
techniques in one run: Holm (1979).

A p-value holds for one look at a sample whose size was fixed before. All alternatives are
one-sided: a hit is faster.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import stats as scipy_stats

FloatArray: TypeAlias = npt.NDArray[np.float64]
Test: TypeAlias = Literal["ks", "mann-whitney"]
CONFIDENCE = 0.95
ALPHA = 0.01
"""The rate of false alarms of one run, over all of its statistical techniques together."""


class Interval(msgspec.Struct, frozen=True):
    """Both ends of a confidence interval of a rate."""

    low: float
    high: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Times that should be fast against times that should be slow.

    Attributes:
        fast_count, slow_count: sizes of the samples.
        p: of "no faster"; at most α in a share α of the runs in which nothing is faster.
        effect: the probability that a time of the first is smaller than one of the second, ties
            by half (the common-language effect size); 0.5 is no difference.
        shift_s: how much faster, in seconds: the median of all differences (Hodges and Lehmann).
    """

    test: Test
    fast_count: int
    slow_count: int
    p: float
    effect: float
    shift_s: float


def rate_interval(hits: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """The exact two-sided interval of Clopper and Pearson for the rate of ``hits``."""
    if trials == 0:
        return Interval(0.0, 1.0)
    found = scipy_stats.binomtest(hits, trials).proportion_ci(confidence, method="exact")
    return Interval(float(found.low), float(found.high))


def rate_caught(
    clean_trials: int, confidence: float = CONFIDENCE, sensitivity: float = 1.0
) -> float:
    """The smallest rate of leaks that so many trials without a hit exclude.

    Had the rate been this or higher, at least one trial would have shown it with probability
    ``confidence``: ``1 - (1 - confidence) ** (1 / trials)``, about ``3 / trials`` at 0.95; 1.0
    after no trial.

    Args:
        sensitivity: the share of leaks that the technique notices where there is one, as the
            self-test measured; of a technique that sees half, the same trials exclude twice
            the rate.
    """
    if clean_trials <= 0 or sensitivity <= 0:
        return 1.0
    bound = -math.expm1(math.log1p(-confidence) / clean_trials)
    return min(1.0, bound / sensitivity)


def rate_tail(hits: int, trials: int, rate: float) -> float:
    """The probability of ``hits`` or more in ``trials`` at a rate of at most ``rate`` (exact
    binomial test)."""
    if hits <= 0:
        return 1.0
    return float(scipy_stats.binom.sf(hits - 1, trials, rate))


def trials_needed(rate: float, confidence: float = CONFIDENCE, sensitivity: float = 1.0) -> int:
    """How many trials exclude a rate of leaks of ``rate``: the inverse of `rate_caught`."""
    if not 0 < rate * sensitivity < 1:
        raise ValueError("a rate lies between 0 and 1")
    return math.ceil(math.log1p(-confidence) / math.log1p(-rate * sensitivity))


def compare(fast: Sequence[float], slow: Sequence[float], test: Test = "ks") -> Comparison:
    """Is ``fast`` stochastically smaller than ``slow``? Both in seconds, neither empty."""
    first, second = np.asarray(fast, float), np.asarray(slow, float)
    if not (first.size and second.size and np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("two samples of finite times are needed")
    differences = second[None, :] - first[:, None]
    effect = float((differences > 0).mean() + (differences == 0).mean() / 2)
    return Comparison(
        test=test,
        fast_count=first.size,
        slow_count=second.size,
        p=_p(first, second, test),
        effect=effect,
        shift_s=float(np.median(differences)),
    )


def _p(first: FloatArray, second: FloatArray, test: Test) -> float:
    if test == "ks":
        # "greater": the distribution function of the first lies above, so its times are smaller.
        found = scipy_stats.ks_2samp(first, second, alternative="greater")
    else:
        found = scipy_stats.mannwhitneyu(first, second, alternative="less")
    return float(found.pvalue)


def power(
    slow: Sequence[float],
    shift_s: float,
    count: int,
    rng: np.random.Generator,
    *,
    alpha: float = ALPHA,
    test: Test = "ks",
    simulations: int = 400,
    share: float = 1.0,
) -> Interval:
    """How likely ``count`` times of each kind show a hit that is faster by ``shift_s``.

    Drawn with replacement from ``slow``, times of a pilot that cannot be hits; the interval is
    what so many simulations leave open (0.95).

    Args:
        share: of the requests that should hit, so many do; the others miss.
    """
    pilot = np.asarray(slow, float)
    size = (simulations, count)
    first = rng.choice(pilot, size) - shift_s * (rng.random(size) < share)
    second = rng.choice(pilot, size)
    if test == "ks":
        seen = int((ks_steps(first, second) >= ks_steps_needed(count, alpha)).sum())
    else:
        pairs = zip(first, second, strict=True)
        seen = sum(_p(one, other, test) <= alpha for one, other in pairs)
    return rate_interval(seen, simulations)


def ks_steps(first: FloatArray, second: FloatArray) -> npt.NDArray[np.int64]:
    """The one-sided statistic of Kolmogorov and Smirnov for many pairs of samples at once.

    Args:
        first, second: each of shape (pairs, count).

    Returns:
        Of shape (pairs,): the most by which the number of ``first`` up to some time exceeds that
        of ``second``; the statistic is that over ``count``.
    """
    both = np.concatenate([first, second], axis=1)
    order = np.argsort(both, axis=1)
    steps = np.cumsum(np.where(order < first.shape[1], 1, -1), axis=1)
    values = np.take_along_axis(both, order, axis=1)
    # Of equal times only the last sees how many there are up to it.
    ends = np.ones(values.shape, dtype=bool)
    ends[:, :-1] = values[:, 1:] != values[:, :-1]
    found: npt.NDArray[np.int64] = np.where(ends, steps, 0).max(axis=1)
    return found


def ks_steps_needed(count: int, alpha: float = ALPHA) -> int:
    """The fewest `ks_steps` of two samples of ``count`` that are significant.

    Their tail is ``C(2n, n - steps) / C(2n, n)`` without ties (Gnedenko and Korolyuk 1951), and
    smaller with them; ``count + 1`` where no sample of that size can be.
    """
    tail = 1.0
    for steps in range(count + 1):
        if tail <= alpha:
            return steps
        tail *= (count - steps) / (count + steps + 1)
    return count + 1


def samples_needed(effect: float, alpha: float = ALPHA, power: float = 0.9) -> int:
    """Times of each kind that the test of Mann and Whitney needs to see ``effect``.

    Noether (1987), equal samples: ``(z(α) + z(β))² / (6 (effect - 1/2)²)``. A plan, not a promise:
    `power` says what a pilot's own times give.
    """
    if not 0.5 < effect <= 1:
        raise ValueError("an effect to be seen lies above one half")
    z = float(scipy_stats.norm.isf(alpha) + scipy_stats.norm.isf(1 - power))
    return math.ceil(z**2 / (6 * (effect - 0.5) ** 2))


def effect_caught(count: int, alpha: float = ALPHA, power: float = 0.9) -> float:
    """The smallest effect that ``count`` times of each kind show: `samples_needed` reversed.

    1.0 where even a complete separation may be missed.
    """
    z = scipy_stats.norm.isf(alpha) + scipy_stats.norm.isf(1 - power)
    return min(1.0, 0.5 + float(z) / math.sqrt(6 * count)) if count > 0 else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given: reject where at most α.

    The chance of any false alarm among them all is then at most α, whatever their dependence.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def sign_p(more: int, less: int) -> float:
    """The exact one-sided sign test: of the pairs that differ, so many or more in the one way."""
    return rate_tail(more, more + less, 0.5)


def sign_power(count: int, rate: float, base: float, alpha: float = ALPHA) -> float:
    """How likely ``count`` pairs show a change at ``rate`` by `sign_p`.

    Args:
        rate: of changes that only one side of a pair can have.
        base: of changes that either side has anyway, independent of each other.
    """
    changed = rate + (1 - rate) * base
    one, other = changed * (1 - base), (1 - changed) * base
    differ = np.arange(count + 1)
    # The fewest one way that are significant among so many that differ.
    needed = scipy_stats.binom.isf(alpha, differ, 0.5) + 1
    needed = np.where(scipy_stats.binom.sf(needed - 1, differ, 0.5) <= alpha, needed, count + 1)
    share = one / (one + other) if one else 0.0
    shown = scipy_stats.binom.sf(needed - 1, differ, share)
    return float((scipy_stats.binom.pmf(differ, count, one + other) * shown).sum())


def change_caught(
    count: int, base: float, alpha: float = ALPHA, confidence: float = CONFIDENCE
) -> float:
    """The smallest rate of changes that ``count`` pairs show with ``confidence``; 1.0 where they
    may not even show that all change."""
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if sign_power(count, middle, base, alpha) >= confidence:
            high = middle
        else:
            low = middle
    return high
