"""Seconds of every decode step, with the guard and without it in turns, in one process.

Every second step goes around all of the guard's functions; which ones they are changes with every
page. A step in which a request gets a page never does, since the ledger must hear of it.
``ENGINE_METER`` names the file: one JSON object a step. ``own`` are the seconds in the guard's
functions alone, by function: what they go around does not count.
"""

import functools
import json
import os
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = os.environ.get("ENGINE_METER", "")


class _Meter:
    bypass = False
    last: tuple[float, int] | None = None

    def __init__(self) -> None:
        self.own: dict[str, float] = {}
        self.inside = 0.0
        self.thread = threading.get_ident()


_meter = _Meter()


def _timed(function: Any, name: str = "") -> Any:
    """``function``, its seconds added to what is inside of its caller; with a ``name``, those that
    are not inside of others are the guard's own."""

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != _meter.thread:
            return function(*args, **kwargs)
        before, _meter.inside, start = _meter.inside, 0.0, time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            took = time.perf_counter() - start
            if name:
                _meter.own[name] = _meter.own.get(name, 0.0) + took - _meter.inside
            _meter.inside = before + took

    return timed


def _wrap(original: Any, inner: Any, around: Any) -> Any:
    guarded = _timed(original(_timed(inner), around), inner.__name__)

    @functools.wraps(guarded)
    def either(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) if _meter.bypass else guarded(*args, **kwargs)

    if inner.__name__ != "process_batch_result":
        return either

    @functools.wraps(either)
    def last(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = either(scheduler, batch, *args, **kwargs)
        _ended(batch)
        return out

    return last


def _ended(batch: Any) -> None:
    """The step is over: note it, and say how the next one goes."""
    now, size = time.perf_counter(), len(batch.reqs)
    if not batch.forward_mode.is_decode():
        _meter.last, _meter.bypass, _meter.own = None, False, {}
        return
    lengths = batch.seq_lens_cpu.tolist()
    if _meter.last is not None and _meter.last[1] == size:
        said = {"batch": size, "context": max(lengths), "guard": not _meter.bypass}
        with Path(FILE).open("a") as file:
            file.write(
                json.dumps(said | {"seconds": now - _meter.last[0], "own": _meter.own}) + "\n"
            )
    page = batch.token_to_kv_pool_allocator.page_size
    busy = any(req.finished() for req in batch.reqs) or any(n % page == 0 for n in lengths)
    # Odd pages keep the guard for two steps first, or it would always meet the same slots.
    twice = busy or (lengths[0] // page % 2 == 1 and lengths[0] % page == 1)
    _meter.bypass = not twice and not _meter.bypass
    _meter.own = {}
    _meter.last = (time.perf_counter(), size)


def _seams(module: ModuleType) -> None:
    module.__dict__["_wrap"] = functools.partial(_wrap, module._wrap)


HOOKS = (("sekisho.guard.seams", _seams),) if FILE else ()
