"""Headers that the vLLM guard makes, few at once or many, and the message that carries them."""

import pickle
from dataclasses import fields

import numpy as np
import pytest

from guard_kit import LAYOUT
from sekisho.core.page import HEADER
from sekisho.guard.vllm import headers as module
from sekisho.guard.vllm.headers import headers_at
from sekisho.guard.vllm.messages import Load, StepMeta


@pytest.mark.parametrize("count", [0, 1, 3, 64, 65])
def test_few_are_packed_as_many_are_made(
    count: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    serials = [int(n) for n in rng.integers(0, 2**64, count, dtype=np.uint64)]
    ordinals = [int(n) for n in rng.permutation(count)]
    filled = [int(n) for n in rng.integers(1, 17, count)]
    digests = [rng.bytes(16) for _ in range(count)]
    incarnation = 2**64 - 3
    found = headers_at(LAYOUT, incarnation, serials, ordinals, filled, digests)
    monkeypatch.setattr(module, "_FEW", -1)
    assert np.array_equal(
        found, headers_at(LAYOUT, incarnation, serials, ordinals, filled, digests)
    )
    found[:] = found  # it may be written to
    said = found.view(HEADER)[:, 0]
    assert said["serial"].tolist() == serials
    assert said["ordinal"].tolist() == ordinals
    assert said["filled"].tolist() == filled
    assert [row["token_digest"].tobytes() for row in said] == digests


def test_a_step_reaches_the_worker_as_it_was() -> None:
    """vLLM pickles it; whatever field is added must be among what is carried."""
    load = Load(np.arange(2), np.ones((2, 8), np.uint64), np.zeros((2, 8), np.uint64), source="r")
    sent = StepMeta(
        {"of": "the inner one"},
        np.array([4, 5], np.int32),
        {"a": np.array([1, 2, 3], np.int32), "b": np.zeros(0, np.int32)},
        np.array([3], np.int32),
        np.arange(8, dtype=np.uint64).reshape(1, 8) << np.uint64(40),
        ["a"],
        {"c": load},
        {"d"},
        {"e"},
    )
    came = pickle.loads(pickle.dumps(sent, pickle.HIGHEST_PROTOCOL))
    for field in fields(StepMeta):
        one, other = getattr(sent, field.name), getattr(came, field.name)
        assert repr(one) == repr(other), field.name
    assert came.rows["a"].dtype == came.fresh.dtype == came.blocks.dtype == np.int32
    assert came.words.dtype == np.uint64
    empty = pickle.loads(pickle.dumps(StepMeta(None)))
    assert empty.words.shape == (0, 8)
