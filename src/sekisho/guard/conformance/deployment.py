"""Prefill and decode of a guarded vLLM in one process, without a model.

Real: vLLM's schedulers, block pools and connectors, the guard, and the transfer itself. A model of
ours: the forward pass, which fills each block with a number that its text and scope determine, so
that decode can tell whether what came is what was meant.
"""

import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from sekisho.guard.conformance.ports import free_port
from sekisho.guard.vllm import scheduler as guarding
from sekisho.guard.vllm.connector import SekishoConnector

BLOCK, BLOCKS, LAYERS = 32, 33, 2
PATIENCE_S = 30.0


class Role:
    """One engine. ``caches``: by layer, [blocks, heads, tokens, 2 × head size]."""

    def __init__(self, role: str, inner: dict[str, Any]) -> None:
        # Both roles are in one process, and each listens there.
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        config = _config(role, inner)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.half)
        layers = [f"model.layers.{i}.self_attn" for i in range(LAYERS)]
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(layers, spec)])
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            self.scheduler = Scheduler(
                config,
                cache,
                StructuredOutputManager(config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
            )
            self.connector = SekishoConnector(config, KVConnectorRole.WORKER, cache)
        found = guarding.active()
        if found is None:
            raise RuntimeError("vLLM made its scheduler without the guard")
        self.guard = found
        self.caches = {name: torch.zeros((BLOCKS, 3, BLOCK, 128)).half() for name in layers}
        self.connector.register_kv_caches(self.caches)
        said = self.connector.get_handshake_metadata()
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): said})
        self.answers: dict[str, str] = {}
        self.params: dict[str, Any] = {}

    def add(self, request: Request) -> None:
        guarding.begin(self.guard)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        guarding.begin(self.guard)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def pages(self, name: str) -> list[int]:
        """Blocks of a request, by ordinal."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def step(self) -> None:
        """Schedule, run, and tell the scheduler what came of it."""
        guarding.begin(self.guard)
        output = self.scheduler.schedule()
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        self.connector.start_load_kv(None)
        names = list(output.num_scheduled_tokens)
        tokens = [self._forward(name, output.num_scheduled_tokens[name]) for name in names]
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=None if said.is_empty() else said,
        )
        for sent in self.scheduler.update_from_output(output, result).values():
            for one in sent.outputs:
                if one.finish_reason is not None:
                    self.answers[one.request_id] = str(one.finish_reason)
                if one.kv_transfer_params:
                    self.params[one.request_id] = one.kv_transfer_params

    def _forward(self, name: str, count: int) -> list[int]:
        """Fill the blocks of this step; decode, which has the prompt, says if it was sound."""
        request, pages = self.scheduler.requests[name], self.pages(name)
        end = request.num_computed_tokens  # this step's are counted already
        for ordinal in range((end - count) // BLOCK, -(-end // BLOCK)):
            value = meant(request, min(end, (ordinal + 1) * BLOCK))
            # What decode computes, the last token of the prompt, leaves what came as it is.
            if not request.kv_transfer_params.get("remote_engine_id"):
                for layer in self.caches.values():
                    layer[pages[ordinal]] = value
        if end < request.num_tokens:
            return []
        sound = all(
            bool((layer[page] == meant(request, min(request.num_prompt_tokens, stop))).all())
            for layer in self.caches.values()
            for page, stop in zip(pages, range(BLOCK, 10**6, BLOCK), strict=False)
            if stop - BLOCK < request.num_prompt_tokens
        )
        sampled[name] = 1 if sound else 2
        return [sampled[name]]

    def close(self) -> None:
        self.connector.shutdown()


class Deployment:
    """Both roles. ``lost``: of the next transfer, blocks from this ordinal on are never written.
    ``held``: names of requests whose completion the inner connector does not tell yet."""

    def __init__(self, inner: dict[str, Any]) -> None:
        init_none_hash(sha256)
        self.prefill, self.decode = Role("kv_producer", inner), Role("kv_consumer", inner)
        self.lost: int | None = None
        self.held: set[str] = set()
        self._kept: set[str] = set()
        self._count = 0
        worker = self.decode.connector.inner
        self._plain: Callable[[set[str]], Any] = worker.get_transfer_results
        worker.get_transfer_results = self._results

    def prompt(self, length: int, first: int = 1000) -> list[int]:
        return [first + i for i in range(length)]

    def compute(
        self,
        tokens: Sequence[int],
        salt: str = "a",
        *,
        like: Request | None = None,
        lora: Any = None,
    ) -> tuple[str, dict[str, Any]]:
        """Prefill computes a prompt: its transfer id, and what decode is to be asked with.

        ``like``: another request whose hashes this one's blocks are found by.
        """
        self._count += 1
        name, transfer = f"p{self._count}", f"t{self._count}"
        said = {"do_remote_decode": True, "transfer_id": transfer}
        request = make_request(name, tokens, salt, said, lora)
        if like is not None:
            request.block_hashes = list(like.block_hashes)
        self.prefill.add(request)
        self.until(lambda: name in self.prefill.answers)
        where = {"remote_engine_id": "kv_producer", "remote_bootstrap_addr": _bootstrap()}
        asked = {"do_remote_prefill": True, "transfer_id": transfer, **where}
        # As over HTTP, where a tuple arrives as a list.
        return name, json.loads(json.dumps(asked | self.prefill.params.get(name, {})))

    def ask(
        self, tokens: Sequence[int], params: dict[str, Any], salt: str = "a", lora: Any = None
    ) -> str:
        """Decode is asked; returns the request's name."""
        self._count += 1
        name = f"d{self._count}"
        self.decode.add(make_request(name, tokens, salt, dict(params), lora))
        return name

    def answer(self, name: str) -> str:
        """``right``, ``wrong`` or ``error``: what a client would have got."""
        self.until(lambda: name in self.decode.answers)
        if "error" in self.decode.answers[name].lower():
            return "error"
        return "right" if sampled.get(name) == 1 else "wrong"

    def until(self, done: Callable[[], bool]) -> None:
        """Both roles step until ``done``.

        Raises:
            TimeoutError: after half a minute.
        """
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                raise TimeoutError("the deployment does not get there")
            self.prefill.step()
            self.decode.step()
            time.sleep(0.005)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def _results(self, finished: set[str]) -> Any:
        results = self._plain(finished)
        over = set(results.finished_recving) | self._kept
        self._kept = over & self.held
        results.finished_recving = over - self._kept
        if self.lost is not None:
            for name in results.finished_recving:
                self._unwrite(self.decode.pages(name)[self.lost :])
        return results

    def _unwrite(self, pages: list[int]) -> None:
        for layer in self.decode.caches.values():
            layer[pages] = 0.0
        self.decode.connector._work.tensor[pages] = 0


