"""One flag a setting, made from `Settings`, so that flags, help and checks cannot drift apart."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sekisho.config import DEFAULT_FILE, REPEATABLE, Settings, load_settings

_FILE = inspect.Parameter(
    "file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            help=f"TOML file of settings; by default {DEFAULT_FILE}, if present.",
            show_default=False,
        ),
    ],
)


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn ``command(settings, **own)`` into one that takes ``--file`` and a flag a setting.

    The values of the flags stay text until `load_settings` checks them, as it does those of the
    environment.

    Raises (when called):
        ConfigError: see `load_settings`.
    """

    def run(file: Path | None, **given: Any) -> Any:
        flags = {
            name: value
            for name in Settings.model_fields
            if (value := given.pop(name, None)) not in (None, [])
        }
        return command(load_settings(flags, os.environ, file), **given)

    own = list(inspect.signature(command).parameters.values())[1:]
    parameters = [*own, _FILE, *(_flag(name) for name in Settings.model_fields)]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__annotations__ = {}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _flag(name: str) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=Settings.model_fields[name].description,
        show_default=False,
    )
    switch = Settings.model_fields[name].annotation is bool
    kind = bool if switch else list[str] if name in REPEATABLE else str
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
