"""Statistics of the probe, against published values and against what simulation counts."""

import numpy as np
import pytest

from sekisho.probe.stats import (
    Test,
    compare,
    effect_caught,
    holm,
    power,
    rate_caught,
    rate_interval,
    rate_tail,
    samples_needed,
    trials_needed,
)

BOTH: list[Test] = ["ks", "mann-whitney"]


def test_the_rule_of_three() -> None:
    assert rate_caught(300) == pytest.approx(3 / 300, rel=0.01)
    # Hanley and Lippman-Hand 1983: exact values beside the rule.
    assert rate_caught(30) == pytest.approx(0.0950, abs=5e-5)
    assert rate_caught(100) == pytest.approx(0.0295, abs=5e-5)
    assert rate_caught(300, confidence=0.99) == pytest.approx(0.0152, abs=5e-5)


def test_no_trial_excludes_nothing() -> None:
    assert rate_caught(0) == 1
    assert rate_caught(300, sensitivity=0) == 1
    assert rate_caught(1, sensitivity=0.5) == 1
    assert rate_interval(0, 0).high == 1


@pytest.mark.parametrize("rate", [0.2, 0.01, 0.0004])
@pytest.mark.parametrize("sensitivity", [1.0, 0.25])
def test_trials_needed_are_the_fewest_that_exclude_the_rate(
    rate: float, sensitivity: float
) -> None:
    count = trials_needed(rate, sensitivity=sensitivity)
    assert rate_caught(count, sensitivity=sensitivity) <= rate
    assert rate_caught(count - 1, sensitivity=sensitivity) > rate


def test_a_leak_of_the_excluded_rate_is_missed_in_a_twentieth_of_the_runs(
    rng: np.random.Generator,
) -> None:
    sensitivity = 0.6
    rate = rate_caught(50, sensitivity=sensitivity)
    seen = rng.random((20_000, 50)) < rate * sensitivity
    assert (~seen.any(axis=1)).mean() == pytest.approx(0.05, abs=0.006)


def test_clopper_pearson_has_the_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    table = {
        (81, 263): (0.2527, 0.3676),
        (15, 148): (0.0578, 0.1617),
        (0, 20): (0.0000, 0.1684),
        (1, 29): (0.0009, 0.1776),
    }
    for (hits, trials), (low, high) in table.items():
        found = rate_interval(hits, trials)
        assert found.low == pytest.approx(low, abs=6e-5)
        assert found.high == pytest.approx(high, abs=6e-5)


def test_the_tail_of_a_rate_has_the_value_of_counting() -> None:
    assert rate_tail(2, 3, 0.5) == pytest.approx(4 / 8)
    assert rate_tail(3, 3, 0.1) == pytest.approx(0.001)
    assert rate_tail(0, 0, 0.1) == rate_tail(0, 9, 0.1) == 1


def test_mann_whitney_has_the_value_of_counting() -> None:
    # 3 against 4, fully separated: one of 35 orders.
    found = compare([1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], "mann-whitney")
    assert found.p == pytest.approx(1 / 35)
    assert found.effect == 1
    assert found.shift_s == 3.5
    # One exchange: the two most extreme of the 35.
    assert compare([1.0, 2.0, 4.0], [3.0, 5.0, 6.0, 7.0], "mann-whitney").p == pytest.approx(2 / 35)


