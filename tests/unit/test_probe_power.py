"""What timing would have shown: the fast statistic is the slow one's, and what is said to be
caught is caught."""

import numpy as np
import pytest

from sekisho.probe.power import LEVEL, apart_s, power_curve, share_caught, shift_caught
from sekisho.probe.stats import compare, ks_steps, ks_steps_needed, power


@pytest.mark.parametrize("digits", [9, 1])
def test_many_pairs_at_once_are_judged_as_each_alone(digits: int, rng: np.random.Generator) -> None:
    first = np.round(rng.lognormal(0, 1, (200, 25)), digits)
    second = np.round(rng.lognormal(0.5, 1, (200, 25)), digits)
    for alpha in (0.1, 0.01, 0.001):
        fast = ks_steps(first, second) >= ks_steps_needed(25, alpha)
        slow = [
            compare(one.tolist(), other.tolist()).p <= alpha
            for one, other in zip(first, second, strict=True)
        ]
        assert fast.tolist() == slow
        assert 0 < fast.sum() < 200


def test_the_steps_needed_are_the_fewest() -> None:
    # 3 against 3: of the 20 orders only the fully separated one has three steps.
    assert ks_steps_needed(3, 0.05) == 3
    assert ks_steps_needed(3, 0.049) == 4
    assert ks_steps_needed(0, 0.01) == 1
    assert ks_steps_needed(5, 1.0) == 0


def test_fewer_hits_are_seen_less_often(rng: np.random.Generator) -> None:
    misses = rng.lognormal(-2, 0.3, 60).tolist()
    none, half, every = (
        power(misses, apart_s(misses), 60, rng, alpha=LEVEL, share=share)
        for share in (0.0, 0.3, 1.0)
    )
    assert none.low <= LEVEL
    assert none.high < half.low < half.high < every.low
    assert every.high == 1


@pytest.mark.parametrize("part", [1.0, 0.1])
def test_a_share_of_hits_that_is_said_to_be_caught_is_caught(
    part: float, rng: np.random.Generator
) -> None:
    misses = rng.lognormal(-2, 0.1, 60).tolist()
    shift = part * apart_s(misses)
    share = share_caught(misses, shift, 60, rng)
    assert 0.2 < share < 1
    assert power(misses, shift, 60, rng, alpha=LEVEL, share=share, simulations=4000).high > 0.95
    less = power(misses, shift, 60, rng, alpha=LEVEL, share=share * 0.7, simulations=4000)
    assert less.high < 0.95


def test_a_shift_that_is_said_to_be_caught_is_caught(rng: np.random.Generator) -> None:
    """Also where one time is a hundred times as long as the others."""
    misses = [*rng.lognormal(-2, 0.1, 60).tolist(), 20.0]
    shift = shift_caught(misses, 60, rng)
    assert shift is not None
    assert 0.001 < shift < 0.1
    assert power(misses, shift, 60, rng, alpha=LEVEL, simulations=4000).high > 0.95
    assert power(misses, shift * 0.6, 60, rng, alpha=LEVEL, simulations=4000).high < 0.95


def test_a_sample_too_small_to_show_anything_says_so(rng: np.random.Generator) -> None:
    misses = [0.1, 0.2, 0.3]
    assert shift_caught(misses, 3, rng) is None
    assert share_caught(misses, apart_s(misses), 3, rng) == 1
    assert share_caught(misses, 0.0, 100, rng) == 1
    assert shift_caught([], 60, rng) is None


def test_a_power_curve_rises_with_samples_and_with_the_shift(rng: np.random.Generator) -> None:
    misses = rng.lognormal(-2, 0.3, 60).tolist()
    points = power_curve(misses, 0.1, rng, counts=(10, 40, 160))
    assert [(point.count, round(point.shift_s, 3)) for point in points] == [
        (count, shift) for shift in (0.1, 0.05, 0.025) for count in (10, 40, 160)
    ]
    of = {(point.count, round(point.shift_s, 3)): point.power for point in points}
    for shift in (0.1, 0.05, 0.025):
        assert of[10, shift].low <= of[40, shift].low <= of[160, shift].low
    assert of[40, 0.025].high < of[40, 0.1].low
    assert of[160, 0.1].low > 0.9
