"""``python -m bench.guard_sglang``: what the guard costs inside a real SGLang decode server.

In the engine: decode steps go through the guard and around it in turns, in one process, so that
whatever else the machine does meets both (``tests/engines/stand_ins/engine_meter.py``). Beside it,
without an engine: the check of a step by batch and context, and what a hand-off costs by length of
the prompt, in processor time of the one thread. Not part of ``make bench``: it needs
``tests/engines/install.py sglang VERSION``.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.report import SEED, BenchError, Row, as_json, print_table
from sekisho.core.memory import Headers
from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.guard.keeper import Holding, Keeper
from sekisho.guard.sglang.state import State

ENGINES = Path(__file__).parents[1] / "tests" / "engines"
BATCHES = (1, 16)
CONTEXTS = (1024, 8192, 131072)
PROMPTS = (1024, 8192, 131072)
PAGE_SIZE = 64
TARGET = 0.99
ROUNDS = 3
ANSWER_TOKENS = 160
_REPEATS = 30


def main() -> int:
    """Exit 0 where every target holds, 1 where one is missed, 2 where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m bench.guard_sglang")
    parser.add_argument("--version", default="0.5.23", help="of SGLang")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-engine", action="store_true", help="only what needs none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    arguments = parser.parse_args()
    busy = os.getloadavg()[0]
    torch.set_num_threads(1)  # as in the engine: OMP_NUM_THREADS=1
    rows = [*step_rows(), *handoff_rows()]
    missing = False
    if not arguments.no_engine:
        try:
            rows = [*engine_rows(arguments.version, arguments.rounds), *rows]
        except BenchError as error:
            print(error, file=sys.stderr)
            missing = True
    print_table(rows)
    if arguments.json is not None:
        report = as_json(rows, arguments.rounds, busy)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if missing:
        return 2
    return 1 if any(row.holds is False for row in rows) else 0


# -- in the engine


def engine_rows(version: str, rounds: int) -> list[Row]:
    """Tokens per second by batch; the ratio is the median over pairs of neighbouring steps.

    Raises:
        BenchError: the pair does not start, or answers an error.
    """
    sys.path.insert(0, str(ENGINES))
    from rig import EngineError
    from rig_sglang import SglangPair

    folder = Path(tempfile.mkdtemp(prefix="guard-sglang-"))
    meter = folder / "steps.jsonl"
    env = {"SEKISHO_GUARD": "on"}
    try:
        with SglangPair(
            version,
            running_max=max(BATCHES),
            waiting_s=300,
            prefill_tokens=4096,
            decode_tokens=32768,  # SGLang keeps 512 back for each that runs
            env=env,
            decode_env={"ENGINE_METER": str(meter)},
            folder=folder,
        ) as pair:
            for _ in range(rounds):
                for batch in BATCHES:
                    asyncio.run(_ask(pair, batch))
    except EngineError as error:
        raise BenchError(str(error)) from error
    steps = [json.loads(line) for line in meter.read_text().splitlines()]
    return [_engine_row(version, batch, steps) for batch in BATCHES]


async def _ask(pair: Any, batch: int) -> None:
    """``batch`` requests at once, none of which ends early."""
    from rig_sglang import ask_pair

    generator = np.random.default_rng(SEED)
    bodies = [
        {
            "input_ids": generator.integers(100, 40000, 130).tolist(),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
            },
        }
        for _ in range(batch)
    ]
    for answers in await asyncio.gather(*(ask_pair(pair, body) for body in bodies)):
        if answers.decode.status != 200:
            raise BenchError(f"decode answered {answers.decode.status}: {answers.decode.body!r}")


def _engine_row(version: str, batch: int, steps: list[dict[str, Any]]) -> Row:
    mine = [step for step in steps if step["batch"] == batch]
    times: dict[str, list[float]] = {"guard": [], "none": []}
    pairs = []
    for before, after in pairwise(mine):
        times["guard" if after["guard"] else "none"].append(after["seconds"])
        if before["guard"] != after["guard"]:
            on, off = (before, after) if before["guard"] else (after, before)
            pairs.append(off["seconds"] / on["seconds"])
    if len(pairs) < 8:
        raise BenchError(f"only {len(pairs)} pairs of steps with {batch} requests were seen")
    low, _, high = quantiles(pairs, n=4)
    # How far off the median itself may be: 1.57 interquartile ranges over the root of n.
    unsure = 1.57 * (high - low) / len(pairs) ** 0.5
    rates = {name: batch / median(values) for name, values in times.items()}
    return Row(
        "guard",
        f"SGLang {version}, {batch} concurrent",
        "tok/s",
        rates["guard"],
        rates["none"],
        median(pairs),
        TARGET,
        f"{len(pairs)} pairs of steps, ratio ± {unsure:.4f}",
        {"pairs": pairs, **times},
    )


