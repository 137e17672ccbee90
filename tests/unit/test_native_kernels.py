"""The matrix product and paged attention by themselves, against plain torch in fp64."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from native_kit import Pool, Shape
from sekisho.core.page import HEADER_SIZE
from sekisho.engine.kernels.binding import Kernels

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 8), (1, 1), (17, 5), (100, 64), (330, 127)])
def test_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(*shape, generator=generator).to(dtype)
    kernels = Kernels(2)
    packed = kernels.pack(weights)
    for rows in [*range(1, 9), 13, 97, 150]:
        x = torch.randn(rows, shape[1], generator=generator)
        expected = x.double() @ weights.double().T
        error = np.abs(kernels.gemm(x.numpy(), packed) - expected.numpy()).max()
        assert error < 1e-6 * shape[1] ** 0.5 * 8


def test_product_refuses_a_shape_that_does_not_fit() -> None:
    kernels = Kernels(1)
    with pytest.raises(ValueError, match="columns"):
        kernels.gemm(np.ones((2, 5), np.float32), kernels.pack(torch.ones(3, 4)))


def fill_pages(
    pool: Pool, layer: int, generator: torch.Generator
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Random K and V for every sequence, written to its pages by plain indexing; returned as
    they were stored, each [tokens, kv_head, head_size]. All other slots stay NaN."""
    layout = pool.layout
    dtype = torch.bfloat16 if layout.element_size == 2 else torch.float32
    pages = torch.from_numpy(pool.region).view(pool.page_count, -1)[:, HEADER_SIZE:]
    pages = pages.view(dtype).view(pool.page_count, layout.layer_count, 2, -1)
    lead = (pool.page_count, layout.kv_head_count)
    keys = pages[:, layer, 0].view(*lead, layout.head_size, layout.page_size)
    values = pages[:, layer, 1].view(*lead, layout.page_size, layout.head_size)
    stored = []
    for tokens, table in zip(pool.tokens, pool.tables, strict=True):
        shape = (len(tokens), layout.kv_head_count, layout.head_size)
        k, v = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
        for i in range(len(tokens)):
            page, slot = int(table[i // layout.page_size]), i % layout.page_size
            keys[page, :, :, slot] = k[i]
            values[page, :, slot] = v[i]
        stored.append((k.double().numpy(), v.double().numpy()))
    return stored


def attend(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64]
) -> NDArray[np.float64]:
    """One query row [heads, size] over all of k and v [tokens, kv_heads, size]."""
    group = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("hd,thd->ht", q, k) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    result: NDArray[np.float64] = np.einsum("ht,thd->hd", weights, v)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "head_size"),
    [
        *((group, 16) for group in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64]),
        *((group, size) for size in [32, 64, 80, 96, 128, 256] for group in [1, 3, 4, 8]),
    ],
)
def test_attention(group: int, head_size: int, dtype: torch.dtype) -> None:
    shape = Shape(dtype, group * 2, 2, head_size, page_size=16 if group % 2 else 32)
    lengths = [70, 1, 16, 39]
    pool = Pool(shape, lengths, fill=0xFF)
    generator = torch.Generator().manual_seed(9)
    stored = fill_pages(pool, 1, generator)
    parts = [(3, 20, 39), (0, 66, 70), (1, 0, 1), (2, 0, 16)]
    batch = pool.batch(parts)
    # A wide spread of scores: some rows attend to one token, some to all.
    q = torch.randn(len(batch.tokens), group * 2, head_size, generator=generator)
    q *= torch.linspace(0.1, 12, len(q))[:, None, None]
    found = Kernels(2).attention(q.numpy(), batch, pool.region, pool.layout, layer=1)
    row = 0
    for sequence, start, end in parts:
        k, v = stored[sequence]
        for position in range(start, end):
            expected = attend(q[row].double().numpy(), k[: position + 1], v[: position + 1])
            np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-4)
            row += 1
    assert row == len(q)


def test_attention_gives_one_token_its_value_exactly() -> None:
    pool = Pool(Shape(), [1], fill=0xFF)
    stored = fill_pages(pool, 0, torch.Generator().manual_seed(1))
    q = np.full((1, 4, 16), 3.0, np.float32)
    found = Kernels(1).attention(q, pool.batch([(0, 0, 1)]), pool.region, pool.layout, layer=0)
    assert np.array_equal(found[0], np.repeat(stored[0][1][0], 2, axis=0))
