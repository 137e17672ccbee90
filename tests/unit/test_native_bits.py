"""Batch invariance: the bits of a row depend on its own sequence alone."""

import pytest
import torch

from native_kit import MODELS, Pool, Shape
from sekisho.engine.kernels.binding import VARIANTS, Kernels
from sekisho.engine.kernels.build import KernelUnavailable, load_library

LENGTHS = [53, 1, 16, 17, 33, 5]
WHOLE = [[(s, 0, n)] for s, n in enumerate(LENGTHS)]
NAMES = ["llama", "llama-bf16", "qwen3-bf16", "glm4"]
HERE = [name for name in VARIANTS if load_library().sk_supported(VARIANTS[name])]


def alone(shape: Shape) -> tuple[dict[int, bytes], bytes]:
    """Each sequence prefilled by itself on one thread: its logits, and the pages in the end."""
    pool = Pool(shape, LENGTHS)
    logits = pool.run(pool.native(), WHOLE)
    return {s: value.tobytes() for s, value in logits.items()}, pool.region.tobytes()


def chunked(chunk: int) -> list[list[tuple[int, int, int]]]:
    """All sequences side by side, each cut into chunks of at most ``chunk``."""
    steps = []
    for start in range(0, max(LENGTHS), chunk):
        steps.append(
            [(s, start, min(start + chunk, n)) for s, n in enumerate(LENGTHS) if start < n]
        )
    return steps


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_prefill_chunks_and_company_do_not_matter(name: str, chunk: int) -> None:
    """Chunks of 1 are decode: so prefill and decode give the same bits too."""
    logits, region = alone(MODELS[name])
    pool = Pool(MODELS[name], LENGTHS)
    found = pool.run(pool.native(threads=2), chunked(chunk))
    assert {s: value.tobytes() for s, value in found.items()} == logits
    assert pool.region.tobytes() == region


@pytest.mark.parametrize("name", ["llama", "llama-bf16"])
def test_a_decode_row_among_up_to_40(name: str) -> None:
    count, length = 40, 35
    pool = Pool(MODELS[name], [length] * count)
    runner = pool.native(threads=2)
    pool.run(runner, [[(s, 0, length - 1) for s in range(count)]])
    single = pool.run(runner, [[(s, length - 1, length)] for s in range(count)])
    for rows in range(1, count + 1):
        chosen = [(7 * i + rows) % count for i in range(rows)]
        found = pool.run(runner, [[(s, length - 1, length) for s in chosen]])
        assert all(found[s].tobytes() == single[s].tobytes() for s in chosen)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("name", NAMES)
def test_threads_and_instruction_set_do_not_matter(name: str, variant: str, threads: int) -> None:
    logits, region = alone(MODELS[name])
    pool = Pool(MODELS[name], LENGTHS)
    found = pool.run(pool.native(threads, variant), chunked(11))
    assert {s: value.tobytes() for s, value in found.items()} == logits
    assert pool.region.tobytes() == region


@pytest.mark.parametrize("name", NAMES)
def test_what_unfilled_slots_and_foreign_pages_hold_does_not_matter(name: str) -> None:
    """0xFF is NaN in bf16 and fp32; infinities come from the second fill."""
    logits, _ = alone(MODELS[name])
    for fill in ("nan", "inf"):
        pool = Pool(MODELS[name], LENGTHS, fill=0xFF)
        if fill == "inf":
            bits = 0x7F80 if pool.layout.element_size == 2 else 0x7F800000
            pool.region.view(f"u{pool.layout.element_size}")[:] = bits
        found = pool.run(pool.native(threads=2), chunked(13))
        assert {s: value.tobytes() for s, value in found.items()} == logits


def test_the_page_size_does_not_matter() -> None:
    logits, _ = alone(Shape(page_size=16))
    pool = Pool(Shape(page_size=64), LENGTHS)
    found = pool.run(pool.native(), chunked(20))
    assert {s: value.tobytes() for s, value in found.items()} == logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_row_does_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(200, 333, generator=generator).to(dtype)
    x = torch.randn(203, 333, generator=generator).numpy()
    kernels = Kernels(2)
    packed = kernels.pack(weights)
    whole = kernels.gemm(x, packed)
    for rows in [*range(1, 20), 95, 96, 97, 102, 203]:
        assert kernels.gemm(x[:rows], packed).tobytes() == whole[:rows].tobytes()
        assert kernels.gemm(x[-rows:], packed).tobytes() == whole[-rows:].tobytes()
    for variant in HERE:
        other = Kernels(1, variant)
        assert other.gemm(x[:31], other.pack(weights)).tobytes() == whole[:31].tobytes()


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    for name in set(VARIANTS) - set(HERE):
        with pytest.raises(KernelUnavailable, match=name):
            Kernels(1, name)
    assert Kernels(1).variant in HERE
