"""Faults inside SGLang's own code, below the guard, each as a public report tells it.

    fault           report              what happens
    page_unwritten  TRT-LLM PR#19545    a transfer succeeds, one page and its header never arrive
    pages_swapped   TRT-LLM PR#19545    two pages arrive in each other's place
    other_pages     vllm#52360          a page of another request is sent, under the right count
    placeholder     sglang#30233        prefill keeps one token of the prompt, and sends one page
    cut_short       vllm#41838          prefill fills its last page less far than decode expects
    stalled         sglang PR#32564     a transfer goes on for seconds after everybody gave up
    stray           sglang PR#35049     one request's write lands in a page of a running neighbour
    row             mini-sglang PR#142  a row of decode's table leads to a neighbour's page
    scopeless       sglang#37160        the prefix cache forgets whose a prefix is
    double_free     sglang PR#30937     pages are given back twice
    abort_lost      sglang PR#35965     prefill never hears that decode gave up

Also the trace that the incident's test reads: reserved, sent, committed, previous owners.
"""

import threading
import time
from array import array
from types import ModuleType
from typing import Any

import numpy as np
from engine_switch import ROLE, around, fault, trace

Blocks = list[tuple[int, int, int]]
Region = tuple[int, int]
_HEADER_BYTES = 64

_here = threading.local()  # ``chunk``: what this transfer thread works on
_sent: dict[int, dict[int, int]] = {}  # source pages by room and ordinal
_granted: dict[int, Any] = {}  # destination pages by room
_managers: list[Any] = []
_owners: dict[int, str] = {}
_rows: list[tuple[Any, int, int, Any]] = []


# -- prefill: what is sent


def _regions(manager: Any, session: str, page: int) -> list[Region]:
    """Address and bytes of everything that decode keeps for ``page``, its header last."""
    pointers = manager.decode_kv_args_table[session].dst_kv_ptrs
    sizes = manager.kv_args.kv_item_lens
    found = [(int(p) + page * n, int(n)) for p, n in zip(pointers, sizes, strict=True)]
    peer = _peer(session)
    if peer is not None:
        found.append((peer.address + page * _HEADER_BYTES, _HEADER_BYTES))
    return found


def _peer(session: str) -> Any:
    try:
        from sekisho.guard.sglang.state import active
    except ImportError:
        return None
    state: Any = active()
    return None if state is None else state.transfers.peers.get(session)


def _without(blocks: Blocks, holes: list[Region]) -> Blocks:
    """``blocks`` less what they would write into ``holes``."""
    out: Blocks = []
    for source, destination, size in blocks:
        at, end = destination, destination + size
        for hole, hole_size in sorted(holes):
            if at <= hole and hole + hole_size <= end:
                if hole > at:
                    out.append((source + at - destination, at, hole - at))
                at = hole + hole_size
        if at < end:
            out.append((source + at - destination, at, end - at))
    return out


def _crossed(blocks: Blocks, origins: list[Region], targets: list[Region]) -> Blocks:
    """What is written to ``origins`` is written to ``targets`` instead."""
    out: Blocks = []
    for (origin, size), (target, _) in zip(origins, targets, strict=True):
        for source, destination, length in blocks:
            if destination <= origin < destination + length:
                out.append((source + origin - destination, target, size))
    return out


def _transfer_data(original: Any, manager: Any, session: str, blocks: Any) -> Any:
    chunk = getattr(_here, "chunk", None)
    if chunk is None or not blocks or not getattr(_here, "pages", False):
        return original(manager, session, blocks)
    room = chunk.room
    info = manager.transfer_infos.get(room, {}).get(session)
    if info is not None:
        _granted[room] = np.asarray(info.dst_kv_indices).copy()
    pages = _granted[room]
    blocks = list(blocks)
    if on := fault("page_unwritten", room=room):
        blocks = _without(blocks, _regions(manager, session, int(pages[on["page"]])))
    if on := fault("pages_swapped", room=room):
        one, two = (_regions(manager, session, int(pages[i])) for i in on["pages"])
        crossed = _crossed(blocks, one, two) + _crossed(blocks, two, one)
        blocks = _without(blocks, one + two) + crossed
    if (on := fault("stray", room=room)) and on["victim"] in _granted:
        own = _regions(manager, session, int(pages[on["page"]]))
        foreign = int(_granted[on["victim"]][on["page"]])
        blocks += _crossed(blocks, own, _regions(manager, session, foreign))
        trace("stray", room=room, page=foreign)
    if on := fault("stalled", room=room):
        trace("stalling", room=room, pages=pages.tolist())
        time.sleep(on["seconds"])
    status = original(manager, session, blocks)
    trace("sent", room=room, pages=len(chunk.prefill_kv_indices), status=status)
    return status


