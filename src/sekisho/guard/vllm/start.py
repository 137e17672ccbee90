"""Active or dead: what must be so before a guarded engine takes its first request."""

import hashlib
import os
import secrets
import sys
from typing import Any, NoReturn

import numpy as np

from sekisho.core.memory import Headers
from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.guard.keeper import Keeper
from sekisho.guard.vllm.versions import VERSIONS, supported

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


def end(reason: str) -> NoReturn:
    """No engine without its guard: one line, and the process is over."""
    print(f"sekisho guard: {reason}", file=sys.stderr, flush=True)
    os._exit(2)


def check_version() -> None:
    """End the process where this vLLM was not tried."""
    import vllm

    known = VERSIONS.get(vllm.__version__.partition("+")[0])
    if known is None or not known.supported:
        end(
            f"vLLM {vllm.__version__} is not a version that the guard knows ({supported(VERSIONS)})"
        )


def role_of(vllm_config: Any) -> str:
    """``prefill`` or ``decode``; anything else is refused by `unsupported` first."""
    return _ROLES[vllm_config.kv_transfer_config.kv_role]


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why the guard cannot vouch for this configuration, in one line; empty if it can."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_role not in _ROLES:
        return f"kv_role is {transfer.kv_role}: the guard knows {' and '.join(_ROLES)}"
    if transfer.kv_load_failure_policy != "fail":
        policy = transfer.kv_load_failure_policy
        return f"kv_load_failure_policy is {policy}: a failed check must fail its request"
    for name in _SIZES:
        if getattr(parallel, name) != 1:
            return f"{name} is {getattr(parallel, name)}: the guard does not follow its blocks"
    if parallel.use_ubatching:
        return "dual batch overlap is on: the guard does not follow its batches"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is on: the guard does not follow its tokens"
    if vllm_config.use_v2_model_runner:
        return "this is vLLM's second model runner: the guard knows the first"
    if vllm_config.ec_transfer_config is not None:
        return "an encoder cache connector is set: the guard does not follow its blocks"
    if vllm_config.aux_output_config.enable_return_routed_experts:
        return "--enable-return-routed-experts is set, which the inner connector cannot"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        return f"the KV cache is {kinds}: the guard knows one group of full attention"
    size = groups[0].kv_cache_spec.block_size
    if size % 16:
        return f"the block size is {size}: the guard needs a multiple of 16"
    if kv_cache_config.hash_block_size not in (None, size):
        return "blocks are hashed in parts: the guard does not follow that"
    return ""


_SIZES = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


def layout_of(vllm_config: Any, kv_cache_config: Any) -> PageLayout:
    """Shape of a block over all layers and all ranks, alike in both roles."""
    [group] = kv_cache_config.kv_cache_groups
    spec, model = group.kv_cache_spec, vllm_config.model_config
    return PageLayout(
        page_size=spec.block_size,
        layer_count=len(group.layer_names),
        kv_head_count=model.get_total_num_kv_heads(),
        head_size=spec.head_size,
        element_size=spec.dtype.itemsize,
        model=_name_of_weights(model),
    )


def _name_of_weights(model: Any) -> str:
    """The same on every server with the same configuration, wherever its folder is."""
    said = model.hf_config.to_json_string(use_diff=False)
    lines = [line for line in said.splitlines() if '"_name_or_path"' not in line]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def make_keeper(layout: PageLayout, block_count: int) -> Keeper:
    """The ledger of this scheduler's pool, and what its blocks must carry."""
    headers = Headers(
        np.zeros(block_count * HEADER_SIZE, np.uint8), layout, block_count, HEADER_SIZE
    )
    return Keeper(layout, secrets.randbits(64) | 1, headers)
