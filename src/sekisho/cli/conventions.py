"""What commands have in common: a default command, errors of one line, results in a file."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup


def default_to(command: str) -> type[TyperGroup]:
    """A group in which what is no command and no plea for help goes to ``command``."""

    class Group(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if not args or (args[0] not in self.commands and args[0] != "--help"):
                args = [command, *args]
            return super().parse_args(ctx, args)

    return Group


@contextmanager
def one_line(*errors: type[Exception]) -> Iterator[None]:
    """What the user can mend becomes one line on stderr and exit code 2."""
    try:
        yield
    except errors as error:
        raise _refusal(str(error)) from None


def write_result(text: str, path: Path | None) -> None:
    """To ``path``, or to standard output where it is None; one line and exit code 2 where it cannot
    be written."""
    if path is None:
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refusal(f"{path}: {error.strerror}") from None


def unwritable(*paths: Path | None) -> Path | None:
    """The first of ``paths`` that no file can be written to, known before an hour of trials."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            return path
    return None


def _refusal(text: str) -> typer.Exit:
    """After its line on stderr."""
    print(f"sekisho: {' '.join(text.split())}", file=sys.stderr)
    return typer.Exit(2)
