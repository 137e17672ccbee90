"""Active or dead: what must be so before a guarded scheduler takes its first request."""

import hashlib
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from sekisho.core.lease import Lease
from sekisho.core.memory import Headers
from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.guard.keeper import Keeper
from sekisho.guard.seams import Seam, SeamError
from sekisho.guard.sglang import admission, pages
from sekisho.guard.sglang.decode import Decode
from sekisho.guard.sglang.grants import Grants
from sekisho.guard.sglang.prefill import Prefill, send_failed, send_frames
from sekisho.guard.sglang.state import active, begin
from sekisho.guard.sglang.transfers import Transfers
from sekisho.guard.sglang.wire import (
    Drain,
    Drained,
    Frames,
    Receiving,
    Registration,
    Sending,
    drain_of,
    grant_frame,
    split,
)

log = logging.getLogger("sekisho.guard")
Original = Callable[..., Any]
_CONN = "sglang.srt.disaggregation.mooncake.conn:MooncakeKVManager"
_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")

# Features whose pages the guard does not follow: a server that asks for one does not start.
_UNKNOWN_FEATURES = (
    "speculative_algorithm",
    "enable_hierarchical_cache",
    "disaggregation_decode_enable_radix_cache",
    "disaggregation_decode_enable_offload_kvcache",
    "enable_hisparse",
    "enable_pd_role_switch",
    "enable_unified_memory",
    "enable_dp_attention",
    "enable_pdmux",
)
# Paths of a transfer that carry no headers, or end before all that they began.
_UNKNOWN_PATHS = ("SGLANG_DISAGG_STAGING_BUFFER", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL")


def unsupported(scheduler: Any) -> str:
    """Why the guard cannot vouch for this configuration, in one line; empty if it can."""
    args, mode = scheduler.server_args, scheduler.server_args.disaggregation_mode
    if mode not in ("prefill", "decode"):
        return f"--disaggregation-mode is {mode}: the guard is for prefill and decode servers"
    if args.disaggregation_transfer_backend != "mooncake":
        backend = args.disaggregation_transfer_backend
        return f"--disaggregation-transfer-backend is {backend}: the guard knows mooncake"
    for name in _UNKNOWN_FEATURES:
        if getattr(args, name, None):
            return f"--{name.replace('_', '-')} is set: the guard does not follow its pages"
    for name in ("pp_size", "dcp_size", "attn_cp_size"):
        if (getattr(args, name, 1) or 1) != 1:
            return f"--{name.replace('_', '-')} is above 1: the guard does not follow its pages"
    for name in _UNKNOWN_PATHS:
        if os.environ.get(name, "").lower() not in ("", "0", "false", "no", "n"):
            return f"{name} is set: the guard does not follow that path of a transfer"
    if scheduler.page_size % 16:
        return f"--page-size is {scheduler.page_size}: the guard needs a multiple of 16"
    pool = type(scheduler.token_to_kv_pool_allocator.get_kvcache()).__name__
    if pool not in _POOLS:
        return f"the KV pool is a {pool}: the guard knows {' and '.join(_POOLS)}"
    return ""


def make_keeper(scheduler: Any) -> Keeper:
    """The ledger and headers of this scheduler's pool."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    config = scheduler.model_config
    layout = PageLayout(
        page_size=scheduler.page_size,
        layer_count=max(1, config.num_hidden_layers),
        kv_head_count=max(1, getattr(pool, "head_num", 1)),
        head_size=max(1, getattr(pool, "head_dim", getattr(pool, "kv_cache_dim", 1))),
        element_size=pool.store_dtype.itemsize,
        model=_name_of_weights(config),
    )
    count = scheduler.token_to_kv_pool_allocator.num_pages + 1  # page 0 takes SGLang's padding
    headers = Headers(np.zeros(count * HEADER_SIZE, np.uint8), layout, count, HEADER_SIZE)
    return Keeper(layout, secrets.randbits(64) | 1, headers)


def _name_of_weights(config: Any) -> str:
    """The same on every server with the same configuration, wherever its folder is."""
    said = config.hf_config.to_json_string(use_diff=False)
    lines = [line for line in said.splitlines() if '"_name_or_path"' not in line]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _init_disaggregation(original: Original, scheduler: Any) -> Any:
    """The pools exist, the queues do not: the guard begins here, or the server ends."""
    from sekisho.guard.sglang.plugin import end

    reason = unsupported(scheduler)
    if reason:
        end(reason)
    role = scheduler.server_args.disaggregation_mode
    kind = Prefill if role == "prefill" else Decode
    state = kind(scheduler, make_keeper(scheduler), role, 0)
    if isinstance(state, Prefill):
        state.refused = {}
    begin(state)
    out = original(scheduler)
    state.limit = admission.limit_of(scheduler, role)
    try:
        _check_all_held()
        if isinstance(state, Prefill):
            args = scheduler.server_args
            admission.publish(state, args.host, args.disaggregation_bootstrap_port)
    except (SeamError, OSError) as error:
        end(str(error))
    log.warning("sekisho: guard active, role %s, longest prompt %d tokens", role, state.limit)
    return out


def _check_all_held() -> None:
    from sekisho.guard.seams import check_held
    from sekisho.guard.sglang.plugin import all_seams

    check_held(all_seams())


def _get_internal_state(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """``/server_info`` says that the guard is active, for the gateway that asks."""
    out, state = original(scheduler, *args, **kwargs), active()
    if state is not None:
        from sekisho import __version__

        out.internal_state["sekisho_guard"] = {
            "active": True,
            "version": __version__,
            "role": state.role,
            "limit": state.limit,
            "quarantined_pages": state.keeper.quarantined(),
        }
    return out


def _register_buffers(original: Original, manager: Any) -> Any:
    """Decode's headers are memory that prefill writes."""
    out, state = original(manager), active()
    if isinstance(state, Decode):
        words = state.keeper.headers.words
        manager.engine.batch_register([words.ctypes.data], [words.nbytes])
    return out


def _start_decode_thread(original: Original, manager: Any) -> Any:
    state = active()
    if isinstance(state, Decode):
        state.grants = Grants(state.keeper, lambda freed: pages.put_back(state, freed))
        manager.server_socket = Receiving(manager.server_socket, lambda f: _heard(state, f))
    return original(manager)


def _heard(state: Decode, frames: Frames) -> Frames | None:
    try:
        message = drain_of(frames)
    except ValueError as error:
        log.error("sekisho: %s", error)
        return None
    if isinstance(message, Drained):
        state.grants.heard(message)
    return frames if message is None else None


def _start_prefill_thread(original: Original, manager: Any) -> Any:
    state = active()
    if isinstance(state, Prefill):
        send = lambda host, port, frames: send_frames(manager, host, port, frames)  # noqa: E731
        state.transfers = Transfers(state.keeper, send)
        socket = Receiving(manager.server_socket, lambda f: _asked(state, manager, f))
        manager.server_socket = socket
    return original(manager)


def _asked(state: Prefill, manager: Any, frames: Frames) -> Frames | None:
    """What decode says to prefill; None where SGLang must not see it."""
    try:
        message = drain_of(frames)
        if message is None:
            own, extra = split(frames)
        elif isinstance(message, Drain):
            if state.transfers.drain(message):
                manager.update_status(message.room, 0)
            return None
        else:
            return None
    except ValueError as error:
        log.error("sekisho: a decode server was not understood: %s", error)
        return None
    if own[0] == b"None":
        return _registered(state, own, extra)
    if own[0].isdigit():
        return _granted(state, manager, own, extra)
    return own


def _registered(state: Prefill, own: Frames, extra: Registration | Lease | None) -> Frames | None:
    session = own[3].decode("ascii")
    if isinstance(extra, Registration) and extra.layout == state.keeper.layout.fingerprint:
        state.transfers.peers[session] = extra
        return own
    state.transfers.peers.pop(session, None)
    log.error("sekisho: decode %s has no guard, or pages of another layout: refused", session)
    return own


def _granted(
    state: Prefill, manager: Any, own: Frames, extra: Registration | Lease | None
) -> Frames | None:
    room, session = int(own[0]), own[3].decode("ascii")
    if isinstance(extra, Lease) and session in state.transfers.peers and room not in state.refused:
        state.transfers.granted(room, session, extra)
        return own
    send_failed(manager, own[1].decode("ascii"), int(own[2]), room)
    return None


def _connect(original: Original, receiver_class: Any, *args: Any, **kwargs: Any) -> Any:
    sock, lock = original(receiver_class, *args, **kwargs)
    state = active()
    if isinstance(state, Decode):
        return Sending(sock, lambda frames: _more(state, frames)), lock
    return sock, lock


def _more(state: Decode, frames: Frames) -> bytes | None:
    """The guard's frame beside a message of decode's."""
    if frames[0] == b"None":
        headers, ledger = state.keeper.headers, state.keeper.ledger
        address = headers.words.ctypes.data
        return Registration(headers.layout.fingerprint, ledger.incarnation, address).frame()
    lease = state.grants.lease_of(int(frames[0])) if frames[0].isdigit() else None
    return None if lease is None else grant_frame(lease)


SEAMS = (
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.init_disaggregation",
        ("self",),
        _init_disaggregation,
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.get_internal_state",
        ("self", "recv_req"),
        _get_internal_state,
    ),
    Seam(f"{_CONN}.register_buffer_to_engine", ("self",), _register_buffers),
    Seam(f"{_CONN}.start_decode_thread", ("self",), _start_decode_thread),
    Seam(f"{_CONN}.start_prefill_thread", ("self",), _start_prefill_thread),
    Seam(
        "sglang.srt.disaggregation.common.conn:CommonKVReceiver._connect_to_bootstrap_server",
        ("cls", "bootstrap_info"),
        _connect,
    ),
)