sampled: dict[str, int] = {}
"""1 where decode found the KV that its prompt means, 2 where it did not."""


def meant(request: Request, end: int) -> float:
    """What a block whose text ends at token ``end`` is filled with."""
    lora = None if request.lora_request is None else request.lora_request.lora_name
    said = json.dumps([request.cache_salt, lora, list(request.all_token_ids[:end])])
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=2).digest(), "big") % 2000 + 1


def make_request(
    name: str, tokens: Sequence[int], salt: str, params: dict[str, Any], lora: Any = None
) -> Request:
    """A request of one token of answer."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request(
        name, list(tokens), sampling, None, cache_salt=salt, lora_request=lora, block_hasher=hasher
    )
    request.kv_transfer_params = params
    return request


def lora_request(name: str) -> LoRARequest:
    """An adapter, which the model of a forward pass tells from all others by its name."""
    return LoRARequest(name, 1, "nowhere")


def _config(role: str, inner: dict[str, Any]) -> Any:
    transfer = KVTransferConfig(
        kv_connector="SekishoConnector",
        kv_connector_module_path="sekisho.guard.vllm.connector",
        kv_role=role,
        kv_connector_extra_config=inner,
        engine_id=role,
    )
    config = EngineArgs(
        model=_shape(),
        skip_tokenizer_init=True,
        dtype="float16",
        max_model_len=1024,
        block_size=BLOCK,
        enforce_eager=True,
        max_num_seqs=8,
        kv_transfer_config=transfer,
        async_scheduling=False,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    config.cache_config.kv_cache_layout = "LBHNC"  # as the engine core settles it
    return config


@functools.cache
def _shape() -> str:
    """A folder with the configuration of a small model, and no weights."""
    folder = tempfile.mkdtemp(prefix="conformance-")
    LlamaConfig(
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=3,
        vocab_size=49152,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


def _bootstrap() -> str:
    return f"http://127.0.0.1:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}"