# -- beside it


def _keeper(pages: int) -> Keeper:
    layout = PageLayout(PAGE_SIZE, 30, 3, 64, 2, "bench")
    headers = Headers(np.zeros(pages * HEADER_SIZE, np.uint8), layout, pages, HEADER_SIZE)
    return Keeper(layout, 1, headers)


def _hand_off(keeper: Keeper, pages: np.ndarray[Any, np.dtype[np.intp]], tokens: list[int]) -> Any:
    """A request whose pages have arrived as they must."""
    holding = keeper.open("bench", "tenant")
    keeper.claim(holding, pages)
    keeper.expect(holding, tokens)
    keeper.headers.words[pages] = holding.table.words
    return holding


def step_rows() -> list[Row]:
    """Microseconds of both checks of one decode step: the rows before it, all headers after."""
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            times = _step_times(batch, context)
            name = f"step check, {batch} × {context:,} tokens"
            note = f"{batch * context // PAGE_SIZE:,} pages of {PAGE_SIZE}"
            samples = {"ours": times}
            rows.append(Row("guard", name, "µs", median(times), note=note, samples=samples))
    return rows


def _step_times(batch: int, context: int) -> list[float]:
    each = context // PAGE_SIZE
    keeper = _keeper(batch * each + 1)
    order = np.random.default_rng(SEED).permutation(batch * each) + 1
    tokens = list(range(context))
    table = torch.zeros((batch, context), dtype=torch.int32)
    holdings: list[Holding] = []
    for i in range(batch):
        pages = order[i * each : (i + 1) * each]
        holdings.append(_hand_off(keeper, pages, tokens))
        cells = pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
        table[i] = torch.as_tensor(cells.reshape(-1))
    rows = SimpleNamespace(req_to_token=table)
    scheduler: Any = SimpleNamespace(token_to_kv_pool_allocator=None, req_to_token_pool=rows)
    state = State.__new__(State)  # no metrics: they are counted once a step, whatever its size
    state.rows, state.page_size = scheduler.req_to_token_pool.req_to_token, PAGE_SIZE
    given = SimpleNamespace(
        seq_lens_cpu=torch.full((batch,), context), req_pool_indices=torch.arange(batch)
    )
    times = []
    for _ in range(_REPEATS):
        start = time.thread_time()
        for holding, row in zip(holdings, state.rows_of(given), strict=True):
            if keeper.misdirected(holding, row):
                raise BenchError("a row that is as it must be was found wrong")
        if keeper.verify(holdings):
            raise BenchError("headers that are as they must be were found wrong")
        times.append((time.thread_time() - start) * 1e6)
    return times


def handoff_rows() -> list[Row]:
    """Microseconds of the scheduler for one hand-off: digests and expectations, and the commit."""
    rows = []
    for count in PROMPTS:
        pages = np.arange(1, count // PAGE_SIZE + 1)
        tokens = np.random.default_rng(SEED).integers(0, 2**16, count).tolist()
        times: dict[str, list[float]] = {"reserve": [], "commit": []}
        for _ in range(_REPEATS):
            keeper = _keeper(len(pages) + 1)
            start = time.thread_time()
            holding = _hand_off(keeper, pages, tokens)
            times["reserve"].append((time.thread_time() - start) * 1e6)
            start = time.thread_time()
            if keeper.verify([holding]):
                raise BenchError("a whole hand-off was found wrong")
            times["commit"].append((time.thread_time() - start) * 1e6)
        for name, values in times.items():
            samples = {"ours": values}
            case = f"{name}, {count:,} tokens"
            rows.append(Row("guard", case, "µs", median(values), samples=samples))
    return rows


if __name__ == "__main__":
    sys.exit(main())
