"""The sampler against a plain float64 reference, and each of its promises by itself."""

import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from sekisho.engine.params import SamplingParams
from sekisho.engine.sampler import History, sample, uniform

VOCAB = 49_152  # SmolLM2
Logits = NDArray[np.float32]


def params(**values: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **values)  # type: ignore[arg-type]


def name(wanted: SamplingParams | range) -> str:
    """What differs from the defaults."""
    if isinstance(wanted, range):
        return f"{len(wanted)} kept"
    default = params()
    pairs = ((field, getattr(wanted, field)) for field in wanted.__struct_fields__)
    return ",".join(f"{k}={v}" for k, v in pairs if v != getattr(default, k)) or "default"


def draw(logits: Logits, wanted: SamplingParams, step: int = 0) -> int:
    return sample(logits, wanted, step, History(wanted, [], logits.size)).token


def reference(
    logits: Logits, wanted: SamplingParams, step: int, prompt: list[int], output: list[int]
) -> int:
    """The documented order of operations, with a full sort."""
    x = logits.astype(np.float64)
    for token, bias in wanted.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(output):
        rate = wanted.repetition_penalty
        x[token] = x[token] / rate if x[token] > 0 else x[token] * rate
    for token, count in Counter(output).items():
        x[token] -= wanted.frequency_penalty * count + wanted.presence_penalty
    ranked = np.argsort(-x, kind="stable")
    if wanted.temperature == 0:
        return int(ranked[0])
    x = np.exp((x - x.max()) / wanted.temperature)
    if wanted.top_k:
        ranked = ranked[: wanted.top_k]
    better = np.cumsum(x[ranked]) - x[ranked]
    nucleus = ranked[better < wanted.top_p * x[ranked].sum()]
    kept = np.sort(nucleus[x[nucleus] >= wanted.min_p * x.max()])
    ends = np.cumsum(x[kept])
    target = uniform(wanted.seed, step) * ends[-1]
    return int(kept[np.searchsorted(ends, target, side="right")])


GRID = [
    params(temperature=0.0),
    params(),
    params(temperature=0.3),
    params(temperature=1.7),
    params(top_p=0.9),
    params(top_p=0.05),
    params(top_p=0.9999),
    params(top_k=1),
    params(top_k=50),
    params(top_k=10**6),
    params(top_k=50, top_p=0.8, temperature=0.7),
    params(min_p=0.05),
    params(min_p=0.1, top_p=0.95, top_k=200, temperature=1.2),
    params(repetition_penalty=1.3),
    params(frequency_penalty=0.7, presence_penalty=-0.4),
    params(
        logit_bias={1: 9.0, 4: -100.0, 7: 8.5},
        repetition_penalty=0.8,
        frequency_penalty=-0.2,
        presence_penalty=0.9,
        temperature=0.6,
        top_p=0.97,
    ),
    params(temperature=0.0, repetition_penalty=2.0, logit_bias={5: 3.0}),
]


@pytest.mark.parametrize("wanted", GRID, ids=name)
@pytest.mark.parametrize(("vocab", "spread", "steps"), [(97, 2.0, 40), (VOCAB, 3.0, 4)])
def test_agrees_with_the_reference(
    wanted: SamplingParams, vocab: int, spread: float, steps: int, rng: np.random.Generator
) -> None:
    prompt = rng.integers(0, vocab, 30).tolist()
    history = History(wanted, prompt, vocab)
    output: list[int] = []
    for step in range(steps):
        logits = (rng.standard_normal(vocab) * spread).astype(np.float32)
        token = sample(logits, wanted, step, history).token
        assert token == reference(logits, wanted, step, prompt, output)
        history.add(token)
        output.append(token)


def test_agrees_with_the_reference_where_logits_tie(rng: np.random.Generator) -> None:
    for step in range(200):
        logits = rng.integers(-2, 3, 60).astype(np.float32)
        wanted = params(
            top_k=int(rng.integers(0, 61)), top_p=float(rng.uniform(0.05, 1.0)), seed=step
        )
        assert draw(logits, wanted, step) == reference(logits, wanted, step, [], [])


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (params(seed=11), range(20)),
        (params(seed=12, temperature=2.5), range(20)),
        (params(seed=13, top_k=7), range(13, 20)),
    ],
    ids=name,
)
def test_frequencies_follow_the_probabilities(wanted: SamplingParams, kept: range) -> None:
    logits = (np.arange(20) * 0.15).astype(np.float32)
    draws = 20_000
    seen = np.bincount([draw(logits, wanted, step) for step in range(draws)], minlength=20)
    weights = np.exp(logits[list(kept)].astype(np.float64) / wanted.temperature)
    expected = draws * weights / weights.sum()
    assert seen[list(kept)].sum() == draws
    chi_square = float((((seen[list(kept)] - expected) ** 2) / expected).sum())
    # the 99.9 % points of the chi-square distribution with 19 and 6 degrees of freedom
    assert chi_square < {20: 43.8, 7: 22.5}[len(kept)]


