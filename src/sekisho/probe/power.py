"""What timing would have shown: power by number of samples, and the smallest leak it excludes.

Everything is simulated from the times of requests that could not hit, by the very test that judges
the run (`stats.power`). Holm's adjustment makes each test of a run stricter the more there are, so
that the level here is what is left to one of ten.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from sekisho.probe.stats import ALPHA, CONFIDENCE, Interval, power

TESTS_MAX = 10
"""Statistical tests of one run, at most."""
LEVEL = ALPHA / TESTS_MAX
"""A p-value that is a finding whatever the other tests of the run show."""
COUNTS = 5, 10, 20, 30, 45, 60, 90, 120, 180, 250
"""Samples of each kind at which a curve has its points; Gu et al. 2025 take 250."""
_SHARES = 1.0, 0.5, 0.25
_STEPS = 7  # of a bisection; its last step is less than a hundredth
_SIMULATIONS = 1000
_FINEST = 1e-4
"""The smallest shift that is tried, as a share of one that sets all apart."""


class PowerPoint(msgspec.Struct, frozen=True, kw_only=True):
    """How likely ``count`` times of each kind show hits that are sooner by ``shift_s``, where
    every request hits."""

    count: int
    shift_s: float
    power: Interval


def power_curve(
    misses_s: Sequence[float],
    shift_s: float,
    rng: np.random.Generator,
    *,
    counts: Sequence[int] = COUNTS,
    level: float = LEVEL,
) -> tuple[PowerPoint, ...]:
    """One point for each of ``counts`` and for the whole, half and a quarter of ``shift_s``."""
    return tuple(
        PowerPoint(
            count=count,
            shift_s=shift_s * share,
            power=power(misses_s, shift_s * share, count, rng, alpha=level),
        )
        for share in _SHARES
        for count in counts
    )


def share_caught(
    misses_s: Sequence[float],
    shift_s: float,
    count: int,
    rng: np.random.Generator,
    *,
    level: float = LEVEL,
) -> float:
    """The smallest share of hits, sooner by ``shift_s`` each, that ``count`` times of each kind
    show with confidence 0.95; 1.0 where they may not even show it if all hit."""
    found = _least(
        lambda share: power(
            misses_s, shift_s, count, rng, alpha=level, simulations=_SIMULATIONS, share=share
        )
    )
    return 1.0 if found is None else found


def shift_caught(
    misses_s: Sequence[float], count: int, rng: np.random.Generator, *, level: float = LEVEL
) -> float | None:
    """The smallest shift, in seconds and of every request, that ``count`` times of each kind show
    with confidence 0.95; None where the sample is too small to show any."""
    if not misses_s:
        return None
    apart = apart_s(misses_s)

    def shift(place: float) -> float:
        return apart * math.pow(_FINEST, 1 - place)

    found = _least(
        lambda place: power(
            misses_s, shift(place), count, rng, alpha=level, simulations=_SIMULATIONS
        )
    )
    return None if found is None else shift(found)


def apart_s(misses_s: Sequence[float]) -> float:
    """A shift that makes every hit sooner than every miss."""
    return 2 * (max(misses_s) - min(misses_s)) + 1e-6


def _least(shown: Callable[[float], Interval]) -> float | None:
    """Where, between 0 and 1, simulations say that at least 0.95 is shown; None: not even at 1."""
    low, high = 0.0, 1.0
    if shown(high).low < CONFIDENCE:
        return None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if shown(middle).low >= CONFIDENCE:
            high = middle
        else:
            low = middle
    return high
