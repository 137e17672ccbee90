"""Seconds of every decode step of a vLLM engine, with the guard and without it in turns.

Every second step is neither vouched for nor checked: the scheduler's half builds nothing for it,
and the worker's half looks at nothing. A step in which a block is handed out or a transfer begins
is always guarded, since the ledger must hear of it. ``ENGINE_METER_VLLM`` names the file: one JSON
object a step of the engine core, from the schedule to the outputs.
"""

import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from engine_switch import around

FILE = os.environ.get("ENGINE_METER_VLLM", "")


class _Meter:
    bypass = False
    plain = False
    counts: tuple[int, int] = (0, 0)


_meter = _Meter()


def _step(original: Any, guard: Any, output: Any, inner: Any) -> Any:
    """The scheduler's half; says how many requests and tokens this step is of."""
    counts = output.num_scheduled_tokens
    _meter.counts = len(counts), sum(counts.values())
    _meter.plain = bool(_meter.bypass and counts and not guard.rows.fresh and not guard._loads)
    if not _meter.plain:
        return original(guard, output, inner)
    from sekisho.guard.vllm.messages import StepMeta

    meta = StepMeta(inner)
    meta.plain = True  # type: ignore[attr-defined]
    return meta


def _check_rows(original: Any, worker: Any, meta: Any, runner: Any) -> Any:
    return None if getattr(meta, "plain", False) else original(worker, meta, runner)


def _core_step(original: Any, core: Any) -> Any:
    start = time.perf_counter()
    out = original(core)
    seconds = time.perf_counter() - start
    batch, tokens = _meter.counts
    if batch and batch == tokens:
        said = {"batch": batch, "guard": not _meter.plain, "seconds": seconds}
        said["wanted"] = not _meter.bypass
        with Path(FILE).open("a") as file:
            file.write(json.dumps(said) + "\n")
    _meter.bypass, _meter.counts = not _meter.bypass, (0, 0)
    return out


def _scheduler(module: ModuleType) -> None:
    around(module.Scheduling, "step", _step)


def _worker(module: ModuleType) -> None:
    around(module.Worker, "check_rows", _check_rows)


def _core(module: ModuleType) -> None:
    around(module.EngineCore, "step", _core_step)


HOOKS = (
    (
        ("sekisho.guard.vllm.scheduler", _scheduler),
        ("sekisho.guard.vllm.worker", _worker),
        ("vllm.v1.engine.core", _core),
    )
    if FILE
    else ()
)
