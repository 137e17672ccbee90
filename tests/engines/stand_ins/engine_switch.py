"""What turns faults on and checks off inside a running engine: a JSON file, read at each call.

    {"faults": {"page_unwritten": {"room": 7, "page": 3}}, "off": ["commit"]}

``ENGINE_SWITCH`` names the file, ``ENGINE_TRACE`` the one that `trace` appends to, ``ENGINE_ROLE``
the role of this process: ``prefill`` or ``decode``.
"""

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROLE = os.environ.get("ENGINE_ROLE", "")
_SWITCH = Path(os.environ.get("ENGINE_SWITCH", os.devnull))
_TRACE = os.environ.get("ENGINE_TRACE", "")
_lock = threading.Lock()
_read: tuple[int, dict[str, Any]] = (-1, {})


def _state() -> dict[str, Any]:
    global _read  # noqa: PLW0603  # one file, read by every hook of this process
    try:
        changed = _SWITCH.stat().st_mtime_ns
        if changed != _read[0]:
            _read = (changed, json.loads(_SWITCH.read_text() or "{}"))
    except (OSError, ValueError):
        return {}
    return _read[1]


def fault(name: str, **about: Any) -> dict[str, Any] | None:
    """The parameters of a fault that is on, if it is about all of ``about``; else None."""
    found = _state().get("faults", {}).get(name)
    if found is None or any(found.get(key) != value for key, value in about.items()):
        return None
    return dict(found)


def is_off(check: str) -> bool:
    """Whether a check of the guard is taken out."""
    return check in _state().get("off", ())


def trace(event: str, **fields: Any) -> None:
    """One JSON object a line: ids, page numbers and counts."""
    if _TRACE:
        said = {"event": event, "role": ROLE, "at": round(time.time(), 4), **fields}
        with _lock, Path(_TRACE).open("a") as file:
            file.write(json.dumps(said) + "\n")


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``wrapper(original, …)``; inspection still sees the original."""
    original: Any = getattr(owner, name, None)
    if original is None and "ENGINE_BREAK" in os.environ:  # it was taken away on purpose
        return

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, hooked)
