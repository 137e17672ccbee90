"""``sekisho config``: what the platform would run with, and which place said so."""

import json
from typing import Annotated

import typer

from sekisho.cli.options import with_settings
from sekisho.config import Settings

app = typer.Typer(help="Show the configuration.")


@app.callback()
def _verbs() -> None:
    """Show the configuration."""


@app.command()
@with_settings
def show(
    settings: Settings,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a value and a source for each setting.")
    ] = False,
) -> None:
    """Print every setting with its source, as TOML; a password in a URL is masked."""
    resolved = settings.resolved()
    if as_json:
        print(json.dumps({name: entry._asdict() for name, entry in resolved.items()}, indent=2))
        return
    lines = {
        # A JSON string is also a TOML one as long as it is not cut into surrogate escapes.
        f"{name} = {json.dumps(entry.value, ensure_ascii=False)}": entry.source
        for name, entry in resolved.items()
    }
    width = max(map(len, lines))
    for line, source in lines.items():
        print(f"{line:{width}}  # {source}")
