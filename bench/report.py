"""What a benchmark hands back, as a table and as JSON."""

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

SEED = 20261202
_PACKAGES = ("numpy", "torch", "transformers", "mooncake-transfer-engine-non-cuda")


class BenchError(Exception):
    """A benchmark cannot run here, or its two sides do not do the same; one line."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        ours, peer: in ``unit``; ``peer`` is None where the target is of ``ours`` itself.
        ratio: ours over peer, for rates: above 1 is in our favour.
        target: of ``ratio``, at least; without a peer of ``ours``, at most. None: for information.
        samples: every round's measurement, by side.
        detail: for the JSON, and not for the table.
    """

    bench: str
    name: str
    unit: str
    ours: float
    peer: float | None = None
    ratio: float | None = None
    target: float | None = None
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)
    detail: bool = False

    @property
    def holds(self) -> bool | None:
        if self.target is None:
            return None
        if self.ratio is not None:
            return self.ratio >= self.target
        return self.ours <= self.target


def rate_row(
    bench: str,
    name: str,
    unit: str,
    ours: list[float],
    peer: list[float],
    target: float | None = None,
    note: str = "",
    detail: bool = False,
) -> Row:
    """Rates of interleaved rounds: medians, and their ratio."""
    our_median, peer_median = median(ours), median(peer)
    ratio = our_median / peer_median
    samples = {"ours": ours, "peer": peer}
    return Row(bench, name, unit, our_median, peer_median, ratio, target, note, samples, detail)


def print_table(rows: list[Row]) -> None:
    """On standard output, as wide as it needs to be where that is no terminal."""
    table = Table(box=None, pad_edge=False)
    for heading in (
        "benchmark",
        "case",
        "ours",
        "peer",
        "unit",
        "ratio",
        "target",
        "holds",
        "note",
    ):
        right = heading in ("ours", "peer", "ratio", "target")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "note")
    for row in rows:
        if row.detail:
            continue
        target = "" if row.target is None else f"{row.target:g}"
        bound = "" if row.target is None else "≥ " if row.ratio is not None else "< "
        table.add_row(
            row.bench,
            row.name,
            _number(row.ours),
            "" if row.peer is None else _number(row.peer),
            row.unit,
            "" if row.ratio is None else f"{row.ratio:.3f}",
            bound + target,
            {None: "", True: "yes", False: "NO"}[row.holds],
            row.note,
        )
    console = Console()
    Console(width=None if console.is_terminal else 200).print(table)


def as_json(rows: list[Row], rounds: int | None, load_before: float) -> dict[str, Any]:
    """Everything somebody needs to judge or repeat the run."""
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "load_average_before": load_before,
        },
        "versions": {"python": platform.python_version()} | _versions(),
        "rounds": rounds if rounds is not None else "each benchmark's own, see samples",
        "seed": SEED,
        "rows": [asdict(row) | {"holds": row.holds} for row in rows],
    }


def finish(
    rows: list[Row], file: Path | None, rounds: int | None, load_before: float, missing: bool
) -> int:
    """Print the table and write the JSON; 0 where every target holds, 1 where one is missed, 2
    where something is ``missing``."""
    print_table(rows)
    if file is not None:
        file.write_text(json.dumps(as_json(rows, rounds, load_before), indent=1) + "\n")
    if missing:
        return 2
    return 1 if any(row.holds is False for row in rows) else 0


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
