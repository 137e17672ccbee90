"""vLLM loads this through its entry point ``vllm.general_plugins``, in every process.

``SEKISHO_GUARD=on`` says that no engine may start without the guard; then a connector that is not
the guard's, a missing key or an unknown version ends the process with one line. vLLM only logs a
plugin that raises, so nothing here raises. The guard itself is the connector, plugin or not.
"""

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "SEKISHO_GUARD"
CONNECTOR = "SekishoConnector"


def load() -> None:
    """Make sure of the above, or end the process."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted in ("", "off"):
        return
    from sekisho.guard.seams import SeamError
    from sekisho.guard.vllm import start
    from sekisho.guard.vllm.manifest import KeyMissingError

    if wanted != "on":
        start.end(f"{VARIABLE} is {wanted!r}, and must be on or off")
    try:
        _hold()
    except (KeyMissingError, SeamError) as error:
        start.end(str(error))
    except BaseException as error:  # whatever it is, no engine without its guard
        start.end(f"{type(error).__name__}: {error}" if str(error) else repr(error))


def _hold() -> None:
    from sekisho.guard.vllm import start
    from sekisho.guard.vllm.holds import hold_once
    from sekisho.guard.vllm.manifest import load_key

    start.check_version()
    load_key()
    hold_once(seams())
    _count_a_cpu()


def _count_a_cpu() -> None:
    """vLLM's Mooncake connector asks torch which accelerator this process has, and on a CPU torch
    only raises; vLLM's own workers count the CPU as device 0."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        torch.accelerator.__dict__["current_device_index"] = lambda: 0


def seams() -> tuple[Any, ...]:
    """Where this plugin holds on to vLLM."""
    from sekisho.guard.seams import Seam

    place = "vllm.v1.core.sched.scheduler:Scheduler.__init__"
    return (Seam(place, ("self", "vllm_config"), _scheduler_init),)


def _scheduler_init(original: Callable[..., Any], sched: Any, *args: Any, **kwargs: Any) -> Any:
    from sekisho.guard.vllm import scheduler, start

    out = original(sched, *args, **kwargs)
    if type(sched.connector).__name__ != CONNECTOR or scheduler.active() is None:
        start.end(f"{VARIABLE} is on, and kv_transfer_config does not name {CONNECTOR}")
    return out
