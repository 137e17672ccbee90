"""Controls of the probe: a server with the defect that a technique is for, and one without any.

async with positive("residue") as control:
    …                        # control.base_url, its two keys
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp

from sekisho.gateway.backend import Backend
from sekisho.lab.defects_http import HTTP_DEFECTS
from sekisho.lab.leaky_engine import POOL_PAGES, WINDOW, Colocated
from sekisho.lab.leaky_gateway import DirtyChannels, Replaying, SharedCollector
from sekisho.lab.machine import LabModel, Machine, Sizes, load_lab_model
from sekisho.lab.serving import LabBackend, serving
from sekisho.lab.switches import switches
from sekisho.lab.unsafe import LabError

SIZES: Mapping[str, Mapping[str, Any]] = {
    "boundary": {"plants": 2, "repeats": 1, "bisect_max": 6, "answer_tokens": 48},
    "residue": {"rounds": 2, "plants": 7, "words": 60},
    "abort": {"rounds": 1, "leaves": 6, "words": 60},
    "crossed": {"rounds": 2, "streams": 4, "answer_tokens": 48},
    "prefix": {"documents": 4, "variant_documents": 1, "words": 120, "pictures": 1},
    "ids": {"rounds": 1, "answer_tokens": 48},
    "response-cache": {"rounds": 1, "stories": 4, "story_tokens": 48},
    "timing": {"samples": 16, "own_samples": 12, "words": 120},
    "interference": {"rounds": 1, "plants": 2, "words": 60},
}
"""Arguments of each technique with which its control can be asked on a small machine."""

_INCIDENT = Sizes(window=512, decode_pages=32, prefill_pages=24)

_BACKENDS: dict[str, Callable[[Backend], Backend]] = {
    "abort": DirtyChannels,
    "crossed": SharedCollector,
}


class Control(NamedTuple):
    """A server that runs. ``base_url`` ends in /v1; ``defect`` and ``report`` are empty of one
    that has none."""

    base_url: str
    model: str
    key_a: str
    key_b: str
    defect: str
    report: str


@contextlib.asynccontextmanager
async def positive(technique: str) -> AsyncIterator[Control]:
    """A server with the one defect of `HTTP_DEFECTS` that ``technique`` is to find.

    Raises:
        LabError: there is none for it, or the server does not start.
        ModelError: the demo model is not installed.
    """
    if technique not in HTTP_DEFECTS:
        known = ", ".join(HTTP_DEFECTS)
        raise LabError(f"no defect is for {technique!r}; there are: {known}")
    defect = HTTP_DEFECTS[technique]
    async with _running(technique, defect.name, defect.report) as control:
        yield control


@contextlib.asynccontextmanager
async def negative() -> AsyncIterator[Control]:
    """The same server without a defect: isolation ``standard``, every check.

    Raises:
        LabError, ModelError: as `positive`.
    """
    async with _running("", "", "") as control:
        yield control


@contextlib.asynccontextmanager
async def _running(technique: str, defect: str, report: str) -> AsyncIterator[Control]:
    model = await asyncio.to_thread(_model)
    with contextlib.ExitStack() as stack:
        made = await asyncio.to_thread(_backend, model, technique, stack)
        made.start()
        stack.callback(made.stop)
        backend = _BACKENDS[technique](made) if technique in _BACKENDS else made
        async with serving(model, backend, _wrap(technique)) as served:
            yield Control(*served, defect, report)
        if made.failure is not None:
            raise LabError(f"the lab's engine failed: {made.failure}")


def _backend(model: LabModel, technique: str, stack: contextlib.ExitStack) -> LabBackend:
    if technique == "boundary":
        machine = Machine(model, _INCIDENT)
        stack.callback(machine.close)
        machine.start(switches())
        return LabBackend(machine.pair, machine.advertised, _INCIDENT.decode_pages)
    node = Colocated(model, technique)
    stack.callback(node.close)
    return LabBackend(node, WINDOW, POOL_PAGES)


def _wrap(technique: str) -> Callable[[ASGIApp], ASGIApp]:
    if technique == "ids":
        return functools.partial(Replaying, by_question=False)
    if technique == "response-cache":
        return functools.partial(Replaying, by_question=True)
    return lambda app: app


@functools.cache
def _model() -> LabModel:
    return load_lab_model()
