"""The inner connector: how it is made, and what the guard must know of each kind.

Its configuration is the one of ``kv_transfer_config`` under its own name: ``inner`` and
``inner_module_path`` in ``kv_connector_extra_config`` name it, everything else there is its own.
"""

import dataclasses
from collections.abc import Callable
from copy import copy
from typing import Any

from sekisho.core.page import HEADER_SIZE
from sekisho.guard.seams import Seam
from sekisho.guard.vllm.drain import Flights
from sekisho.guard.vllm.versions import CONNECTORS, supported

Original = Callable[..., Any]
INNER, MODULE = "inner", "inner_module_path"
_MOONCAKE = (
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector:"
    "MooncakeConnectorWorker"
)


class InnerError(Exception):
    """The inner connector is missing, unknown, or not as the guard knows it; one line."""


def own_config(vllm_config: Any) -> Any:
    """vLLM's configuration as the inner connector would see it without the guard."""
    outer = vllm_config.kv_transfer_config
    extra = dict(outer.kv_connector_extra_config)
    name, module = extra.pop(INNER, None), extra.pop(MODULE, None)
    if not isinstance(name, str):
        raise InnerError(f"kv_connector_extra_config names no {INNER!r} connector")
    known = CONNECTORS.get(name)
    if known is None or not known.supported:
        raise InnerError(f"the connector {name} was not tried: {supported(CONNECTORS)}")
    transfer = copy(outer)
    transfer.kv_connector, transfer.kv_connector_module_path = name, module
    transfer.kv_connector_extra_config = extra
    config = copy(vllm_config)
    config.kv_transfer_config = transfer
    return config


def class_of(vllm_config: Any) -> Any:
    """The inner connector's class."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class(own_config(vllm_config).kv_transfer_config)


def with_sidecar(kv_cache_config: Any, name: str) -> Any:
    """The same with one more layer in its only group: it has the group's block ids."""
    [group] = kv_cache_config.kv_cache_groups
    more = dataclasses.replace(group, layer_names=[*group.layer_names, name])
    return dataclasses.replace(kv_cache_config, kv_cache_groups=[more])


def sidecar_name(kv_cache_config: Any) -> str:
    """A layer behind the last one, alike in both roles."""
    [group] = kv_cache_config.kv_cache_groups
    return f"sekisho.layers.{len(group.layer_names)}.attn"


def check_moved(connector: Any, name: str) -> None:
    """Raise `InnerError` where Mooncake does not move the side-car with every block."""
    inner = connector.connector_worker
    if inner._physical_blocks_per_logical_kv_block != 1:
        raise InnerError("the attention kernel splits blocks: the guard does not follow that")
    places = [i for i, other in enumerate(inner.registered_layer_names) if other == name]
    lengths = [(inner.block_len_per_layer[i], inner.kv_block_len_per_layer[i]) for i in places]
    if lengths != [(HEADER_SIZE, HEADER_SIZE)]:
        raise InnerError(f"MooncakeConnector registered the headers as {lengths}")


def host_of(connector: Any) -> str:
    """Where peers reach this worker."""
    return str(connector.connector_worker.hostname)


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
        src, dst, lengths, errors, text = await original(worker, allowed, *args, **kwargs)
    except BaseException:
        _end(begun)
        raise
    if src:
        _batches[id(src)] = src, begun  # vLLM hands this very list to `_send_blocks`
    else:
        _end(begun)
    if refused:
        errors, text = [*errors, *refused], text or "decode has given up on this transfer"
    return src, dst, lengths, errors, text


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


PREFILL_SEAMS = (
    Seam(
        f"{_MOONCAKE}._build_transfer_params",
        ("self", "ready_reqs", "agent_meta"),
        _build_transfer_params,
    ),
    Seam(
        f"{_MOONCAKE}._send_blocks",
        ("self", "remote_session", "src_ptrs", "dst_ptrs", "lengths"),
        _send_blocks,
    ),
)