def _send_kvcache(original: Any, *args: Any, **kwargs: Any) -> Any:
    """The metadata slot goes through `_transfer_data` too; the faults are about pages."""
    _here.pages = True
    try:
        return original(*args, **kwargs)
    finally:
        _here.pages = False


def _get(original: Any, queue: Any) -> Any:
    chunk = original(queue)
    if hasattr(chunk, "room"):
        _here.chunk = chunk
    return chunk


def _put(original: Any, queue: Any, chunk: Any) -> Any:
    """A stalled chunk gets a thread that nobody else waits for, as on another prefill server."""
    if fault("stalled", room=getattr(chunk, "room", None)) and _managers:
        queues = _managers[-1].transfer_queues
        places = [i for i, one in enumerate(queues) if one is queue]
        if places:
            queue = queues[(places[0] + 1) % len(queues)]
    return original(queue, chunk)


def _add_transfer_request(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    if manager not in _managers:
        _managers.append(manager)
    return original(manager, *args, **kwargs)


def _send(original: Any, sender: Any, kv_indices: Any, *args: Any, **kwargs: Any) -> Any:
    room, first = sender.bootstrap_room, int(sender.curr_idx)
    kv_indices = np.array(kv_indices)
    if on := fault("other_pages", room=room):
        source = _sent.get(on["other"], {}).get(on["page"])
        at = on["page"] - first
        if source is not None and 0 <= at < len(kv_indices):
            kv_indices[at] = source
            trace("other_pages", room=room, page=source)
    _sent.setdefault(room, {}).update(enumerate(kv_indices.tolist(), first))
    return original(sender, kv_indices, *args, **kwargs)


def _send_abort(original: Any, receiver: Any, *args: Any, **kwargs: Any) -> Any:
    if fault("abort_lost", room=receiver.bootstrap_room):
        trace("abort_lost", room=receiver.bootstrap_room)
        return None
    return original(receiver, *args, **kwargs)


# -- both: what is asked, and what the prefix cache says


def _add_request(original: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    if ROLE == "prefill":
        tokens = req.origin_input_ids
        if fault("placeholder", rid=req.rid):
            req.origin_input_ids = array("q", tokens[:1])
        if on := fault("cut_short", rid=req.rid):
            req.origin_input_ids = array("q", tokens[: len(tokens) - on["tokens"]])
    return original(scheduler, req, *args, **kwargs)


def _radix_key(
    original: Any, key: Any, token_ids: Any, extra_key: Any = None, *args: Any, **kwargs: Any
) -> None:
    forgotten = fault("scopeless") is not None
    original(key, token_ids, None if forgotten else extra_key, *args, **kwargs)


# -- decode: reserve, table, free


def _pages(pool: Any, req: Any, count: int, size: int) -> list[int]:
    cells = pool.req_to_token[req.kv.req_pool_idx, 0:count:size]
    return [int(page) for page in (cells // size).tolist()]


def _pre_alloc(original: Any, queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(queue, req, *args, **kwargs)
    size = queue.token_to_kv_pool_allocator.page_size
    length = len(req.origin_input_ids)
    pages = _pages(queue.req_to_token_pool, req, length, size)
    before = [_owners.get(page, "") for page in pages]
    _owners.update(dict.fromkeys(pages, str(req.rid)))
    room = req.bootstrap_room
    trace("reserved", rid=req.rid, room=room, tokens=length, pages=pages, before=before)
    return out


def _commit(original: Any, queue: Any, decode_req: Any) -> Any:
    trace("committed", rid=decode_req.req.rid, room=decode_req.req.bootstrap_room)
    return original(queue, decode_req)


def _prepare_for_decode(original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(batch, *args, **kwargs)
    size = batch.token_to_kv_pool_allocator.page_size
    pool = batch.req_to_token_pool
    by_rid = {str(req.rid): req for req in batch.reqs}
    for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        last = int(pool.req_to_token[req.kv.req_pool_idx, length - 1]) // size
        _owners[last] = str(req.rid)
    if (on := fault("row")) and on["rid"] in by_rid and on["other"] in by_rid:
        victim, other = (by_rid[on[key]].kv.req_pool_idx for key in ("rid", "other"))
        cells = slice(on["page"] * size, (on["page"] + 1) * size)
        _rows.append((pool, victim, on["page"] * size, pool.req_to_token[victim, cells].clone()))
        pool.req_to_token[victim, cells] = pool.req_to_token[other, cells]
        trace("row", rid=on["rid"], page=on["page"])
    return out


def _process_batch_result(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The step is over: the row is right again, so that its end frees its own pages."""
    while _rows:
        pool, row, start, cells = _rows.pop()
        pool.req_to_token[row, start : start + len(cells)] = cells
    return original(scheduler, *args, **kwargs)


def _free(original: Any, allocator: Any, cells: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(allocator, cells, *args, **kwargs)
    if cells.numel() and fault("double_free", role=ROLE):
        original(allocator, cells, *args, **kwargs)
        trace("double_free", cells=cells.numel())
    return out


# -- what a test may ask


def _get_internal_state(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """``/server_info`` also says how SGLang's pool and the guard's ledger add up."""
    out = original(scheduler, *args, **kwargs)
    allocator, size = scheduler.token_to_kv_pool_allocator, scheduler.page_size
    lists = allocator.free_pages.tolist()
    if hasattr(allocator, "staged_pages"):  # as 0.5.23 calls what waits to be sorted in
        lists += [page for part in allocator.staged_pages for page in part.tolist()]
    else:
        lists += allocator.release_pages.tolist()
    out.internal_state["pool"] = {
        "pages": allocator.num_pages,
        "free": len(lists),
        "free_twice": len(lists) - len(set(lists)),
        "cached": int(scheduler.tree_cache.evictable_size()) // size,
        **_ledger(),
    }
    return out


def _ledger() -> dict[str, Any]:
    try:
        from sekisho.guard.sglang.state import active
    except ImportError:
        return {}
    state: Any = active()
    if state is None:
        return {}
    state.keeper.ledger.check_integrity()
    return {"ledger": state.keeper.ledger.counts()}


# -- where they go


def _conn(module: ModuleType) -> None:
    manager = module.MooncakeKVManager
    around(manager, "_transfer_data", _transfer_data)
    around(manager, "send_kvcache", _send_kvcache)
    around(manager, "add_transfer_request", _add_transfer_request)
    around(getattr(module, "MooncakeKVSender", None), "send", _send)
    around(module.FastQueue, "get", _get)
    around(module.FastQueue, "put", _put)


def _common_conn(module: ModuleType) -> None:
    around(module.CommonKVReceiver, "_send_abort_notification", _send_abort)


def _scheduler(module: ModuleType) -> None:
    around(module.Scheduler, "_add_request_to_queue", _add_request)
    around(module.Scheduler, "process_batch_result", _process_batch_result)
    around(module.Scheduler, "get_internal_state", _get_internal_state)


def _decode(module: ModuleType) -> None:
    around(module.DecodePreallocQueue, "_pre_alloc", _pre_alloc)
    around(module.DecodeTransferQueue, "_commit_transfer_to_req", _commit)


def _schedule_batch(module: ModuleType) -> None:
    around(module.ScheduleBatch, "prepare_for_decode", _prepare_for_decode)


def _radix(module: ModuleType) -> None:
    around(module.RadixKey, "__init__", _radix_key)


def _allocator(module: ModuleType) -> None:
    around(module.PagedTokenToKVPoolAllocator, "free", _free)
    around(module.PagedTokenToKVPoolAllocator, "free_segment", _free)


HOOKS = (
    ("sglang.srt.disaggregation.mooncake.conn", _conn),
    ("sglang.srt.disaggregation.common.conn", _common_conn),
    ("sglang.srt.managers.scheduler", _scheduler),
    ("sglang.srt.disaggregation.decode", _decode),
    ("sglang.srt.managers.schedule_batch", _schedule_batch),
    ("sglang.srt.mem_cache.radix_cache", _radix),
    ("sglang.srt.mem_cache.allocator.paged", _allocator),
)
