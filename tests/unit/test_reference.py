"""The reference runner: a row's bits depend on its own sequence alone, and on written slots alone.

What it computes is checked in test_models_against_transformers.py.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_models import layout_of, make_batch, make_runner, random_model, scattered_tables
from numpy.typing import NDArray

from sekisho.core.page import HEADER_SIZE
from sekisho.engine import reference
from sekisho.engine.batch import Batch
from sekisho.engine.reference import ReferenceRunner
from sekisho.engine.spec import ModelSpec, load_spec
from sekisho.engine.weights import ModelWeights, load_weights

LENGTH = 70
Loaded = tuple[ModelSpec, ModelWeights]


@pytest.fixture(scope="module", params=["llama3-rope:fp32", "qwen3:bf16", "glm4:bf16"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    name, dtype = request.param.split(":")
    folder: Path = tmp_path_factory.mktemp(name)
    random_model(name).save_pretrained(folder)
    spec = load_spec(folder)
    return spec, load_weights(folder, spec, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])


def texts_of(spec: ModelSpec, rng: np.random.Generator, lengths: list[int]) -> list[list[int]]:
    return [rng.integers(0, spec.vocab_size, length).tolist() for length in lengths]


def alone(loaded: Loaded, text: list[int]) -> NDArray[np.float32]:
    """Logits of every row of ``text``, all rows at once, on pages of its own in order."""
    pages = list(range(-(-len(text) // 16)))
    runner, _, _ = make_runner("reference", *loaded, len(pages))
    return runner.forward(make_batch([(text, 0, pages)]))


def test_the_same_bits_alone_and_in_a_batch(loaded: Loaded, rng: np.random.Generator) -> None:
    lengths = [5, LENGTH, 33, 1]
    texts = texts_of(loaded[0], rng, lengths)
    tables, page_count = scattered_tables(lengths, 16, rng)
    runner, _, _ = make_runner("reference", *loaded, page_count)
    together = runner.forward(
        make_batch([(text, 0, table) for text, table in zip(texts, tables, strict=True)])
    )
    expected = np.concatenate([alone(loaded, text) for text in texts])
    assert np.isfinite(expected).all()
    assert np.array_equal(together, expected)


@pytest.mark.parametrize("cuts", [[16, 32], [1, 2, 3, 64], [7, 31, 45], list(range(1, LENGTH))])
def test_the_same_bits_however_it_is_cut(
    cuts: list[int], loaded: Loaded, rng: np.random.Generator
) -> None:
    """The last of the cuts is decode: one row at a time, beside another sequence's rows."""
    text, other = texts_of(loaded[0], rng, [LENGTH, LENGTH])
    tables, page_count = scattered_tables([LENGTH, LENGTH], 16, rng)
    runner, _, _ = make_runner("reference", *loaded, page_count)
    found = []
    for first, last in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        parts = [(other[first:last], first, tables[1]), (text[first:last], first, tables[0])]
        found.append(runner.forward(make_batch(parts))[last - first :])
    assert np.array_equal(np.concatenate(found), alone(loaded, text))


def test_the_same_bits_after_a_cached_prefix(loaded: Loaded, rng: np.random.Generator) -> None:
    """Two sequences whose tables begin with the same pages, written by a third."""
    text, tail = texts_of(loaded[0], rng, [LENGTH, 20])
    runner, _, _ = make_runner("reference", *loaded, 12)
    runner.forward(make_batch([(text[:32], 0, [4, 9])]))
    parts = [(text[32:], 32, [4, 9, 1, 2, 3]), (tail, 32, [4, 9, 7, 8])]
    found = runner.forward(make_batch(parts))
    expected = [alone(loaded, text)[32:], alone(loaded, text[:32] + tail)[32:]]
    assert np.array_equal(found, np.concatenate(expected))


@pytest.mark.parametrize("garbage", [0xFF, 0x7F, 0x00, 0x41])
def test_slots_beyond_a_row_do_not_matter(
    garbage: int, loaded: Loaded, rng: np.random.Generator
) -> None:
    """0xFF.. is NaN, 0x7F.. is NaN or near the largest number, 0x41.. an ordinary number."""
    (text,) = texts_of(loaded[0], rng, [21])
    runner, region, _ = make_runner("reference", *loaded, 2)
    region[:] = garbage
    assert np.array_equal(runner.forward(make_batch([(text, 0, [1, 0])])), alone(loaded, text))


