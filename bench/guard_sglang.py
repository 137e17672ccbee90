"""``python -m bench.guard_sglang``: what the guard costs inside a real SGLang decode server.

In the engine: decode steps go through the guard and around it in turns, in one process, so that
whatever else the machine does meets both (``tests/engines/stand_ins/engine_meter.py``). Beside it,
without an engine: the check of a step by batch and context, and what a hand-off costs by length of
the prompt, in processor time of the one thread. Not part of ``make bench``: it needs
``tests/engines/install.py sglang VERSION``.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.report import SEED, BenchError, Row
from bench.steps import ANSWER_TOKENS, BATCHES, engine_row, main, own_row
from sekisho.core.memory import Headers
from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.guard.keeper import Holding, Keeper
from sekisho.guard.sglang.state import State

VERSION = "0.5.23"
CONTEXTS = (1024, 8192, 131072)
PROMPTS = (1024, 8192, 131072)
PAGE_SIZE = 64
_REPEATS = 30


# -- in the engine


def engine_rows(rounds: int) -> list[Row]:
    """Tokens per second by batch, and what the guard's functions take of a step.

    Raises:
        BenchError: the pair does not start, or answers an error.
    """
    from rig import EngineError
    from rig_sglang import SglangPair

    folder = Path(tempfile.mkdtemp(prefix="guard-sglang-"))
    meter = folder / "steps.jsonl"
    env = {"SEKISHO_GUARD": "on"}
    try:
        with SglangPair(
            VERSION,
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
    name = f"SGLang {VERSION}"
    return [row(name, batch, steps) for row in (engine_row, own_row) for batch in BATCHES]


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
    sys.exit(main("guard_sglang", engine_rows, lambda: [*step_rows(), *handoff_rows()]))
