"""``python -m bench``: exit 0 where every target holds, 1 where one is missed, 2 where a benchmark
cannot run."""

import argparse
import importlib
import os
import sys
from pathlib import Path

from bench.report import BenchError, Row, finish
from sekisho.engine.spec import ModelError
from sekisho.transport import TransportError

NAMES = ("ledger", "handoff", "invariance", "checks", "engine", "gate")


def main() -> int:
    """Run the benchmarks one after the other, sides interleaved within each."""
    arguments = _parse()
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may wait for a network
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(
            f"load average {busy:.1f}: on a busy machine these ratios mean little", file=sys.stderr
        )
    rows: list[Row] = []
    missing = False
    for name in arguments.only or NAMES:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            rows += importlib.import_module(f"bench.{name}").run(arguments.rounds)
        except (BenchError, ModelError, TransportError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            missing = True
    return finish(rows, arguments.json, arguments.rounds, busy, missing)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description="Ratios, in one run.")
    parser.add_argument("--only", choices=NAMES, action="append", help="this one; may be repeated")
    parser.add_argument("--rounds", type=_positive, help="rounds of each (default: its own)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    sys.exit(main())
