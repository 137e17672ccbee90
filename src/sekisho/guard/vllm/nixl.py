"""NIXL under the guard: decode reads prefill's blocks.

    prefill   request over, blocks held ---------|read, or the lease has run out: blocks free
    decode             |-- read --|-- were they held until now? --|use them

NIXL lets a lease run out by time alone, while decode may still read; what it reads then is whatever
prefill has put there since. So decode asks, once its read is over, whether prefill held the blocks
all that time. Prefill writes nothing into decode, and NIXL cannot call back a read: one that is
released while it is under way lands all the same. That a read which was begun and failed is over,
only prefill's end proves, and then that decode has nothing left to read in its sockets. NIXL's pool
of threads reads its sockets only while it has work, so that there would always be something left.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from sekisho.core.page import HEADER_SIZE
from sekisho.guard.seams import Seam
from sekisho.guard.vllm import worker as working
from sekisho.guard.vllm.kind import InnerError, Kind, Params, ParamsError, text

Original = Callable[..., Any]
_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker:NixlPullConnectorWorker"
_REMEMBERED = 1 << 16
_BOUND = (
    "remote_engine_id",
    "remote_request_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "tp_size",
    "dcp_size",
    "pp_size",
    "transfer_mode",
)
"""All that prefill tells decode: a hand-off in which one of them was changed is another one."""

_lock = threading.Lock()
_read: OrderedDict[str, None] = OrderedDict()


def _get_new_notifs(original: Original, worker: Any) -> set[str]:
    """Requests that every decode worker has read; they leave NIXL's own table at once."""
    with _lock:
        names: set[str] = original(worker)
        _read.update(dict.fromkeys(names))
        while len(_read) > _REMEMBERED:
            _read.popitem(last=False)
    return names


def _read_blocks(original: Original, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """A read is about to be made. vLLM calls this with names alone."""
    guard = working.active()
    if guard is not None:
        guard.reads(kwargs["request_id"])
    return original(worker, *args, **kwargs)


class Nixl(Kind):
    """vLLM's NixlConnector, which reads ("pull"). The transfer is what prefill gives to decode."""

    prefill_seams = (Seam(f"{_WORKER}._get_new_notifs", ("self",), _get_new_notifs),)
    decode_seams = (
        Seam(f"{_WORKER}._read_blocks", ("self", "read_spec", "request_id"), _read_blocks),
    )
    addressed_by = ("remote_engine_id", "remote_host", "remote_request_id")
    reads = True

    def check_options(self, extra: Params) -> None:
        if extra.get("bidirectional_kv_xfer"):
            raise InnerError(
                "bidirectional_kv_xfer is set: the guard does not follow what prefill reads"
            )
        if extra.get("backends", ["UCX"]) != ["UCX"]:
            raise InnerError("backends is not UCX alone: no other was tried")
        if extra.get("num_threads") != 0:
            raise InnerError(
                "num_threads is not 0: NIXL's pool of threads leaves bytes unread in idle sockets, "
                "so that the blocks of a read that failed would never come back"
            )

    def check_moved(self, connector: Any, sidecar: str) -> None:
        inner = connector.connector_worker
        if inner._physical_blocks_per_logical_kv_block != 1:
            raise InnerError("the attention kernel splits blocks: the guard does not follow that")
        if inner.use_host_buffer:
            raise InnerError("kv_buffer_device is not the device: the guard does not follow that")
        places = [i for i, other in enumerate(inner.region_names) if other == sidecar]
        lengths = [(inner.block_len_per_layer[i], inner.block_stride_per_layer[i]) for i in places]
        if lengths != [(HEADER_SIZE, HEADER_SIZE)]:
            raise InnerError(f"NixlConnector registered the headers as {lengths}")
        if len(set(inner.region_group_ids)) != 1:
            raise InnerError("NixlConnector gives the headers other blocks than the layers")

    def host_of(self, connector: Any) -> str:
        from vllm import envs

        return str(envs.VLLM_NIXL_SIDE_CHANNEL_HOST)

    def drain(self, transfer: str) -> bool:
        return False

    def holder(self, connector: Any) -> Callable[[str], bool]:
        """NIXL frees a request's blocks after it has left this table."""
        table = connector.connector_worker._reqs_to_process

        def held(name: str) -> bool:
            with _lock:
                return name in table or name in _read

        return held

    def asked(self, params: Params) -> str | None:
        if params.get("remote_block_ids"):
            raise ParamsError("a prefill server was asked to read blocks")
        return None

    def stated(self, name: str, params: Params, given: Params | None) -> str:
        return _transfer(given or {})

    def fetched(self, params: Params, blocks: int) -> str:
        groups = params.get("remote_block_ids")
        if not (isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], list)):
            raise ParamsError("no remote_block_ids of one group")
        if len(groups[0]) != blocks or not all(type(b) is int and b >= 0 for b in groups[0]):
            raise ParamsError(f"remote_block_ids are not {blocks} blocks")
        return _transfer(params)

    def source(self, params: Params) -> str:
        return text(params, "remote_request_id")


def _transfer(params: Params) -> str:
    """One name for everything that decode goes by."""
    try:
        said = json.dumps([params.get(name) for name in _BOUND], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ParamsError("kv_transfer_params are malformed") from error
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
