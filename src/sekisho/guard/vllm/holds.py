"""Where the guard holds on to vLLM beyond the connector's own methods.

allocate_slots · get_new_blocks · touch · free_blocks · free    who holds which block
_prepare_inputs                                                  what attention is given
update_from_output · _handle_failed_recving                      a failing request fails alone
"""

from collections.abc import Callable, Iterable
from typing import Any

from sekisho.guard.seams import Seam, SeamError, check_held, hold, original_of
from sekisho.guard.vllm import scheduler, worker
from sekisho.guard.vllm.admission import scope_of
from sekisho.guard.vllm.messages import StepMeta, WorkerMeta

Original = Callable[..., Any]
_POOL = "vllm.v1.core.block_pool:BlockPool"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_FREE = f"{_POOL}.free_blocks"


def hold_once(seams: Iterable[Seam]) -> None:
    """Hold what is not held yet: a process may make its connector more than once.

    Raises:
        SeamError: vLLM is not as the guard knows it.
    """
    for seam in seams:
        try:
            check_held([seam])
        except SeamError:
            hold([seam])
            check_held([seam])


def really_free(pool: Any, blocks: list[Any]) -> None:
    """Blocks whose last writer has ended: the pool may have them at last."""
    if blocks:
        original_of(_FREE)(pool, blocks)


def _allocate_slots(
    original: Original, manager: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    guard = scheduler.active()
    if guard is None:
        return original(manager, request, *args, **kwargs)
    guard.put_back()
    with guard.rows.handing(request, scope_of(request)):
        return original(manager, request, *args, **kwargs)


def _get_new_blocks(original: Original, pool: Any, num_blocks: int) -> Any:
    guard, out = scheduler.active(), original(pool, num_blocks)
    if guard is not None:
        guard.rows.handed(out)
    return out


def _touch(original: Original, pool: Any, blocks: Any) -> Any:
    guard = scheduler.active()
    if guard is not None:
        guard.rows.touched(blocks)
    return original(pool, blocks)


def _free_blocks(original: Original, pool: Any, ordered_blocks: Any) -> Any:
    guard = scheduler.active()
    if guard is None:
        return original(pool, ordered_blocks)
    told = guard.rows.given_back(list(ordered_blocks))
    guard.report.quarantined(guard.keeper.quarantined())
    return original(pool, told)


def _free(original: Original, manager: Any, request: Any) -> Any:
    """Also `pop_blocks_for_free`: this request's row is no more; its blocks come back on their
    own way."""
    guard = scheduler.active()
    if guard is not None:
        guard.rows.forget(request.request_id)
    return original(manager, request)


def _update_from_output(
    original: Original, sched: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """Failing requests join the ones whose load failed: vLLM drops their token and ends them."""
    guard = scheduler.active()
    if guard is None:
        return original(sched, scheduler_output, model_runner_output)
    from copy import copy

    from vllm.v1.outputs import KVConnectorOutput

    said = model_runner_output.kv_connector_output
    meta = None if said is None else said.kv_connector_worker_meta
    guard.heard(meta if isinstance(meta, WorkerMeta) else None)
    failing = guard.fails_now(sched.requests)
    if failing:
        said = KVConnectorOutput() if said is None else copy(said)
        said.failed_recving = set(said.failed_recving) | failing
        model_runner_output = copy(model_runner_output)  # vLLM shares an empty one
        model_runner_output.kv_connector_output = said
    return original(sched, scheduler_output, model_runner_output)


def _handle_failed_recving(original: Original, sched: Any, failed_req_ids: set[str]) -> set[str]:
    """vLLM fails only those that wait for a load; the guard's fail wherever they are."""
    guard = scheduler.active()
    out: set[str] = original(sched, failed_req_ids)
    if guard is None:
        return out
    failing = guard.fails_now(sched.requests)
    distrusted = guard.distrusted(failing)
    if distrusted:
        sched.kv_cache_manager.evict_blocks(distrusted)
    return out | failing


def _prepare_inputs(
    original: Original, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    guard = worker.active()
    out = original(runner, scheduler_output, *args, **kwargs)
    meta = scheduler_output.kv_connector_metadata
    if guard is not None and isinstance(meta, StepMeta):
        guard.check_rows(meta, runner)
    return out


SCHEDULER_SEAMS = (
    Seam(f"{_MANAGER}.allocate_slots", ("self", "request", "num_new_tokens"), _allocate_slots),
    Seam(f"{_MANAGER}.free", ("self", "request"), _free),
    Seam(f"{_MANAGER}.pop_blocks_for_free", ("self", "request"), _free),
    Seam(f"{_POOL}.get_new_blocks", ("self", "num_blocks"), _get_new_blocks),
    Seam(f"{_POOL}.touch", ("self", "blocks"), _touch),
    Seam(_FREE, ("self", "ordered_blocks"), _free_blocks),
    Seam(
        f"{_SCHEDULER}.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        _update_from_output,
    ),
    Seam(
        f"{_SCHEDULER}._handle_failed_recving", ("self", "failed_req_ids"), _handle_failed_recving
    ),
)

WORKER_SEAMS = (
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
        ("self", "scheduler_output", "num_scheduled_tokens"),
        _prepare_inputs,
    ),
)
