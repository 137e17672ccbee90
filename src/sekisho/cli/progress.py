"""The one line of progress on stderr that long commands show."""

import sys
import time
from collections.abc import Callable


def progress(every_s: float = 10.0) -> Callable[[str], None]:
    """A function that shows a line: rewritten in place on a terminal, else printed once in
    ``every_s`` seconds."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - last >= every_s:
            last = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    return say


def clear() -> None:
    """Take the line off a terminal, before something else is printed."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
