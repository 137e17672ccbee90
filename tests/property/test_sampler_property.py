"""What holds of the sampler for every logits and every parameter."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from sekisho.engine.params import SamplingParams
from sekisho.engine.sampler import History, _inverse_cdf, sample

# Few distinct values make ties common; -inf is a token that the model makes impossible.
VALUES = st.one_of(
    st.floats(-60, 60, width=32), st.sampled_from([-1.0, 0.0, 0.0, 2.0]), st.just(-math.inf)
)
LOGITS = st.integers(1, 600).flatmap(lambda size: arrays(np.float32, size, elements=VALUES))
POSSIBLE = LOGITS.filter(lambda x: bool(np.isfinite(x).any()))
SEEDS = st.integers(0, 2**64 - 1)
SLACK = 1e-4  # fp32 weights against the float64 bounds below


@given(
    logits=POSSIBLE,
    seed=SEEDS,
    step=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 700),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
)
def test_the_token_is_among_those_allowed(
    logits: NDArray[np.float32],
    seed: int,
    step: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    params = SamplingParams(
        max_tokens=1, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    token = sample(logits, params, step, History(params, [], logits.size)).token
    x = logits.astype(np.float64)
    weights = np.exp((x - x.max()) / temperature)
    order = np.argsort(-x, kind="stable")[: top_k or None]
    assert token in order.tolist(), "top_k excludes it"
    ranked = weights[order]
    # Weights are fp32 there, where logits that differ by less are equal.
    ahead = ranked[ranked > weights[token] * (1 + SLACK)]
    assert ahead.sum() <= top_p * ranked.sum() * (1 + SLACK)
    assert weights[token] >= min_p * (1 - SLACK)
    assert math.isfinite(logits[token])


@given(logits=POSSIBLE, seed=SEEDS, count=st.integers(0, 20), temperature=st.floats(0, 2))
def test_logprobs_are_negative_sorted_and_of_the_best_tokens(
    logits: NDArray[np.float32], seed: int, count: int, temperature: float
) -> None:
    params = SamplingParams(max_tokens=1, seed=seed, logprobs=count, temperature=temperature)
    sampled = sample(logits, params, 0, History(params, [], logits.size))
    values = [value for _, value in sampled.top]
    assert sampled.logprob is not None
    assert sampled.logprob <= 0
    assert all(value <= 0 for value in values)
    assert values == sorted(values, reverse=True)
    assert len(sampled.top) == min(count, int(np.isfinite(logits).sum()))
    assert [token for token, _ in sampled.top] == np.argsort(-logits, kind="stable")[
        : len(values)
    ].tolist()
    assert sum(math.exp(value) for value in values) <= 1 + 1e-5


@given(
    logits=LOGITS,
    data=st.data(),
    repetition=st.floats(0.1, 10),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
)
def test_penalties_touch_seen_tokens_only_and_monotonically(
    logits: NDArray[np.float32],
    data: st.DataObject,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    tokens = st.lists(st.integers(0, logits.size - 1), max_size=20)
    prompt, output = data.draw(tokens), data.draw(tokens)
    params = SamplingParams(
        max_tokens=1,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    history = History(params, prompt, logits.size)
    for token in output:
        history.add(token)
    penalized = logits.copy()
    history.penalize(penalized, params)
    unseen = np.setdiff1d(np.arange(logits.size), [*prompt, *output])
    assert np.array_equal(penalized[unseen], logits[unseen])
    if repetition >= 1 and frequency >= 0 and presence >= 0:
        assert (penalized <= logits).all()
    if repetition <= 1 and frequency <= 0 and presence <= 0:
        assert (penalized >= logits).all()


@given(
    weights=st.integers(1, 1500).flatmap(
        lambda size: arrays(
            np.float32, size, elements=st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.3, 1.0])
        )
    ),
    number=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
)
def test_a_token_without_weight_is_never_chosen(
    weights: NDArray[np.float32], number: float
) -> None:
    weights[weights.size // 2] = 1.0
    index = _inverse_cdf(weights, number)
    assert weights[index] > 0
    exact = weights.astype(np.float64)
    target = number * exact.sum()
    rounding = 1e-12 * exact.sum()
    assert exact[:index].sum() <= target + rounding
    assert exact[: index + 1].sum() >= target - rounding


def test_the_end_of_a_block_is_not_passed_by_rounding(rng: np.random.Generator) -> None:
    for _ in range(300):
        weights = np.exp(rng.standard_normal(300) * 4).astype(np.float32)
        weights[256:299] = 0.0  # the next block begins with nothing
        block = np.add.reduceat(weights, [0, 256], dtype=np.float64)
        edge = block[0] / (block[0] + block[1])
        for number in edge + np.arange(-6, 7) * np.spacing(edge):
            assert weights[_inverse_cdf(weights, min(float(number), 1 - 2**-53))] > 0
