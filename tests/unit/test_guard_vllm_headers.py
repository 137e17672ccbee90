"""Headers that the vLLM guard makes: few at once and many at once are the same."""

import numpy as np
import pytest

from guard_kit import LAYOUT
from sekisho.core.page import HEADER
from sekisho.guard.vllm import headers as module
from sekisho.guard.vllm.headers import headers_at


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
