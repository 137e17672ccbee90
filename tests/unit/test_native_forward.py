"""The native forward pass against the plain torch one, over every architecture."""

import gc
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from native_kit import MODELS, VOCAB, Pool, Shape
from sekisho.core.page import HEADER_SIZE

STEPS = [[(0, 0, 21), (1, 0, 5)], [(1, 5, 6), (0, 21, 40)], [(0, 40, 41), (1, 6, 7)]]
LENGTHS = [41, 7]


def payloads(pool: Pool) -> NDArray[np.float32]:
    """All K and V as fp32, [pages, elements]."""
    pages = pool.region.reshape(pool.page_count, -1)[:, HEADER_SIZE:].copy()
    dtype = torch.bfloat16 if pool.layout.element_size == 2 else torch.float32
    values: NDArray[np.float32] = torch.from_numpy(pages).view(dtype).float().numpy()
    return values


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_the_reference(name: str) -> None:
    shape = MODELS[name]
    ours, theirs = Pool(shape, LENGTHS), Pool(shape, LENGTHS)
    found = ours.run(ours.native(threads=2), STEPS)
    expected = theirs.run(theirs.reference(), STEPS)
    # In bf16 the two may round a K or V to neighbouring values.
    close = 2e-2 if shape.dtype == torch.bfloat16 else 2e-5
    for sequence, logits in expected.items():
        assert logits.shape == (LENGTHS[sequence], VOCAB)
        error = np.abs(found[sequence] - logits).max() / np.abs(logits).max()
        assert error < close
    np.testing.assert_allclose(payloads(ours), payloads(theirs), rtol=close, atol=close)
    assert np.abs(payloads(theirs)).max() > 1


@pytest.mark.parametrize("wanted", [[], [0], [3, 20], [25]])
def test_only_the_wanted_rows_have_logits(wanted: list[int]) -> None:
    pool, other = Pool(Shape(), LENGTHS), Pool(Shape(), LENGTHS)
    every = pool.native().forward(pool.batch(STEPS[0]))
    some = other.native(threads=2).forward(other.batch(STEPS[0], wanted))
    assert some.shape == (len(wanted), VOCAB)
    assert some.tobytes() == every[wanted].tobytes()
    assert other.region.tobytes() == pool.region.tobytes()


def test_values_round_to_nearest_even_and_nan_stays_nan() -> None:
    """With zero weights V is the bias itself."""
    pool = Pool(replace(Shape(), dtype=torch.bfloat16, qkv_bias=True), [1], layers=1)
    layer = pool.weights.layers[0]
    specials = [1.00390625, 1.01171875, -1.00390625, 3.4e38, np.inf, -np.inf, 0.0, 1e-40]
    full_nan = 0x7FFFFFFF  # rounded as a number it would become -0
    bits = np.array([full_nan, 0x7FC00000, 0x3F808000, 0x3F818000, 0x3F808001], np.uint32)
    edges = np.concatenate([np.array(specials, np.float32), bits.view(np.float32)])
    wide = torch.from_numpy(np.resize(edges, 32))
    bias = torch.zeros(len(layer.qkv))
    bias[-32:] = wide
    layer = replace(layer, qkv=torch.zeros_like(layer.qkv), qkv_bias=bias)
    pool.weights = replace(pool.weights, layers=(layer,))
    pool.native().forward(pool.batch([(0, 0, 1)]))
    page = pool.region.reshape(pool.page_count, -1)[pool.tables[0][0], HEADER_SIZE:]
    value = page.view(np.uint16)[32 * 16 :].reshape(2, 16, 16)[:, 0].reshape(-1)
    expected = wide.bfloat16()
    found = torch.from_numpy(value.copy()).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    same = ~expected.isnan()
    assert torch.equal(found[same].view(torch.int16), expected[same].view(torch.int16))


def test_writes_nothing_but_the_slots_of_its_rows() -> None:
    pool = Pool(MODELS["qwen3-bf16"], [20, 9], fill=0xA5)
    pool.native(threads=2).forward(pool.batch([(0, 0, 20)]))
    pages = pool.region.reshape(pool.page_count, -1)
    touched = {int(page) for page in np.flatnonzero((pages != 0xA5).any(axis=1))}
    assert touched == set(pool.tables[0].tolist())
    assert (pages[:, :HEADER_SIZE] == 0xA5).all()
    last = pages[pool.tables[0][1], HEADER_SIZE:].view(np.uint16).reshape(2, 2, -1)
    keys, values = last[:, 0].reshape(2, 2, 32, 16), last[:, 1].reshape(2, 2, 16, 32)
    assert (keys[..., 4:] == 0xA5A5).all()
    assert (values[:, :, 4:] == 0xA5A5).all()
    assert (keys[..., :4] != 0xA5A5).any(axis=(2, 3)).all()


def test_calls_from_several_threads_take_turns() -> None:
    pool = Pool(Shape(), [30] * 4)
    runner = pool.native(threads=2)
    expected = {s: Pool(Shape(), [30] * 4) for s in range(4)}
    alone = {s: p.run(p.native(), [[(s, 0, 30)]])[s].tobytes() for s, p in expected.items()}
    found: dict[int, set[bytes]] = {s: set() for s in range(4)}

    def work(sequence: int) -> None:
        for _ in range(20):
            found[sequence].add(pool.run(runner, [[(sequence, 0, 30)]])[sequence].tobytes())

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {s: {logits} for s, logits in alone.items()}


def test_a_runner_ends_its_threads() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    pool = Pool(Shape(), [4])
    gc.collect()  # runners of earlier tests end theirs now, and not while it is counted
    before = count()
    runner = pool.native(threads=5)
    runner.forward(pool.batch([(0, 0, 4)]))
    assert count() == before + 4
    del runner
    gc.collect()
    assert count() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", [VOCAB, 0]),
        ("tokens", [0, -1]),
        ("positions", [3, 3]),
        ("positions", [0, 16]),
        ("sequence_starts", [0, 3]),
        ("tables", [[-1]]),
        ("tables", [[99]]),
        ("logit_rows", [2]),
    ],
)
def test_a_bad_batch_names_the_field_and_writes_nothing(field: str, value: object) -> None:
    pool = Pool(Shape(), [2])
    batch = replace(pool.batch([(0, 0, 2)]), **{field: np.array(value, np.int32)})
    named = "tables" if value == [0, 16] else field
    with pytest.raises(ValueError, match=f"^{named}:"):
        pool.native().forward(batch)
    assert not pool.region.any()


def test_a_model_that_does_not_fit_is_refused() -> None:
    pool = Pool(Shape(), [2])
    for change, word in (
        ({"head_size": 24}, "head_size 24"),
        ({"kv_head_count": 3}, "groups"),
        ({"rotary_dim": 18}, "rotary_dim"),
        ({"layer_count": 3}, "layout"),
        ({"vocab_size": 84}, "embedding"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"intermediate_size": 71}, "gate_up"),
    ):
        changed = Pool(Shape(), [2])
        changed.spec = replace(pool.spec, **change)
        with pytest.raises(ValueError, match=word):
            changed.native()
    pool.region = pool.region[:-1]
    with pytest.raises(ValueError, match="region"):
        pool.native()
