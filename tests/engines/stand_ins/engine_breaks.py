"""SGLang as some other version of it might be, chosen by ``ENGINE_BREAK`` before the start.

parameter   one function that the guard holds has a parameter of another name
missing     one method is not there under its name
class       a whole class is gone
queue       the queue of chunks has no ``get``
replaced    after the guard has taken hold, something puts a function of its own in its place
version     SGLang says that it is 0.5.99
"""

import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

BREAK = os.environ.get("ENGINE_BREAK", "")
_DECODE = "sglang.srt.disaggregation.decode"
_CONN = "sglang.srt.disaggregation.mooncake.conn"


def _parameter(module: ModuleType) -> None:
    original = module.DecodeTransferQueue._commit_transfer_to_req

    def _commit_transfer_to_req(self: Any, transferred: Any) -> Any:
        return original(self, transferred)

    module.DecodeTransferQueue._commit_transfer_to_req = _commit_transfer_to_req


def _missing(module: ModuleType) -> None:
    queue = module.DecodePreallocQueue
    queue.pre_allocate = queue._pre_alloc
    del queue._pre_alloc


def _class(module: ModuleType) -> None:
    del module.MooncakeKVSender


def _queue(module: ModuleType) -> None:
    class FastQueue(list[Any]):
        put = list.append

    module.__dict__["FastQueue"] = FastQueue


def _replaced(module: ModuleType) -> None:
    hold = module.hold

    def held(seams: Any) -> None:
        hold(seams)
        from sglang.srt.managers.scheduler import Scheduler

        Scheduler.run_batch = inspect.unwrap(Scheduler.run_batch)

    module.__dict__["hold"] = held


def _version(module: ModuleType) -> None:
    module.__dict__["__version__"] = "0.5.99"


_ALL: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "parameter": (_DECODE, _parameter),
    "missing": (_DECODE, _missing),
    "class": (_CONN, _class),
    "queue": (_CONN, _queue),
    "replaced": ("sekisho.guard.seams", _replaced),
    "version": ("sglang", _version),
}
HOOKS = (_ALL[BREAK],) if BREAK else ()