def test_random_numbers_are_even_over_steps_and_over_neighbouring_seeds() -> None:
    for numbers in (
        np.array([uniform(5, step) for step in range(20_000)]),
        np.array([uniform(seed, 0) for seed in range(20_000)]),
    ):
        cells = np.bincount((numbers * 100).astype(int), minlength=100)
        assert float(((cells - 200.0) ** 2 / 200.0).sum()) < 148.2  # 99.9 %, 99 degrees
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.025
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
    assert uniform(2**64 - 1, 2**40) != uniform(2**64 - 1, 2**40 + 1)


def test_a_token_depends_on_its_own_request_only(rng: np.random.Generator) -> None:
    rows = (rng.standard_normal((6, 500)) * 2).astype(np.float32)
    wanted = params(seed=3, top_p=0.9, repetition_penalty=1.2, logprobs=3)
    other = params(seed=4, frequency_penalty=2.0, presence_penalty=2.0, logit_bias={1: 50.0})

    def answer(noise: bool) -> list[object]:
        history, foreign = History(wanted, [1, 2, 3], 500), History(other, [9], 500)
        sampled = []
        for step, row in enumerate(rows):
            if noise:
                foreign.add(sample(rows[-step], other, step, foreign).token)
                np.random.default_rng().random()
            sampled.append(sample(row, wanted, step, history))
            history.add(sampled[-1].token)
        return list(sampled)

    assert answer(noise=True) == answer(noise=False)


def test_a_preempted_request_goes_on_with_the_same_tokens(rng: np.random.Generator) -> None:
    rows = (rng.standard_normal((20, 300)) * 2).astype(np.float32)
    wanted = params(seed=77, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1)
    history, tokens = History(wanted, [4, 5], 300), []
    for step in range(20):
        tokens.append(sample(rows[step], wanted, step, history).token)
        history.add(tokens[-1])
    for cut in range(20):
        resumed = History(wanted, [4, 5], 300)
        for token in tokens[:cut]:
            resumed.add(token)
        assert sample(rows[cut], wanted, cut, resumed).token == tokens[cut]


def test_seed_and_step_change_the_draw() -> None:
    flat = np.zeros(1000, dtype=np.float32)
    assert len({draw(flat, params(seed=seed)) for seed in range(50)}) > 40
    assert len({draw(flat, params(), step) for step in range(50)}) > 40
    greedy = params(temperature=0.0)
    assert {draw(flat, greedy, step) for step in range(50)} == {0}