def test_only_the_wanted_rows_come_back(loaded: Loaded, rng: np.random.Generator) -> None:
    (text,) = texts_of(loaded[0], rng, [40])
    runner, _, _ = make_runner("reference", *loaded, 3)
    batch = make_batch([(text, 0, [0, 1, 2])])
    everything = runner.forward(batch)
    some = runner.forward(replace(batch, logit_rows=np.asarray([3, 39], np.int32)))
    assert np.array_equal(some, everything[[3, 39]])
    nothing = runner.forward(replace(batch, logit_rows=np.zeros(0, np.int32)))
    assert nothing.shape == (0, loaded[0].vocab_size)


def test_k_and_v_lie_where_the_layout_says(loaded: Loaded, rng: np.random.Generator) -> None:
    """A sequence of 17: the second page has one slot written in K (token-minor) and in V."""
    spec, weights = loaded
    (text,) = texts_of(spec, rng, [17])
    runner, region, layout = make_runner("reference", spec, weights, 3)
    runner.forward(make_batch([(text, 0, [2, 0])]))
    pages = region.reshape(3, layout.page_bytes)
    assert (pages[1] == 0xFF).all()
    assert (pages[:, :HEADER_SIZE] == 0xFF).all()
    payload = pages[0, HEADER_SIZE:].reshape(spec.layer_count, 2, -1)
    written = payload.view(f"u{layout.element_size}") != np.iinfo(f"u{layout.element_size}").max
    keys = written[:, 0].reshape(-1, spec.head_size, 16)
    values = written[:, 1].reshape(-1, 16, spec.head_size)
    assert keys[:, :, 0].all()
    assert not keys[:, :, 1:].any()
    assert values[:, 0].all()
    assert not values[:, 1:].any()


def test_products_of_single_rows_give_nearly_the_same(
    loaded: Loaded, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done where a block's rows are not alike in bits."""
    (text,) = texts_of(loaded[0], rng, [40])
    expected = alone(loaded, text)
    monkeypatch.setattr(reference, "_block_is_row_independent", lambda _matrix: False)
    found = alone(loaded, text)
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
    # and still invariant
    runner, _, _ = make_runner("reference", *loaded, 3)
    parts = [runner.forward(make_batch([(text[a:b], a, [0, 1, 2])])) for a, b in ((0, 9), (9, 40))]
    assert np.array_equal(np.concatenate(parts), found)


def good_batch() -> Batch:
    return make_batch([([1, 2, 3], 14, [0, 1]), ([4], 0, [2])])


def int32(*values: int) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", int32(1, 2, 251, 4)),
        ("tokens", int32(1, -1, 3, 4)),
        ("tokens", np.asarray([1, 2, 3, 4], np.int64)),
        ("positions", int32(14, 15, 16)),
        ("positions", int32(-1, 0, 1, 0)),
        ("positions", int32(14, 16, 15, 0)),
        ("tables", int32(0, 1)),
        ("sequence_starts", int32(0, 3, 3, 4)),
        ("sequence_starts", int32(0, 3)),
        ("sequence_starts", int32(1, 3, 4)),
        ("tables", np.asarray([[0], [2]], np.int32)),
        ("tables", np.asarray([[0, -1], [2, -1]], np.int32)),
        ("tables", np.asarray([[0, 1], [3, -1]], np.int32)),
        ("tables", np.asarray([[0, 1]], np.int32)),
        ("logit_rows", int32(0, 4)),
        ("logit_rows", int32(2, 1)),
    ],
)
def test_a_bad_batch_is_refused_by_field_and_writes_nothing(
    field: str, value: NDArray[np.int32], loaded: Loaded
) -> None:
    runner, region, _ = make_runner("reference", *loaded, 3)
    with pytest.raises(ValueError, match=f"^{field}: "):
        runner.forward(replace(good_batch(), **{field: value}))
    assert (region == 0xFF).all()
    assert np.isfinite(runner.forward(good_batch())[-1]).all(), "the good one must run"


def test_an_empty_batch_is_refused(loaded: Loaded) -> None:
    runner, _, _ = make_runner("reference", *loaded, 3)
    with pytest.raises(ValueError, match=r"^tokens: "):
        runner.forward(replace(good_batch(), tokens=int32()))


def test_a_layout_of_another_model_is_refused(loaded: Loaded) -> None:
    spec, weights = loaded
    layout = layout_of(spec, weights.embedding.element_size())
    region = np.zeros(3 * layout.page_bytes, np.uint8)
    wrong = replace(layout, head_size=layout.head_size * 2)
    with pytest.raises(ValueError, match=r"layout\.head_size"):
        ReferenceRunner(spec, weights, region, wrong, 1)
    with pytest.raises(ValueError, match=r"layout\.element_size"):
        ReferenceRunner(spec, weights, region, replace(layout, element_size=1), 1)
    with pytest.raises(ValueError, match="region"):
        ReferenceRunner(spec, weights, region, layout, 4)
