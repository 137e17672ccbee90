"""SGLang loads this through its entry point ``sglang.srt.plugins``, in every process.

``SEKISHO_GUARD=on`` puts the guard in; without it nothing happens. SGLang logs a plugin that
raises and goes on without it, so every failure here ends the process instead, with one line.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

VARIABLE = "SEKISHO_GUARD"


def load() -> None:
    """Hold every seam of this version of SGLang, or end the process."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted in ("", "off"):
        return
    if wanted != "on":
        end(f"{VARIABLE} is {wanted!r}, and must be on or off")
    try:
        _hold_all()
    except BaseException as error:  # whatever it is, no server without its guard
        end(f"{type(error).__name__}: {error}" if str(error) else repr(error))


def _hold_all() -> None:
    import sglang

    from sekisho.guard.seams import hold
    from sekisho.guard.sglang.versions import VERSIONS

    version = sglang.__version__
    known = VERSIONS.get(version)
    if known is None or not known.supported:
        supported = ", ".join(v for v, k in VERSIONS.items() if k.supported)
        end(f"SGLang {version} is not a version that the guard knows ({supported})")
    hold(all_seams())
    _guard_queue()


def all_seams() -> tuple[Any, ...]:
    """What `load` holds, in the order in which it goes around."""
    from sekisho.guard.sglang import admission, decode, pages, prefill, start

    return (*start.SEAMS, *admission.SEAMS, *pages.SEAMS, *decode.SEAMS, *prefill.SEAMS)


def _guard_queue() -> None:
    """The class of the queue that SGLang's transfer threads read from."""
    from sglang.srt.disaggregation.mooncake import conn

    from sekisho.guard.seams import SeamError
    from sekisho.guard.sglang.prefill import queue_class

    methods: dict[str, Callable[..., Any]] = vars(conn.FastQueue)
    if not {"put", "get"} <= set(methods):
        raise SeamError("sglang.srt.disaggregation.mooncake.conn:FastQueue has no put and get")
    conn.FastQueue = queue_class(conn.FastQueue)


def end(reason: str) -> NoReturn:
    """No server without its guard: one line, and the process is over."""
    print(f"sekisho guard: {reason}", file=sys.stderr, flush=True)
    os._exit(2)
