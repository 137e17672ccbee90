"""``sekisho serve``: the platform with one command."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sekisho.cli.options import with_settings
from sekisho.config import DEMO_MODEL, Settings

if TYPE_CHECKING:
    from sekisho.gateway.serve import Served
    from sekisho.node.messages import Loading, Ready


@with_settings
def serve(settings: Settings) -> None:
    """Start gateway and nodes, print URL and keys, serve until Ctrl-C."""
    # Late, because they import torch: `sekisho --help` must not wait for it.
    from sekisho.engine.demo import ensure_demo_model
    from sekisho.engine.spec import ModelError
    from sekisho.gateway.engines.replica import EngineError
    from sekisho.gateway.fleet import FleetError
    from sekisho.gateway.keys import StoreError
    from sekisho.gateway.serve import ServeError
    from sekisho.gateway.serve import serve as run

    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s gateway %(name)s %(message)s",
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)  # its steps say nothing to a user
    try:
        if settings.model == DEMO_MODEL:
            folder = ensure_demo_model(progress=lambda line: _say(f"demo model: {line}"))
        else:
            folder = Path(settings.model)
        asyncio.run(run(settings, folder, _progress, _announce))
    except (ServeError, FleetError, EngineError, ModelError, StoreError) as error:
        print(f"sekisho: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _progress(node: str, step: "Loading | Ready") -> None:
    from sekisho.node.messages import Loading

    if isinstance(step, Loading):
        tty = sys.stderr.isatty()
        if tty or step.done == step.total:
            end = "" if tty and step.done < step.total else "\n"
            print(f"\r{node}: {step.stage} {step.done}/{step.total}", end=end, file=sys.stderr)
        return
    _say(f"{node}: ready, {step.runner}, {step.transport} transport, {step.tokens_max} tokens")
    for note in step.notes:
        _say(f"{node}: {note}")


def _announce(served: "Served") -> None:
    print(f"\nSekisho serves {served.model} at {served.url}/v1")
    print(f"Longest request: {served.tokens_max} tokens, prompt and answer together\n")
    for tenant, key in served.keys.items():
        print(f"  {tenant}: {key}")
    key = next(iter(served.keys.values()))
    body = (
        f'{{"model": "{served.model}", '
        '"messages": [{"role": "user", "content": "What is a checkpoint?"}]}'
    )
    print(f"\ncurl {served.url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\")
    print(f"  -H 'Content-Type: application/json' -d '{body}'\n", flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
