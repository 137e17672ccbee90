"""Takes the guard's own checks out of a running engine, one by one, to show what each is for.

check        what is gone
admission    a prompt is not compared with the limits, nor a verdict looked for
commit       what arrived is not compared with what was reserved
row          the table that attention reads is not compared with what was vouched for
release      headers are not looked at again before a step's tokens leave
quarantine   pages that a writer may still reach are used again
scope        prefix pages are not asked whose they are
seams        a seam that is missing, or not as known, is passed over
"""

import contextlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from engine_switch import around, is_off

_NO_SEAMS = "ENGINE_NO_SEAM_CHECK"


def _unless(check: str, instead: Any) -> Callable[..., Any]:
    def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
        return instead if is_off(check) else original(*args, **kwargs)

    return wrapper


def _admission(module: ModuleType) -> None:
    around(module, "_refusal", _unless("admission", None))


def _decode(module: ModuleType) -> None:
    around(module, "_arrived", _unless("commit", ()))
    around(module, "check_rows", _unless("row", None))


def _keeper(module: ModuleType) -> None:
    def verify(original: Any, *args: Any, **kwargs: Any) -> Any:
        at_release = sys._getframe(2).f_code.co_name == "_process_batch_result"
        return {} if at_release and is_off("release") else original(*args, **kwargs)

    around(module.Keeper, "verify", verify)
    around(module.Keeper, "foreign", _unless("scope", ()))


def _ledger(module: ModuleType) -> None:
    def pin(original: Any, ledger: Any, pages: Any) -> Any:
        return original(ledger, pages[:0] if is_off("quarantine") else pages)

    around(module.Ledger, "pin", pin)


def _seams(module: ModuleType) -> None:
    if os.environ.get(_NO_SEAMS):

        def hold(original: Any, seams: Any) -> None:
            for seam in seams:
                with contextlib.suppress(module.SeamError):
                    original([seam])

        around(module, "hold", hold)
        around(module, "check_held", lambda *_: None)


HOOKS = (
    ("sekisho.guard.sglang.admission", _admission),
    ("sekisho.guard.sglang.decode", _decode),
    ("sekisho.guard.keeper", _keeper),
    ("sekisho.core.ledger", _ledger),
    ("sekisho.guard.seams", _seams),
)
