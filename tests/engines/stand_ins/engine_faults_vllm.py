"""Faults inside a running vLLM, and the guard's own checks taken out; see `engine_switch`.

fault       parameters     what goes wrong, and the public report it is like
one_block   -              a transfer reports success with one block of many written
                           (vllm PR#50754: completion is a count, one write was only logged)
no_read     blocks         a read reports success, and nothing was read (NIXL; the same report)
late        seconds        a transfer stalls, and lands after decode has given up (vllm PR#32255)
row         victim, other, a row of the worker's block table leads into a neighbour's block;
            page           requests are told by the length of their prompts (vllm#39146)
scopeless   role           the prefix cache of one role ignores the salt (vllm#44701)
alien       length         blocks of an earlier request are sent (vllm#52360)

check       what is gone
admission   decode does not compare the manifest with its prompt
arrival     headers that a transfer brought are not compared
rows        the block table is not compared with what was vouched for
release     headers are not looked at again before a step's tokens leave
prefix      blocks of the prefix cache are not asked whose they are
quarantine  blocks that a writer may still reach are used again (`engine_checks`)
"""

import dataclasses
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from engine_switch import ROLE, around, fault, is_off, trace

# -- prefill


def _group(original: Any, source: Any, target: Any) -> Any:
    sources, targets = original(source, target)
    if sources and fault("one_block") is not None:
        trace("one_block", blocks=sum(map(len, targets)))
        return [sources[0][:1]], [targets[0][:1]]
    return sources, targets


def _send_blocks(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    stall = fault("late")
    if stall:
        trace("stalled")
        end = time.monotonic() + stall["seconds"]
        while time.monotonic() < end and (fault("late") or fault("held")):
            time.sleep(0.1)
    out = original(worker, *args, **kwargs)
    trace("landed", status=out)
    return out


_ended: dict[int, Any] = {}


def _request_finished(original: Any, sched: Any, request: Any, block_ids: Any) -> Any:
    """Blocks of an earlier request, of ``length`` tokens, instead of this one's."""
    _ended[request.num_prompt_tokens] = block_ids
    on = fault("alien")
    if on and request.num_prompt_tokens != on["length"] and on["length"] in _ended:
        trace("alien")
        block_ids = tuple(
            list(other)[: len(own)]
            for own, other in zip(block_ids, _ended[on["length"]], strict=True)
        )
    return original(sched, request, block_ids)


def _extra_keys(original: Any, *args: Any, **kwargs: Any) -> Any:
    keys, index = original(*args, **kwargs)
    if keys and fault("scopeless", role=ROLE):
        keys = tuple(k for k in keys if not (isinstance(k, tuple) and k[0] == "cache_salt"))
    return keys or None, index


# -- decode


def _read_blocks(original: Any, worker: Any, *, read_spec: Any, **kwargs: Any) -> Any:
    """NIXL's decode reads: not at all, or the first block of each group alone; of a request with
    so many ``blocks`` to read."""
    count = sum(map(len, read_spec.local_block_ids))
    if fault("no_read", blocks=count):
        trace("no_read", blocks=count)
        worker._recving_transfers.setdefault(kwargs["request_id"], [])
        return True
    if fault("one_block", blocks=count):
        trace("one_block", blocks=count)
        first = {
            name: [group[:1] for group in getattr(read_spec, name)]
            for name in ("local_block_ids", "remote_block_ids")
        }
        read_spec = dataclasses.replace(read_spec, **first)
    return original(worker, read_spec=read_spec, **kwargs)


def _prepare_inputs(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Before the guard's own look at the same rows, which comes after vLLM's function."""
    on, batch = fault("row"), runner.input_batch
    rows = {int(batch.num_prompt_tokens[i]): i for i in range(batch.num_reqs)}
    if not on or on["victim"] not in rows or on["other"] not in rows:
        return original(runner, *args, **kwargs)
    table = batch.block_table.block_tables[0].get_numpy_array()
    victim, page = rows[on["victim"]], on["page"]
    table[victim, page] = table[rows[on["other"]], page]
    trace("row", page=page, block=int(table[victim, page]))
    return original(runner, *args, **kwargs)


def _allocate_slots(original: Any, manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(manager, request, *args, **kwargs)
    if out is not None:
        # Not those of the answer: blocks that a transfer will fill are none of them.
        blocks = list(manager.get_block_ids(request.request_id)[0])
        free = manager.block_pool.get_num_free_blocks()
        trace("handed", tokens=request.num_prompt_tokens, blocks=blocks, free=free)
    return out


def _free_blocks(original: Any, pool: Any, ordered_blocks: Any) -> Any:
    blocks = list(ordered_blocks)
    out = original(pool, blocks)
    trace("freed", blocks=[b.block_id for b in blocks], free=pool.get_num_free_blocks())
    return out


# -- the guard's checks


def _unless(check: str, instead: Any) -> Callable[..., Any]:
    def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
        return instead if is_off(check) else original(*args, **kwargs)

    return wrapper


def _any_manifest(original: Any, guard: Any, request: Any, params: Any) -> Any:
    if not is_off("admission"):
        return original(guard, request, params)
    from sekisho.guard.vllm.manifest import FIELD, open_manifest

    return open_manifest(guard._key, params.get(FIELD))


def _compare(original: Any, worker: Any, load: Any) -> Any:
    if is_off("arrival"):
        worker._must.words[load.blocks] = worker.headers.words[load.blocks] = load.own
        return ()
    return original(worker, load)


# -- where they go


def _mooncake(module: ModuleType) -> None:
    around(module, "group_concurrent_contiguous", _group)
    around(module.MooncakeConnectorWorker, "_send_blocks", _send_blocks)
    around(module.MooncakeConnectorScheduler, "request_finished", _request_finished)


def _nixl_pulls(module: ModuleType) -> None:
    around(module.NixlPullConnectorWorker, "_read_blocks", _read_blocks)


def _nixl_offers(module: ModuleType) -> None:
    around(module.NixlPullConnectorScheduler, "request_finished", _request_finished)


def _utils(module: ModuleType) -> None:
    around(module, "generate_block_hash_extra_keys", _extra_keys)


def _runner(module: ModuleType) -> None:
    around(module.GPUModelRunner, "_prepare_inputs", _prepare_inputs)


def _manager(module: ModuleType) -> None:
    around(module.KVCacheManager, "allocate_slots", _allocate_slots)


def _pool(module: ModuleType) -> None:
    around(module.BlockPool, "free_blocks", _free_blocks)


def _guard_admission(module: ModuleType) -> None:
    around(module.Admission, "_manifest", _any_manifest)


def _guard_worker(module: ModuleType) -> None:
    around(module.Worker, "_compare", _compare)
    around(module.Worker, "check_rows", _unless("rows", None))
    around(module.Worker, "_check_headers", _unless("release", None))


def _guard_rows(module: ModuleType) -> None:
    around(module.Rows, "wrong_prefix", _unless("prefix", ()))


HOOKS = (
    ("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector", _mooncake),
    ("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker", _nixl_pulls),
    ("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler", _nixl_offers),
    ("vllm.v1.core.kv_cache_utils", _utils),
    ("vllm.v1.worker.gpu_model_runner", _runner),
    ("vllm.v1.core.kv_cache_manager", _manager),
    ("vllm.v1.core.block_pool", _pool),
    ("sekisho.guard.vllm.admission", _guard_admission),
    ("sekisho.guard.vllm.worker", _guard_worker),
    ("sekisho.guard.vllm.rows", _guard_rows),
)
