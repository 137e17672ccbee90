"""``python -m bench.guard_vllm``: what the guard costs inside a real vLLM decode server.

In the engine: every second decode step goes without the guard, in one process, so that whatever
else the machine does meets both (``tests/engines/stand_ins/engine_meter_vllm.py``). Beside it,
without an engine: the check of a step by batch and context, and what a hand-off costs by length of
the prompt, in processor time of the one thread. Not part of ``make bench``: it needs
``tests/engines/install.py vllm``.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.report import SEED, BenchError, Row
from bench.steps import ANSWER_TOKENS, BATCHES, engine_row, main, own_row
from sekisho.core.page import PageLayout
from sekisho.guard.vllm.admission import scope_of
from sekisho.guard.vllm.manifest import FIELD
from sekisho.guard.vllm.messages import StepMeta
from sekisho.guard.vllm.mooncake import Mooncake
from sekisho.guard.vllm.scheduler import Scheduling
from sekisho.guard.vllm.start import make_keeper
from sekisho.guard.vllm.worker import Worker

CONTEXTS = (1024, 8192, 131072)
BLOCK = 32
_PROMPT_TOKENS = 40
"""Without instructions for bfloat16 this CPU computes 10 to 25 of them a second."""
_REPEATS = 30
_LAYOUT = PageLayout(BLOCK, 2, 1, 4, 2, "model")
_KEY = b"k" * 32


# -- in the engine


def engine_rows(rounds: int) -> list[Row]:
    """Tokens per second by batch, and what the guard's functions take of a step.

    Raises:
        BenchError: the pair does not start, or answers an error.
    """
    from faulty_vllm import GUARD, KEY
    from rig import EngineError
    from rig_vllm import VllmPair

    folder = Path(tempfile.mkdtemp(prefix="guard-vllm-"))
    meter = folder / "steps.jsonl"
    try:
        with VllmPair(
            prefill_tokens=8192,
            decode_tokens=8192,
            abort_s=300,
            connector=GUARD,
            env={"SEKISHO_GUARD_KEY": KEY},
            decode_env={"ENGINE_METER_VLLM": str(meter)},
            folder=folder,
        ) as pair:
            for number in range(rounds):
                for batch in BATCHES:
                    asyncio.run(_ask(pair, batch, f"{number}"))
    except EngineError as error:
        raise BenchError(str(error)) from error
    steps = list(_steps(meter.read_text()))
    return [row("vLLM 0.32.0", batch, steps) for row in (engine_row, own_row) for batch in BATCHES]


def _steps(written: str) -> Iterator[dict[str, Any]]:
    """The core's objects, each with what the worker wrote before it."""
    worker: dict[str, float] = {}
    for line in written.splitlines():
        said = json.loads(line)
        if "worker" in said:
            worker = said["worker"]
            continue
        yield said | {"own": said["own"] | worker}
        worker = {}


async def _ask(pair: Any, batch: int, salt: str) -> None:
    """``batch`` requests at once, none of which ends early."""
    from faulty_vllm import ask, body

    generator = np.random.default_rng(SEED)
    bodies = [
        body(generator.integers(100, 40000, _PROMPT_TOKENS).tolist(), ANSWER_TOKENS, salt)
        for _ in range(batch)
    ]
    for found in await asyncio.gather(*(ask(pair, one, timeout_s=300) for one in bodies)):
        if found.status != 200:
            raise BenchError(f"decode answered {found.status}: {found.said}")


# -- without one


