"""The decode role: reserve under a lease, commit what the headers prove, check every step.

reserve      `_pre_alloc`          pages become the lease's
grant        `send_metadata`       headers blanked, pages pinned for the writer, lease sent
commit       `_commit_transfer…`   every header as expected, else 500 and nothing is committed
step         `run_batch`           what is attended to is what was vouched for
release      `process_batch_result`  headers once more; then the step's tokens may leave
end          row freed             pages back, or quarantined until the writer is done
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sekisho.core.errors import Evidence, LocalOwnershipError
from sekisho.core.ledger import Pages
from sekisho.guard.keeper import Holding
from sekisho.guard.seams import Seam
from sekisho.guard.sglang.grants import Grants
from sekisho.guard.sglang.state import FAILED, State, active

Original = Callable[..., Any]
Found = dict[int, tuple[Evidence, ...]]
_DECODE = "sglang.srt.disaggregation.decode"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"


class Decode(State):
    """A decode scheduler under guard. ``grants``: what prefill may still write."""

    grants: Grants
    reserving: Any = None

    def agree(self, found: Found, count: int) -> Found:
        """What any tensor-parallel rank found among ``count`` requests: all must fail the same,
        or they run apart. Every rank asks in the same order."""
        group = self.scheduler.disagg_decode_transfer_queue.gloo_group
        if torch.distributed.get_world_size(group) == 1:
            return found
        wrong = torch.zeros(count, dtype=torch.uint8)
        wrong[list(found)] = 1
        torch.distributed.all_reduce(wrong, torch.distributed.ReduceOp.MAX, group=group)
        elsewhere = (Evidence("peer", 0, -1, "every rank agrees", "another rank does not"),)
        return {int(i): found.get(int(i), elsewhere) for i in torch.nonzero(wrong)}

    def keep(self, req: Any, written: int) -> None:
        """Vouch for the pages that decode itself fills; ``written`` tokens have their KV."""
        holding = self.holding(req)
        if holding.fresh:
            try:
                self.keeper.keep(holding, (req.origin_input_ids + req.output_ids)[:written])
            except LocalOwnershipError as error:
                self.doom(req, [Evidence("reserve", 0, -1, str(error), "-")], "growth")

    def scrub(self, pages: Pages) -> None:
        """Erase the payload of pages that no transfer will fill (SGLang's fake transfers)."""
        cells = torch.as_tensor(pages).reshape(-1, 1) * self.page_size
        cells = (cells + torch.arange(self.page_size)).reshape(-1).to(self.allocator.device)
        pool = self.allocator.get_kvcache()
        for name in ("k_buffer", "v_buffer", "kv_buffer"):
            for layer in getattr(pool, name, None) or ():
                layer[cells] = 0


def _decoding() -> Decode | None:
    state = active()
    return state if isinstance(state, Decode) else None


def _pre_alloc(original: Original, queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    state = _decoding()
    if state is None:
        return original(queue, req, *args, **kwargs)
    with state.handing([req]):
        out = original(queue, req, *args, **kwargs)
    state.reserving = req
    return out


def _send_metadata(
    original: Original, receiver: Any, kv_indices: Any, *args: Any, **kwargs: Any
) -> Any:
    """Prefill is told where to write: from here on the pages have a writer."""
    state = _decoding()
    req = None if state is None else state.reserving
    if state is None or req is None or req.bootstrap_room != receiver.bootstrap_room:
        return original(receiver, kv_indices, *args, **kwargs)
    state.reserving = None
    holding = state.holding(req)
    try:
        state.keeper.expect(holding, req.origin_input_ids)
        if not np.array_equal(np.asarray(kv_indices), holding.table.pages):
            found = str(np.asarray(kv_indices).tolist()[:16])
            raise LocalOwnershipError(f"destination is {found}, reserved are others")
        aux = args[0] if args else kwargs.get("aux_index")
        state.grants.open(receiver, holding, aux)
    except LocalOwnershipError as error:
        state.doom(req, [Evidence("reserve", 0, -1, str(error), "-")], "reserve")
        receiver.abort()
        return None
    return original(receiver, kv_indices, *args, **kwargs)


def _commit(original: Original, queue: Any, decode_req: Any) -> Any:
    state = _decoding()
    if state is None:
        return original(queue, decode_req)
    req = decode_req.req
    holding = state.holding(req)
    arrived = _arrived(state, req, holding)
    found = state.agree({0: arrived} if arrived else {}, 1)
    if not found:
        state.grants.settle(req.bootstrap_room)
        state.report.commit()
        return original(queue, decode_req)
    state.doom(req, found[0], "commit")
    _abort(req, holding.doomed)
    decode_req.kv_receiver.clear()
    decode_req.kv_receiver = None
    return None


def _arrived(state: Decode, req: Any, holding: Holding) -> tuple[Evidence, ...]:
    """Why what arrived is not this request's prompt, whole; empty if it is."""
    if holding.doomed:
        return (Evidence("reserve", 0, -1, holding.doomed, "-"),)
    if holding.fresh:  # SGLang's fake transfer (health checks, warm-up): nothing ever arrives
        state.scrub(np.array(holding.fresh, np.intp))
        state.keeper.keep(holding, req.origin_input_ids)
        return ()
    evidence = state.keeper.misdirected(holding, state.row(req, len(req.origin_input_ids)))
    if evidence:
        state.repair(req, holding.table.pages)
        return evidence
    return state.keeper.verify([holding]).get(0, ())


def _abort(req: Any, message: str) -> None:
    from sglang.srt.disaggregation.utils import prepare_abort

    prepare_abort(req, message, status_code=FAILED)


def _prepare_for_decode(original: Original, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Every request gets the slot of its next token, some of them a page with it."""
    state = _decoding()
    if state is None:
        return original(batch, *args, **kwargs)
    with state.handing(batch.reqs):
        out = original(batch, *args, **kwargs)
    for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        state.keep(req, length - 1)
    return out


def _run_batch(original: Original, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    state = _decoding()
    if state is not None and batch.forward_mode.is_decode():
        check_rows(state, batch)
    return original(scheduler, batch, *args, **kwargs)


def check_rows(state: Decode, batch: Any) -> None:
    """Before the forward pass: a request whose row leads elsewhere writes into the slot that
    SGLang keeps for padding, and loses this step's token; its neighbours lose nothing."""
    state.report.step()
    found: Found = {}
    for i, (req, row) in enumerate(zip(batch.reqs, state.rows_of(batch), strict=True)):
        evidence = state.keeper.misdirected(state.holding(req), row)
        if evidence:
            found[i] = evidence
    for i, evidence in state.agree(found, len(batch.reqs)).items():
        state.doom(batch.reqs[i], evidence, "step")
        state.repair(batch.reqs[i], state.holding(batch.reqs[i]).table.pages)
        batch.out_cache_loc[i] = 0


def _process_batch_result(
    original: Original, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """After the forward pass, before any token of it leaves: every header, once more."""
    state = _decoding()
    if state is not None and batch.forward_mode.is_decode():
        reqs = [r for r in batch.reqs if not r.finished() and r.kv.req_pool_idx is not None]
        found = state.keeper.verify([state.holding(r) for r in reqs])
        for i, evidence in state.agree(found, len(reqs)).items():
            state.doom(reqs[i], evidence, "release")
    return original(scheduler, batch, *args, **kwargs)


def _update_finish_state(original: Original, req: Any, new_accepted_len: int = 1) -> Any:
    state = _decoding()
    row = None if state is None else req.kv.req_pool_idx
    if state is None or row is None or req.finished() or not state.holding(req).doomed:
        return original(req, new_accepted_len)
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    del req.output_ids[len(req.output_ids) - new_accepted_len :]
    req.finished_reason = FINISH_ABORT(state.holding(req).doomed, FAILED, "InternalServerError")
    req.to_finish = None
    return None


def _free_row(original: Original, pool: Any, req: Any) -> Any:
    state = active()
    row = req.kv.req_pool_idx
    out = original(pool, req)
    if state is not None and row is not None:
        holding = state.row_freed(row)
        if holding is not None and isinstance(state, Decode):
            state.grants.abandon(holding)
    return out


def _process_decode_queue(original: Original, scheduler: Any) -> Any:
    state = _decoding()
    if state is not None:
        state.grants.tick()
    return original(scheduler)


def _free_slot(original: Original, slots: Any, free_index: int) -> Any:
    """A metadata slot, too, waits for whoever may still write it."""
    state = _decoding()
    if state is not None and state.grants.holds_slot(slots, free_index):
        return None
    return original(slots, free_index)


SEAMS = (
    Seam(f"{_DECODE}:DecodePreallocQueue._pre_alloc", ("self", "req"), _pre_alloc),
    Seam(
        "sglang.srt.disaggregation.mooncake.conn:MooncakeKVReceiver.send_metadata",
        ("self", "kv_indices", "aux_index"),
        _send_metadata,
    ),
    Seam(f"{_DECODE}:DecodeTransferQueue._commit_transfer_to_req", ("self", "decode_req"), _commit),
    Seam(
        "sglang.srt.managers.schedule_batch:ScheduleBatch.prepare_for_decode",
        ("self",),
        _prepare_for_decode,
    ),
    Seam(f"{_SCHEDULER}.run_batch", ("self", "batch"), _run_batch),
    Seam(f"{_SCHEDULER}.process_batch_result", ("self", "batch", "result"), _process_batch_result),
    Seam(
        "sglang.srt.managers.schedule_batch:Req.update_finish_state",
        ("self", "new_accepted_len"),
        _update_finish_state,
    ),
    Seam(f"{_DECODE}:DecodeReqToTokenPool.free", ("self", "req"), _free_row),
    Seam("sglang.srt.mem_cache.memory_pool:ReqToTokenPool.free", ("self", "req"), _free_row),
    Seam(f"{_SCHEDULER}.process_decode_queue", ("self",), _process_decode_queue),
    Seam(
        "sglang.srt.disaggregation.utils:ReqToMetadataIdxAllocator.free",
        ("self", "free_index"),
        _free_slot,
    ),
)