def test_neither_logits_nor_history_are_changed(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(200).astype(np.float32)
    before = logits.copy()
    wanted = params(logit_bias={3: 5.0}, repetition_penalty=2.0, top_p=0.5, logprobs=4)
    history = History(wanted, [1, 2, 3], 200)
    first = sample(logits, wanted, 9, history)
    assert np.array_equal(logits, before)
    assert sample(logits, wanted, 9, history) == first


def test_penalties_by_hand() -> None:
    logits = np.array([2.0, -2.0, 2.0, -2.0, 2.0], dtype=np.float32)
    wanted = params(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    history = History(wanted, [0, 1, 1], 5)
    for token in (2, 3, 3):
        history.add(token)
    history.penalize(logits, wanted)
    # prompt: repetition only; answer: repetition, then 0.5 a use and 0.25 once; 4 was never seen
    assert logits.tolist() == [1.0, -4.0, 1.0 - 0.75, -4.0 - 1.25, 2.0]


def test_a_prompt_token_does_not_count_as_generated() -> None:
    wanted = params(presence_penalty=2.0, frequency_penalty=2.0, temperature=0.0)
    history = History(wanted, [1, 1, 1], 3)
    logits = np.array([0.0, 1.0, 0.5], dtype=np.float32)
    assert sample(logits, wanted, 0, history).token == 1
    history.add(1)
    assert sample(logits, wanted, 1, history).token == 2


def test_history_is_kept_only_for_a_penalty() -> None:
    history = History(params(), [1, 2, 10**9], 5)  # nothing is looked at, so nothing is refused
    history.add(3)
    assert not history.used
    for values in ({"presence_penalty": 0.1}, {"frequency_penalty": 0.1}):
        assert History(params(**values), [], 5).used
    assert History(params(repetition_penalty=1.1), [], 5).used


@pytest.mark.parametrize("token", [-1, 5])
def test_history_refuses_ids_outside_the_vocabulary(token: int) -> None:
    wanted = params(presence_penalty=1.0)
    with pytest.raises(ValueError, match="prompt"):
        History(wanted, [1, token], 5)
    with pytest.raises(ValueError, match="vocabulary"):
        History(wanted, [1], 5).add(token)


def test_the_lowest_id_wins_a_tie() -> None:
    logits = np.array([0.0, 3.0, 1.0, 3.0, 3.0], dtype=np.float32)
    assert draw(logits, params(temperature=0.0)) == 1
    for step in range(50):
        assert draw(logits, params(top_k=1), step) == 1
        assert draw(logits, params(top_k=2), step) in (1, 3)
        assert draw(logits, params(top_p=0.5), step) in (1, 3)


@pytest.mark.parametrize(
    "wanted",
    [
        params(top_k=1),
        params(top_p=1e-9),
        params(min_p=1.0),
        params(temperature=1e-6),
        params(temperature=5e-324),
    ],
    ids=name,
)
@pytest.mark.parametrize("spread", [100.0, 1e37])
def test_the_narrowest_setting_is_greedy(
    wanted: SamplingParams, spread: float, rng: np.random.Generator
) -> None:
    for step in range(50):
        logits = (rng.standard_normal(300) * spread).astype(np.float32)
        assert draw(logits, wanted, step) == int(logits.argmax())


@pytest.mark.parametrize(
    "wanted",
    [params(top_k=300), params(top_k=10**9), params(min_p=1e-30), params(repetition_penalty=1.0)],
    ids=name,
)
def test_a_filter_that_removes_nothing_changes_nothing(
    wanted: SamplingParams, rng: np.random.Generator
) -> None:
    for step in range(50):
        logits = rng.standard_normal(300).astype(np.float32)
        assert draw(logits, wanted, step) == draw(logits, params(), step)


def test_top_p_near_one_keeps_nearly_all(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(3000).astype(np.float32)
    for share in (1 - 1e-7, 1 - 1e-12, 1 - 2**-53):
        for step in range(30):
            assert draw(logits, params(top_p=share), step) == draw(logits, params(), step)


def test_bias_forces_and_forbids() -> None:
    logits = np.array([5.0, 4.0, 3.0, 2.0], dtype=np.float32)
    assert draw(logits, params(temperature=0.0, logit_bias={3: 100.0})) == 3
    assert draw(logits, params(temperature=0.0, logit_bias={0: -100.0})) == 1
    forbidden = params(logit_bias={0: -math.inf, 1: -math.inf, 2: -math.inf})
    assert {draw(logits, forbidden, step) for step in range(50)} == {3}


@pytest.mark.parametrize("token", [-1, 4, 2**40])
def test_bias_outside_the_vocabulary_names_the_field(token: int) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        draw(np.zeros(4, dtype=np.float32), params(logit_bias={0: 1.0, token: 1.0}))


@pytest.mark.parametrize("wanted", GRID, ids=name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 50, 999])
def test_no_token_comes_from_broken_logits(wanted: SamplingParams, bad: float, place: int) -> None:
    logits = np.zeros(1000, dtype=np.float32)
    logits[place] = bad
    with pytest.raises(ValueError, match="no token"):
        draw(logits, wanted)


def test_no_token_comes_from_nothing_possible() -> None:
    with pytest.raises(ValueError, match="no token"):
        draw(np.full(10, -np.inf, dtype=np.float32), params())
    everything = params(logit_bias=dict.fromkeys(range(10), -math.inf))
    with pytest.raises(ValueError, match="no token"):
        draw(np.zeros(10, dtype=np.float32), everything)
    with pytest.raises(ValueError, match="no token"):
        draw(np.zeros(10, dtype=np.float32), params(logit_bias={3: math.nan}))


def test_impossible_tokens_are_never_drawn(rng: np.random.Generator) -> None:
    logits = np.full(2000, -np.inf, dtype=np.float32)
    possible = rng.choice(2000, 5, replace=False)
    logits[possible] = 0.0
    for wanted in (params(), params(top_k=50), params(top_p=0.999), params(min_p=0.0, top_k=3)):
        assert {draw(logits, wanted, step) for step in range(100)} <= set(possible.tolist())


def test_logprobs_are_those_of_the_model_before_bias_and_temperature(
    rng: np.random.Generator,
) -> None:
    logits = (rng.standard_normal(VOCAB) * 4).astype(np.float32)
    x = logits.astype(np.float64)
    expected = x - x.max() - math.log(np.exp(x - x.max()).sum())
    wanted = params(
        logprobs=20, temperature=0.2, top_k=3, logit_bias={17: 30.0}, repetition_penalty=1.5
    )
    sampled = sample(logits, wanted, 0, History(wanted, [3], VOCAB))
    assert sampled.token == 17
    assert sampled.logprob == pytest.approx(expected[17], abs=1e-5)
    assert [token for token, _ in sampled.top] == np.argsort(-x, kind="stable")[:20].tolist()
    for token, logprob in sampled.top:
        assert logprob == pytest.approx(expected[token], abs=1e-5)


def test_logprobs_only_as_many_as_asked_for() -> None:
    logits = np.array([0.0, 0.0, 0.0, -np.inf], dtype=np.float32)
    third = pytest.approx(-math.log(3))
    for count, told in ((None, 0), (0, 0), (2, 2), (3, 3), (20, 3)):
        wanted = params(temperature=0.0, logprobs=count)
        sampled = sample(logits, wanted, 0, History(wanted, [], 4))
        assert sampled.logprob == (None if count is None else third)
        # of equal ones the lowest ids; token 3 is impossible, so it is no alternative
        assert [token for token, _ in sampled.top] == [0, 1, 2][:told]
        assert [logprob for _, logprob in sampled.top] == [third] * told
