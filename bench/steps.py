"""Decode steps of a real engine with and without its guard: what the two guards' benchmarks share.

The engine's meter (``tests/engines/stand_ins/engine_meter*.py``) writes a JSON object a step; steps
with the guard and without it take turns, and only neighbours are compared.
"""

import argparse
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from bench.report import BenchError, Row, finish

ENGINES = Path(__file__).parents[1] / "tests" / "engines"
BATCHES = (1, 16)
ANSWER_TOKENS = 160
TARGET = 0.99
ROUNDS = 3
_PAIRS_MIN = 8


def main(
    name: str, engine_rows: Callable[[int], list[Row]], other_rows: Callable[[], list[Row]]
) -> int:
    """Exit 0 where every target holds, 1 where one is missed, 2 where it cannot run.

    ``engine_rows`` gets the number of rounds; ``other_rows`` needs no engine.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-engine", action="store_true", help="only what needs none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    arguments = parser.parse_args()
    busy = os.getloadavg()[0]
    torch.set_num_threads(1)  # as in the engine: OMP_NUM_THREADS=1
    sys.path.insert(0, str(ENGINES))
    rows, missing = other_rows(), False
    if not arguments.no_engine:
        try:
            rows = [*engine_rows(arguments.rounds), *rows]
        except BenchError as error:
            print(error, file=sys.stderr)
            missing = True
    return finish(rows, arguments.json, arguments.rounds, busy, missing)


def engine_row(engine: str, batch: int, steps: list[dict[str, Any]]) -> Row:
    """Tokens per second; the ratio is the median over pairs of neighbouring steps.

    Raises:
        BenchError: too few pairs were seen.
    """
    times: dict[str, list[float]] = {"guard": [], "none": []}
    pairs = []
    for before, after in pairwise(step for step in steps if step["batch"] == batch):
        times["guard" if after["guard"] else "none"].append(after["seconds"])
        if before["guard"] != after["guard"]:
            on, off = (before, after) if before["guard"] else (after, before)
            pairs.append(off["seconds"] / on["seconds"])
    if len(pairs) < _PAIRS_MIN:
        raise BenchError(f"only {len(pairs)} pairs of steps with {batch} requests were seen")
    low, _, high = quantiles(pairs, n=4)
    # How far off the median itself may be: 1.57 interquartile ranges over the root of n.
    unsure = 1.57 * (high - low) / len(pairs) ** 0.5
    rates = {name: batch / median(values) for name, values in times.items()}
    return Row(
        "guard",
        f"{engine}, {batch} concurrent",
        "tok/s",
        rates["guard"],
        rates["none"],
        median(pairs),
        TARGET,
        f"{len(pairs)} pairs of steps, ratio ± {unsure:.4f}",
        {"pairs": pairs, **times},
    )


def own_row(engine: str, batch: int, steps: list[dict[str, Any]]) -> Row:
    """Microseconds that the guard's own functions take of a step, with its caches as cold as the
    forward pass leaves them."""
    mine = [step for step in steps if step["batch"] == batch and step["guard"]]
    times = [sum(step["own"].values()) * 1e6 for step in mine]
    share = median(sum(step["own"].values()) / step["seconds"] for step in mine)
    names = {name for step in mine for name in step["own"]}
    each = {name: median(step["own"].get(name, 0.0) for step in mine) * 1e6 for name in names}
    most = sorted(each.items(), key=lambda item: -item[1])[:4]
    said = ", ".join(f"{name} {value:.0f}" for name, value in most)
    note = f"{share:.2%} of the step; {said}"
    case = f"{engine}, {batch} concurrent, in its functions"
    return Row("guard", case, "µs", median(times), note=note, samples={"ours": times})
