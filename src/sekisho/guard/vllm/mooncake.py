"""Mooncake under the guard: prefill writes into decode's blocks.

A write is under way from before vLLM builds its parameters until the transfer engine has said that
it is over; one that failed is under way for ever, as nobody can say.
"""

from collections.abc import Callable
from typing import Any

from sekisho.core.page import HEADER_SIZE
from sekisho.guard.seams import Seam
from sekisho.guard.vllm.drain import Flights
from sekisho.guard.vllm.kind import InnerError, Kind, Params, text

Original = Callable[..., Any]
_WORKER = (
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector:"
    "MooncakeConnectorWorker"
)

flights = Flights()
"""Of this process's writes to decode."""
_batches: dict[int, tuple[Any, list[str]]] = {}


async def _build_transfer_params(
    original: Original, worker: Any, ready_reqs: Any, *args: Any, **kwargs: Any
) -> Any:
    """A write of these transfers is about to be made, unless decode has given up on them."""
    allowed, refused, begun = [], [], []
    for d_req_id, send_meta in ready_reqs:
        if flights.begin(send_meta.transfer_id):
            allowed.append((d_req_id, send_meta))
            begun.append(send_meta.transfer_id)
        else:
            refused.append(d_req_id)
    try:
        src, dst, lengths, errors, said = await original(worker, allowed, *args, **kwargs)
    except BaseException:
        _end(begun)
        raise
    if src:
        _batches[id(src)] = src, begun  # vLLM hands this very list to `_send_blocks`
    else:
        _end(begun)
    if refused:
        errors, said = [*errors, *refused], said or "decode has given up on this transfer"
    return src, dst, lengths, errors, said


def _send_blocks(
    original: Original, worker: Any, session: str, src_ptrs: Any, *args: Any, **kwargs: Any
) -> Any:
    """In a thread: until this returns 0, the write is under way; if it fails, who knows."""
    status = original(worker, session, src_ptrs, *args, **kwargs)
    _, begun = _batches.pop(id(src_ptrs), (None, []))
    if status == 0:
        _end(begun)
    return status


def _end(transfers: list[str]) -> None:
    for transfer in transfers:
        flights.end(transfer)


class Mooncake(Kind):
    """vLLM's MooncakeConnector. The caller names each transfer."""

    prefill_seams = (
        Seam(
            f"{_WORKER}._build_transfer_params",
            ("self", "ready_reqs", "agent_meta"),
            _build_transfer_params,
        ),
        Seam(
            f"{_WORKER}._send_blocks",
            ("self", "remote_session", "src_ptrs", "dst_ptrs", "lengths"),
            _send_blocks,
        ),
    )
    addressed_by = ("remote_engine_id", "remote_bootstrap_addr")

    def check_options(self, extra: Params) -> None:
        """All of them are followed."""

    def check_moved(self, connector: Any, sidecar: str) -> None:
        inner = connector.connector_worker
        if inner._physical_blocks_per_logical_kv_block != 1:
            raise InnerError("the attention kernel splits blocks: the guard does not follow that")
        places = [i for i, other in enumerate(inner.registered_layer_names) if other == sidecar]
        lengths = [(inner.block_len_per_layer[i], inner.kv_block_len_per_layer[i]) for i in places]
        if lengths != [(HEADER_SIZE, HEADER_SIZE)]:
            raise InnerError(f"MooncakeConnector registered the headers as {lengths}")

    def host_of(self, connector: Any) -> str:
        return str(connector.connector_worker.hostname)

    def drain(self, transfer: str) -> bool:
        return flights.drain(transfer)

    def asked(self, params: Params) -> str | None:
        return text(params, "transfer_id")

    def stated(self, name: str, params: Params, given: Params | None) -> str:
        return text(params, "transfer_id")

    def fetched(self, params: Params, blocks: int) -> str:
        return text(params, "transfer_id")
