"""The smallest scenario that still fails the same way, and the file that keeps it."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from sekisho.sim.run import run
from sekisho.sim.scenario import Failure, Saved, Scenario

FORMAT = 1
_PARTS = ("events", "strikes", "asks")
T = TypeVar("T")


class TraceError(Exception):
    """A file is no saved run, or of another format; one line says why."""


def shrink(scenario: Scenario, checker: str) -> Scenario:
    """Leave out events, strikes and asks for as long as ``checker`` still fails (after Zeller and
    Hildebrandt 2002, "ddmin")."""
    for name in _PARTS:
        whole = scenario

        def still(kept: list[T], whole: Scenario = whole, name: str = name) -> bool:
            failure = run(msgspec.structs.replace(whole, **{name: kept})).failure
            return failure is not None and failure.checker == checker

        kept = _minimal(getattr(scenario, name), still)
        scenario = msgspec.structs.replace(scenario, **{name: kept})
    return scenario


def _minimal(items: list[T], still: Callable[[list[T]], bool]) -> list[T]:
    """A part of ``items`` of which no element can be left out, trying large pieces first."""
    size = max(1, len(items) // 2)
    while items:
        at, before = 0, len(items)
        while at < len(items):
            rest = items[:at] + items[at + size :]
            if still(rest):
                items = rest
            else:
                at += size
        if size == 1 and len(items) == before:
            break
        size = max(1, size // 2)
    return items


def size_of(scenario: Scenario) -> int:
    """Asks, strikes and events."""
    return sum(len(getattr(scenario, name)) for name in _PARTS)


def save(scenario: Scenario, failure: Failure, shrunk_from: int, version: str, path: Path) -> None:
    """Write a failed run for `load`."""
    saved = Saved(
        format=FORMAT,
        version=version,
        failure=failure,
        shrunk_from=shrunk_from,
        scenario=scenario,
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1))


def load(path: Path) -> Saved:
    """A saved run.

    Raises:
        TraceError: the file cannot be read, is not one, or is of another format.
    """
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise TraceError(f"{path} is no saved run: {error}") from None
    if saved.format != FORMAT:
        raise TraceError(f"{path} has format {saved.format}, this version reads {FORMAT}")
    return saved