def test_kolmogorov_smirnov_has_the_value_of_counting() -> None:
    found = compare([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert found.p == pytest.approx(1 / 20)
    assert found.test == "ks"


@pytest.mark.parametrize("test", BOTH)
def test_only_faster_counts(test: Test) -> None:
    fast, slow = [0.1 + i / 1000 for i in range(30)], [0.5 + i / 1000 for i in range(30)]
    assert compare(fast, slow, test).p < 1e-6
    reverse = compare(slow, fast, test)
    assert reverse.p > 0.9
    assert reverse.effect == 0
    same = compare(fast, fast, test)
    assert same.effect == 0.5
    assert same.shift_s == 0


@pytest.mark.parametrize("bad", [[], [float("nan")], [float("inf"), 1.0]])
def test_what_is_no_sample_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="finite times"):
        compare(bad, [1.0])
    with pytest.raises(ValueError, match="finite times"):
        compare([1.0], bad)


@pytest.mark.parametrize("test", BOTH)
def test_false_alarms_come_at_the_stated_rate(test: Test, rng: np.random.Generator) -> None:
    """Heavy-tailed times, as those of a network; with ties, as a coarse clock gives."""
    alpha, runs = 0.05, 2000
    for digits in (9, 1):
        alarms = 0
        for _ in range(runs):
            times = np.round(rng.lognormal(0, 1, 60), digits)
            alarms += compare(times[:30].tolist(), times[30:].tolist(), test).p <= alpha
        assert alarms / runs < alpha * 1.25
        if digits == 9:
            assert alarms / runs > alpha * 0.4


def test_holm_has_the_published_values() -> None:
    # Holm's steps for 0.01, 0.04, 0.03, 0.005: times 3, 1, 2, 4, and never below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_keeps_the_error_rate_of_the_whole_run(rng: np.random.Generator) -> None:
    p_values = rng.random((20_000, 6))
    alarms = sum(min(holm(row)) <= 0.05 for row in p_values.tolist()) / 20_000
    assert alarms == pytest.approx(0.05, abs=0.006)
    naive = (p_values.min(axis=1) <= 0.05).mean()
    assert naive > 0.2


def test_holm_keeps_it_where_some_effects_are_real(rng: np.random.Generator) -> None:
    p_values = rng.random((20_000, 6))
    p_values[:, :3] *= 1e-6
    alarms = sum(min(holm(row)[3:]) <= 0.05 for row in p_values.tolist()) / 20_000
    assert 0.04 < alarms < 0.056


def test_power_is_what_repeated_runs_show(rng: np.random.Generator) -> None:
    pilot = rng.lognormal(-3, 0.4, 400)
    none = power(pilot.tolist(), 0.0, 40, rng, alpha=0.05, simulations=300)
    assert none.low < 0.05
    few, many = (
        power(pilot.tolist(), 0.008, count, rng, alpha=0.05, simulations=300) for count in (20, 150)
    )
    assert few.high < many.low
    assert many.high > 0.85
    runs = 0
    for _ in range(400):
        fast = rng.lognormal(-3, 0.4, 20) - 0.008
        runs += compare(fast.tolist(), rng.lognormal(-3, 0.4, 20).tolist()).p <= 0.05
    assert few.low - 0.08 < runs / 400 < few.high + 0.08


def test_samples_needed_give_the_power_they_promise(rng: np.random.Generator) -> None:
    # Normal times one standard deviation apart: the effect is Φ(1/√2) = 0.7602.
    effect = 0.7602
    count = samples_needed(effect, alpha=0.05, power=0.9)
    assert count == 22  # (1.6449 + 1.2816)**2 / (6 * 0.2602**2) = 21.08
    seen = 0
    for _ in range(1000):
        fast, slow = rng.normal(0, 1, count), rng.normal(1, 1, count)
        seen += compare(fast.tolist(), slow.tolist(), "mann-whitney").p <= 0.05
    assert seen / 1000 == pytest.approx(0.9, abs=0.04)


def test_the_effect_caught_is_the_inverse() -> None:
    for count in (10, 250, 5000):
        effect = effect_caught(count)
        if effect < 1:
            assert abs(samples_needed(effect) - count) <= 1
    assert effect_caught(0) == effect_caught(1) == 1
    assert effect_caught(250) < 0.6


@pytest.mark.parametrize("effect", [0.5, 0.2, 1.5])
def test_an_effect_that_cannot_be_seen_is_refused(effect: float) -> None:
    with pytest.raises(ValueError, match="above one half"):
        samples_needed(effect)


@pytest.mark.parametrize("rate", [0.0, 1.0, -1.0])
def test_a_rate_outside_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        trials_needed(rate)