class _Request(SimpleNamespace):
    """What the guard reads of a vLLM request."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.all_token_ids)


def _request(name: str, tokens: list[int], params: dict[str, Any]) -> Any:
    return _Request(
        request_id=name,
        all_token_ids=tokens,
        prompt_token_ids=tokens,
        cache_salt="salt",
        kv_transfer_params=params,
        num_computed_tokens=0,
        mm_features=(),
        prompt_embeds=None,
        resumable=False,
        lora_request=None,
    )


class _Side:
    """Both halves of one role."""

    def __init__(self, role: str, blocks: int) -> None:
        self.guard = Scheduling(make_keeper(_LAYOUT, blocks), role, "engine", _KEY, 1, Mooncake())
        self.worker = Worker(_LAYOUT, blocks)

    def allocate(self, request: Any, pages: list[int]) -> None:
        blocks = [SimpleNamespace(block_id=page, is_null=False, ref_cnt=0) for page in pages]
        with self.guard.rows.handing(request, scope_of(request)):
            self.guard.rows.handed(blocks)

    def step(self, counts: dict[str, int]) -> StepMeta:
        return self.guard.step(SimpleNamespace(num_scheduled_tokens=counts), None)


def step_rows() -> list[Row]:
    """Microseconds of one decode step: what the scheduler vouches for, what the worker compares."""
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            for half, times in _step_times(batch, context).items():
                name = f"step, {half}, {batch} × {context:,} tokens"
                note = f"{batch * context // BLOCK:,} blocks of {BLOCK}"
                samples = {"ours": times}
                rows.append(Row("guard", name, "µs", median(times), note=note, samples=samples))
    return rows


def _step_times(batch: int, context: int) -> dict[str, list[float]]:
    each = context // BLOCK
    side = _Side("decode", batch * each + 1)
    order = (np.random.default_rng(SEED).permutation(batch * each) + 1).tolist()
    requests = []
    for i in range(batch):
        request = _request(f"r{i}", list(range(context - BLOCK)), {})
        side.allocate(request, order[i * each : (i + 1) * each])
        requests.append(request)
    side.worker.bind(side.step({r.request_id: context - BLOCK for r in requests}))
    side.worker.after_forward()
    times: dict[str, list[float]] = {"scheduler": [], "worker": []}
    for _ in range(_REPEATS):
        for request in requests:
            request.num_computed_tokens = len(request.all_token_ids)
            request.all_token_ids.append(7)
        start = time.thread_time()
        meta = side.step({r.request_id: 1 for r in requests})
        times["scheduler"].append((time.thread_time() - start) * 1e6)
        runner = _runner(meta)
        start = time.thread_time()
        side.worker.check_rows(meta, runner)
        side.worker.bind(meta)
        side.worker.after_forward()
        times["worker"].append((time.thread_time() - start) * 1e6)
        if side.worker.report() is not None:
            raise BenchError("a step that is as it must be was found wrong")
    return times


def _runner(meta: StepMeta) -> Any:
    """What vLLM's model runner gives attention."""
    rows = torch.as_tensor(np.stack(list(meta.rows.values())))
    table = SimpleNamespace(
        get_device_tensor=lambda count: rows[:count],
        num_blocks_per_row=np.full(len(rows), rows.shape[1]),
    )
    batch = SimpleNamespace(
        num_reqs=len(rows),
        req_ids=list(meta.rows),
        block_table=SimpleNamespace(block_tables=[table]),
    )
    first = SimpleNamespace(np=np.arange(len(rows) + 1))
    return SimpleNamespace(input_batch=batch, query_start_loc=first)


def handoff_rows() -> list[Row]:
    """Microseconds of one hand-off: manifest signed, admitted, blocks reserved, arrival found."""
    rows = []
    for count in CONTEXTS:
        tokens = np.random.default_rng(SEED).integers(0, 2**16, count).tolist()
        times: dict[str, list[float]] = {}
        for _ in range(_REPEATS):
            for part, value in _hand_off(tokens).items():
                times.setdefault(part, []).append(value)
        for part, values in times.items():
            case = f"{part}, {count:,} tokens"
            samples = {"ours": values}
            rows.append(Row("guard", case, "µs", median(values), samples=samples))
    return rows


def _hand_off(tokens: list[int]) -> dict[str, float]:
    pages = list(range(1, len(tokens) // BLOCK + 1))
    prefill, decode = _Side("prefill", len(pages) + 1), _Side("decode", len(pages) + 1)
    asked = _request("p", tokens, {"do_remote_decode": True, "transfer_id": "t"})
    prefill.guard.admit(asked)
    prefill.allocate(asked, pages)
    prefill.worker.bind(prefill.step({"p": len(tokens)}))
    prefill.worker.after_forward()
    marks = [time.thread_time()]
    said = prefill.guard.ended(asked, True)
    marks.append(time.thread_time())
    where = {"remote_engine_id": "engine", "remote_bootstrap_addr": "there", "transfer_id": "t"}
    params = {"do_remote_prefill": True, **where, FIELD: (said or {}).get(FIELD)}
    request = _request("d", tokens, params)
    marks.append(time.thread_time())
    admitted = decode.guard.admit(request)
    marks.append(time.thread_time())
    decode.allocate(request, pages)
    decode.guard.allocated(request, len(tokens))
    meta = decode.step({})
    decode.worker.bind(meta)
    marks.append(time.thread_time())
    decode.worker.headers.words[pages] = prefill.worker.headers.words[pages]
    marks.append(time.thread_time())
    failing = decode.worker.arrived({"d"})
    marks.append(time.thread_time())
    if not admitted or failing:
        raise BenchError("a whole hand-off was found wrong")
    spans = {"prefill signs": 0, "decode admits": 2, "decode reserves": 3, "arrival": 5}
    return {name: (marks[i + 1] - marks[i]) * 1e6 for name, i in spans.items()}


if __name__ == "__main__":
    sys.exit(main("guard_vllm", engine_rows, lambda: [*step_rows(), *handoff_rows()]))
