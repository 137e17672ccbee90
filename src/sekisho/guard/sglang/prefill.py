"""The prefill role: what a row attends to is of its scope, what is sent says what it is.

before a forward pass   every prefix page in the row carries this scope's digest of its text
after it                the pages that it filled get their headers
`send_kv_chunk`         headers and pins of the source pages are taken along
a failed or refused request sends nothing, and decode is told at once
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sekisho.core.errors import Evidence, LocalOwnershipError
from sekisho.core.ledger import Pages
from sekisho.guard.seams import Seam
from sekisho.guard.sglang import pages
from sekisho.guard.sglang.state import State, active
from sekisho.guard.sglang.transfers import Note, Transfers

Original = Callable[..., Any]
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_CONN = "sglang.srt.disaggregation.mooncake.conn"
_KV_FAILED = 0  # KVPoll.Failed


class Prefill(State):
    """A prefill scheduler under guard. ``sending``: the request whose chunk is being queued.
    ``refused``: rooms of requests that ended before their grant came, and why."""

    transfers: Transfers
    sending: Any = None
    refused: dict[int, str]

    def refuse(self, manager: Any, room: int, reason: str) -> None:
        """Tell every decode rank of ``room``, now or when it asks, that nothing will come."""
        self.refused[room] = reason
        while len(self.refused) > 4096:
            del self.refused[next(iter(self.refused))]
        for info in list((manager.transfer_infos.get(room) or {}).values()):
            send_failed(manager, info.endpoint, info.dst_port, room)


def send_failed(manager: Any, host: str, port: int, room: int) -> None:
    """SGLang's own message that a room has failed."""
    rank = manager.attn_tp_rank
    send_frames(manager, host, port, [str(n).encode() for n in (room, _KV_FAILED, rank)])


def send_frames(manager: Any, host: str, port: int, frames: list[bytes]) -> None:
    """Over SGLang's own connection to a decode server."""
    from sglang.srt.utils.network import NetworkAddress

    address = NetworkAddress(host, port)
    manager._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)


def _prefilling() -> Prefill | None:
    state = active()
    return state if isinstance(state, Prefill) else None


