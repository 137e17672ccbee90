"""What batch invariance costs: the fixed-order product against torch's, which picks its order.

Measured over all matrices of the model, so that the weights come from memory as they do in
service. Rates are of the arithmetic, 2 * rows * weights a product. Rows 1, 16 and 32 are decode
steps; 256 is a prefill chunk, which needs no logits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from bench.demo import CONCURRENCIES, THREADS, Engine, add_requests, load_demo
from bench.report import SEED, BenchError, Row, rate_row
from sekisho.engine.kernels.binding import Kernels, Packed
from sekisho.engine.weights import ModelWeights

ROUNDS = 7
ROW_COUNTS = (*CONCURRENCIES, 256)
_STEPS = 16

Times = dict[str, list[float]]


@dataclass(frozen=True)
class _Shape:
    """The matrices of one kind, one a layer; packed for us, widened for torch in fp32."""

    name: str
    matrices: Sequence[torch.Tensor]
    packed: Sequence[Packed]
    wide: Sequence[torch.Tensor]

    def operations(self, rows: int) -> float:
        return 2.0 * rows * sum(matrix.numel() for matrix in self.matrices)


def run(rounds: int | None) -> list[Row]:
    """A line a row count and dtype of torch; single shapes are in the JSON only."""
    torch.set_num_threads(THREADS)
    kernels = Kernels(THREADS)
    shapes = _shapes(kernels, load_demo().weights)
    generator = np.random.default_rng(SEED)
    rows: list[Row] = []
    best: dict[int, dict[str, float]] = {}
    for count in ROW_COUNTS:
        operations, totals = 0.0, dict[str, list[float]]()
        for shape in shapes if count in CONCURRENCIES else shapes[:-1]:
            x = generator.standard_normal((count, shape.matrices[0].shape[1]), np.float32)
            seconds = _interleaved(_sides(kernels, shape, x), rounds or ROUNDS)
            rows += _rates(f"{shape.name}, {count} rows", shape.operations(count), seconds, True)
            operations += shape.operations(count)
            for name, times in seconds.items():
                before = totals.get(name, [0.0] * len(times))
                totals[name] = [a + b for a, b in zip(before, times, strict=True)]
        rows += _rates(f"products of a step, {count} rows", operations, totals, False)
        best[count] = {name: median(times) for name, times in totals.items()}
    return rows + _whole_steps(best)


def _shapes(kernels: Kernels, weights: ModelWeights) -> list[_Shape]:
    kinds = {
        name: [getattr(layer, name) for layer in weights.layers]
        for name in ("qkv", "o", "gate_up", "down")
    }
    kinds["lm_head"] = [weights.lm_head]
    return [
        _Shape(name, matrices, [kernels.pack(w) for w in matrices], [w.float() for w in matrices])
        for name, matrices in kinds.items()
    ]


def _sides(kernels: Kernels, shape: _Shape, x: np.ndarray) -> dict[str, list[Callable[[], object]]]:
    full = torch.from_numpy(x)
    narrow = full.bfloat16()
    alone, all_rows = (kernels.gemm(part, shape.packed[0])[0] for part in (x[:1], x))
    if not np.array_equal(alone, all_rows):
        raise BenchError("our product's bits depend on the number of rows")
    return {
        "ours": [partial(kernels.gemm, x, w) for w in shape.packed],
        "bf16": [partial(torch.mm, narrow, w.t()) for w in shape.matrices],
        "fp32": [partial(torch.mm, full, w.t()) for w in shape.wide],
    }


def _interleaved(sides: Mapping[str, Sequence[Callable[[], object]]], rounds: int) -> Times:
    """Seconds of all products of each side, by round; one round more warms up."""
    seconds: Times = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, products in sides.items():
            start = time.perf_counter()
            for product in products:
                product()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


def _rates(case: str, operations: float, seconds: Times, detail: bool) -> list[Row]:
    rates = {name: [operations / t / 1e9 for t in times] for name, times in seconds.items()}
    ours = rates.pop("ours")
    return [
        rate_row("invariance", case, "GFLOP/s", ours, rate, note=f"torch {name}", detail=detail)
        for name, rate in rates.items()
    ]


def _whole_steps(products: dict[int, dict[str, float]]) -> list[Row]:
    """Decode steps of the engine as they are, and as they would be with torch's faster product."""
    rows = []
    engine = Engine(load_demo(), max(CONCURRENCIES))
    for count in CONCURRENCIES:
        scheduler, _ = engine.scheduler("standard")
        add_requests(scheduler, engine.demo, count, _STEPS + count)
        times = []
        while not scheduler.idle:
            released = len(scheduler.outputs)
            start = time.perf_counter()
            scheduler.step(0.0)
            seconds = time.perf_counter() - start
            if len(scheduler.outputs) - released == count:  # all of them decode, none has ended
                times.append(seconds)
        step = median(times)
        free = min(("bf16", "fp32"), key=lambda name: products[count][name])
        other = max(step - products[count]["ours"], 0.0) + products[count][free]
        note = f"with the products of torch {free}: an estimate"
        case = f"whole step, {count} rows"
        rows.append(rate_row("invariance", case, "steps/s", [1 / step], [1 / other], note=note))
    return rows
