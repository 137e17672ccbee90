"""Seconds of every decode step of a vLLM engine, with the guard and without it in turns.

Every second step is neither vouched for nor checked: the scheduler's half builds nothing for it,
and the worker's half looks at nothing. A step in which a block is handed out or a transfer begins
is always guarded, since the ledger must hear of it. ``ENGINE_METER_VLLM`` names the file: one JSON
object a step of the engine core, from the schedule to the outputs; ``own`` are the seconds in the
guard's functions there. The worker is a process of its own: before the core's object it writes one
with ``worker``, its seconds.
"""

import functools
import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from engine_switch import around

FILE = os.environ.get("ENGINE_METER_VLLM", "")
_PLAIN = ["step without the guard"]
"""In the place of the requests whose headers are written: only fields reach the worker."""


class _Meter:
    bypass = False
    plain = False
    counts: tuple[int, int] = (0, 0)

    def __init__(self) -> None:
        self.own: dict[str, float] = {}


_meter = _Meter()


def _timed(name: str, original: Any, *args: Any) -> Any:
    start = time.perf_counter()
    out = original(*args)
    _meter.own[name] = _meter.own.get(name, 0.0) + time.perf_counter() - start
    return out


def _report(original: Any, worker: Any, inner: Any = None) -> Any:
    """The last that the worker's half does in a step."""
    out = _timed("report", original, worker, inner)
    with Path(FILE).open("a") as file:
        file.write(json.dumps({"worker": _meter.own}) + "\n")
    _meter.own = {}
    return out


def _step(original: Any, guard: Any, output: Any, inner: Any) -> Any:
    """The scheduler's half; says how many requests and tokens this step is of."""
    counts = output.num_scheduled_tokens
    _meter.counts = len(counts), sum(counts.values())
    _meter.plain = bool(_meter.bypass and counts and not guard.rows.fresh and not guard._loads)
    if not _meter.plain:
        return original(guard, output, inner)
    from sekisho.guard.vllm.messages import StepMeta

    return StepMeta(inner, names=_PLAIN)


def _check_rows(original: Any, worker: Any, meta: Any, runner: Any) -> Any:
    return None if meta.names == _PLAIN else original(worker, meta, runner)


def _core_step(original: Any, core: Any) -> Any:
    start = time.perf_counter()
    out = original(core)
    seconds = time.perf_counter() - start
    batch, tokens = _meter.counts
    # A step that had to be guarded though it was not its turn is none to compare.
    if batch and batch == tokens and _meter.plain == _meter.bypass:
        said = {"batch": batch, "guard": not _meter.plain, "seconds": seconds, "own": _meter.own}
        with Path(FILE).open("a") as file:
            file.write(json.dumps(said) + "\n")
    _meter.bypass, _meter.counts, _meter.own = not _meter.bypass, (0, 0), {}
    return out


def _scheduler(module: ModuleType) -> None:
    for name in ("step", "heard", "put_back", "fails_now"):
        around(module.Scheduling, name, functools.partial(_timed, name))
    around(module.Scheduling, "step", _step)


def _worker(module: ModuleType) -> None:
    for name in ("check_rows", "bind", "after_forward"):
        around(module.Worker, name, functools.partial(_timed, name))
    around(module.Worker, "report", _report)
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