def _run_batch(original: Original, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    state = _prefilling()
    if state is None or not batch.forward_mode.is_extend():
        return original(scheduler, batch, *args, **kwargs)
    rows = check_rows(state, batch)
    out = original(scheduler, batch, *args, **kwargs)
    for req, row, start, count in zip(
        batch.reqs, rows, batch.prefix_lens, batch.extend_lens, strict=True
    ):
        holding = state.holding(req)
        if not holding.doomed:
            first = start // state.page_size
            tokens = req.origin_input_ids[: start + count]
            state.keeper.wrote(holding, tokens, first, row[first:])
    return out


def check_rows(state: Prefill, batch: Any) -> list[Pages]:
    """Before the forward pass: prefix pages by scope and text, new pages by who got them."""
    state.report.step()
    rows, begin = state.rows_of(batch), 0
    for req, row, start, count in zip(
        batch.reqs, rows, batch.prefix_lens, batch.extend_lens, strict=True
    ):
        holding = state.holding(req)
        shared = state.keeper.layout.pages_for(start)
        evidence = state.keeper.foreign(holding, req.origin_input_ids[:start], row[:shared])
        fresh = np.array(holding.fresh, np.intp)
        if not np.array_equal(fresh, row[shared:]):
            found = [state.keeper.owner(int(page)) for page in row[shared:][:4]]
            evidence += (Evidence("row", 0, -1, f"pages {fresh.tolist()[:4]}", "; ".join(found)),)
        if evidence:
            state.doom(req, evidence, "step")
            # Its pages stay out of the shared tree, and its writes out of other pages.
            req.skip_radix_cache_insert = True
            state.repair(req, fresh, shared)
            batch.out_cache_loc[begin : begin + count] = 0
        begin += count
    return rows


def _send_kv_chunk(original: Original, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    state = _prefilling()
    if state is None:
        return original(scheduler, req, *args, **kwargs)
    doomed = state.holding(req).doomed
    if doomed:
        if req.disagg_kv_sender.conclude_state is None:
            req.disagg_kv_sender.abort()
        return None
    state.sending = req
    try:
        return original(scheduler, req, *args, **kwargs)
    finally:
        state.sending = None


def _sender_abort(original: Original, sender: Any) -> Any:
    """SGLang fails the room here, and leaves decode to its time-out."""
    state = _prefilling()
    out = original(sender)
    if state is not None:
        state.refuse(sender.kv_mgr, sender.bootstrap_room, "aborted on prefill")
    return out


def _inflight(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    state = _prefilling()
    if state is not None:
        pages.put_back(state, state.transfers.settle_done())
    return original(scheduler, *args, **kwargs)


def queue_class(plain: type) -> type:
    """SGLang's queue of chunks, with the guard at both ends."""

    class GuardedQueue(plain):  # type: ignore[misc]
        def put(self, chunk: Any) -> None:
            state = _prefilling()
            if state is not None and chunk is not None and not hasattr(chunk, "sekisho"):
                chunk.sekisho = _note(state, chunk)
            super().put(chunk)

        def get(self) -> Any:
            state = _prefilling()
            if state is not None and state.transfers.here.note is not None:
                state.transfers.finished(state.transfers.here.note)
                state.transfers.here.note = None
            chunk = super().get()
            if state is None:
                state = _prefilling()
            if state is not None and chunk is not None:
                state.transfers.here.note = getattr(chunk, "sekisho", None)
            return chunk

    return GuardedQueue


def _note(state: Prefill, chunk: Any) -> Note | None:
    """Of the pages that the worker will read, whatever the row says: their headers go along."""
    req = state.sending
    if req is None or req.bootstrap_room != chunk.room:
        return None
    copied = getattr(chunk, "indices_event", None)
    if copied is not None:  # on a GPU the numbers of the pages are still on their way to the host
        copied.synchronize()
    source = np.asarray(chunk.prefill_kv_indices, np.intp)
    try:
        note = state.transfers.snapshot(chunk.room, source)
    except LocalOwnershipError as error:  # nothing is sent for it, and decode finds no header
        state.doom(req, [Evidence("row", 0, -1, str(error), str(source.tolist()[:8]))], "send")
        return None
    state.transfers.queued(note)
    return note


def _send_kvcache(
    original: Original,
    manager: Any,
    session: str,
    source: Any,
    pointers: Any,
    destination: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """In a worker thread: the chunk's pages, and in the same batch, last, their headers.

    Without a lease nothing is written: decode finds no header, and fails the request.
    """
    state = _prefilling()
    if state is None:
        return original(manager, session, source, pointers, destination, *args, **kwargs)
    here, transfers = state.transfers.here, state.transfers
    lease = None if here.note is None else transfers.lease(here.note.room, session)
    peer = transfers.peers.get(session)
    if here.note is None or lease is None or peer is None:
        return 0
    here.blocks = transfers.headers_for(
        manager, here.note, lease, peer, np.asarray(destination, np.intp)
    )
    status = original(manager, session, source, pointers, destination, *args, **kwargs)
    if status == 0 and here.blocks:  # the payload went in batches of other threads
        blocks, here.blocks = here.blocks, []
        status = manager._transfer_data(session, blocks)
    here.blocks = []
    return status


def _transfer_data(original: Original, manager: Any, session: str, blocks: Any) -> Any:
    state = _prefilling()
    if state is not None and state.transfers.here.blocks:
        blocks = [*blocks, *state.transfers.here.blocks]
        state.transfers.here.blocks = []
    return original(manager, session, blocks)


SEAMS = (
    Seam(f"{_SCHEDULER}.run_batch", ("self", "batch"), _run_batch),
    Seam(f"{_SCHEDULER}.send_kv_chunk", ("self", "req", "last_chunk", "end_idx"), _send_kv_chunk),
    Seam(f"{_SCHEDULER}.process_disagg_prefill_inflight_queue", ("self",), _inflight),
    Seam(f"{_CONN}:MooncakeKVSender.abort", ("self",), _sender_abort),
    Seam(
        f"{_CONN}:MooncakeKVManager.send_kvcache",
        ("self", "mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices"),
        _send_kvcache,
    ),
    Seam(
        f"{_CONN}:MooncakeKVManager._transfer_data",
        ("self", "mooncake_session_id", "transfer_blocks"),
        _transfer_data,
    ),
)
