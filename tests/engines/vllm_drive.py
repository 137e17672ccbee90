"""vLLM's own schedulers with the guard in them, driven without a model; run in vLLM's environment.

    python vllm_drive.py SEED REQUESTS BLOCKS

Real: `Scheduler` or `AsyncScheduler`, KV cache manager, block pool, Mooncake's scheduler half, the
guard's both halves. A model of ours: the worker's forward pass (any token), and the transfer (the
side-car's rows are copied some steps later). Some transfers bring nothing, some requests have no
manifest, some are aborted anywhere. Prints one JSON object a scheduler: what was left at the end.
"""

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from sekisho.engine.demo import ensure_demo_model
from sekisho.guard.vllm import scheduler as guard
from sekisho.guard.vllm.manifest import FIELD
from sekisho.guard.vllm.messages import Load
from sekisho.guard.vllm.worker import Worker

_BLOCK, _LENGTHS = 32, (1, 5, 31, 32, 33, 64, 100, 200, 257, 400, 600)
_EXTRA = {"inner": "MooncakeConnector", "mooncake_protocol": "tcp"}


def make_scheduler(kind: type, role: str, blocks: int, *, stock: bool = False) -> Any:
    """A scheduler of vLLM's, with the guard unless ``stock``."""
    guarded = {
        "kv_connector": "SekishoConnector",
        "kv_connector_module_path": "sekisho.guard.vllm.connector",
        "kv_connector_extra_config": _EXTRA,
    }
    plain = {"kv_connector": "MooncakeConnector"}
    transfer = KVTransferConfig(kv_role=role, engine_id=role, **(plain if stock else guarded))
    config = EngineArgs(
        model=str(ensure_demo_model()),
        dtype="bfloat16",
        max_model_len=2048,
        block_size=_BLOCK,
        enforce_eager=True,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_transfer_config=transfer,
        async_scheduling=kind is AsyncScheduler,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    layers = [f"model.layers.{i}.self_attn" for i in range(30)]
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(layers, spec)])
    with set_current_vllm_config(config):
        manager = StructuredOutputManager(config)
        return kind(config, cache, manager, block_size=_BLOCK, hash_block_size=_BLOCK)


class Role:
    """One engine: a real scheduler, the guard, and the model of a worker."""

    def __init__(self, kind: type, role: str, blocks: int) -> None:
        self.scheduler = make_scheduler(kind, role, blocks)
        found = guard.active()
        assert found is not None
        self.guard = found
        self.worker = Worker(found.keeper.layout, blocks)
        self.steps = self.preempted = 0
        self.source: dict[str, Any] = {}
        self.params: dict[str, Any] = {}
        self.ended: dict[str, str] = {}
        self._depth = 2 if kind is AsyncScheduler else 1
        self._under_way: list[tuple[Any, Any]] = []
        self._moving: dict[str, tuple[Load, int]] = {}

    def add(self, request: Request) -> None:
        guard.begin(self.guard)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        guard.begin(self.guard)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def sent(self, name: str) -> None:
        """The transfer of ``name`` is over for prefill."""
        guard.begin(self.guard)
        self.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_sending={name}))

    def pages(self, name: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def step(self) -> None:
        self._launch()
        if len(self._under_way) >= self._depth:
            self._update()

    def flush(self) -> None:
        while self._under_way:
            self._update()

    def _launch(self) -> None:
        guard.begin(self.guard)
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        meta = output.kv_connector_metadata
        self.worker.bind(meta)
        for name in output.num_scheduled_tokens:
            assert meta.rows[name].tolist() == self.pages(name), name
        self.steps += 1
        for name, load in meta.loads.items():
            self._moving[name] = load, self.steps + random.randint(0, 3)
        self.worker.after_forward()
        over = self._moved()
        failing = self.worker.arrived(over)
        said = KVConnectorOutput(finished_recving=over or None, failed_recving=failing)
        said.kv_connector_worker_meta = self.worker.report()
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[self._sampled(name) for name in names],
            kv_connector_output=None if said.is_empty() else said,
        )
        self._under_way.append((output, result))

    def _moved(self) -> set[str]:
        over = {name for name, (_, at) in self._moving.items() if at <= self.steps}
        for name in over:
            load, _ = self._moving.pop(name)
            self.worker.headers.words[load.blocks] = self.source[name][-len(load.blocks) :]
        return over

    def _sampled(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        known = max(request.num_tokens, request.num_prompt_tokens)
        return [random.randrange(10, 40000)] if request.num_computed_tokens >= known else []

    def _update(self) -> None:
        guard.begin(self.guard)
        output, result = self._under_way.pop(0)
        for said in self.scheduler.update_from_output(output, result).values():
            for one in said.outputs:
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
                if one.kv_transfer_params:
                    self.params[one.request_id] = one.kv_transfer_params

    def left(self) -> dict[str, Any]:
        """What a role that has nothing to do should not have."""
        self.guard.keeper.ledger.check_integrity()
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "held": self.guard.keeper.ledger.page_count - self.guard.keeper.ledger.free_count,
            "used": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(self.scheduler.requests),
            "remembered": len(self.guard.rows.holders)
            + len(self.guard._requests)
            + len(self.guard._manifests)
            + len(self.guard._pins)
            + len(self.guard.failing),
            "preempted": self.preempted,
        }


def _request(name: str, tokens: Sequence[int], answer: int, salt: str, params: Any) -> Request:
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0)
    hasher = get_request_block_hasher(_BLOCK, sha256)
    request = Request(name, list(tokens), sampling, None, cache_salt=salt, block_hasher=hasher)
    request.kv_transfer_params = params
    return request


def _prefill(prefill: Role, number: int, tokens: Sequence[int], salt: str) -> dict[str, Any]:
    """What decode is asked with."""
    name, transfer = f"p{number}", f"t{number}"
    prefill.add(
        _request(name, tokens, 1, salt, {"do_remote_decode": True, "transfer_id": transfer})
    )
    while name not in prefill.params:
        prefill.step()
    prefill.flush()
    words = prefill.worker.headers.words[prefill.pages(name)].copy()
    prefill.sent(name)
    where = {"remote_engine_id": "kv_producer", "remote_bootstrap_addr": "http://there"}
    said = {"do_remote_prefill": True, "transfer_id": transfer, **where}
    return {"params": said | prefill.params[name], "words": words}


def drive(kind: type, seed: int, count: int, blocks: int) -> dict[str, Any]:
    """See the head of this file."""
    random.seed(seed)
    prefill, decode = Role(kind, "kv_producer", 129), Role(kind, "kv_consumer", blocks)
    texts = [[random.randrange(10, 40000) for _ in range(700)] for _ in range(3)]
    expected, aborted = set(), set()
    for number in range(count):
        salt, name = random.choice("abc"), f"d{number}"
        tokens = random.choice(texts)[: random.choice(_LENGTHS)]
        if random.random() < 0.4:
            tokens = [*tokens[:-1], random.randrange(10, 40000)]
        made, luck = _prefill(prefill, number, tokens, salt), random.random()
        decode.source[name] = made["words"]
        if luck < 0.1:
            decode.source[name] = np.zeros_like(made["words"])
        elif luck < 0.2:
            del made["params"][FIELD]
        if luck < 0.2:
            expected.add(name)
        decode.add(_request(name, tokens, random.choice([1, 3, 40, 90]), salt, made["params"]))
        for _ in range(random.randint(0, 12)):
            decode.step()
            live = [n for n, r in decode.scheduler.requests.items() if not r.is_finished()]
            if live and random.random() < 0.03:
                aborted.add(random.choice(live))
                decode.abort(max(aborted & set(live)))
    for _ in range(5000):
        if not decode.scheduler.requests:
            break
        decode.step()
    for role in (decode, prefill):
        role.step()
        role.flush()
    failed = {name for name, how in decode.ended.items() if "error" in how.lower()}
    return {
        "scheduler": kind.__name__,
        "unexpected": sorted((failed ^ expected) - aborted),
        "failed": len(failed),
        "aborted": len(aborted),
        "prefill": prefill.left(),
        "decode": decode.left(),
    }


if __name__ == "__main__":
    init_none_hash(sha256)
    for scheduler_kind in (Scheduler, AsyncScheduler):
        print(json.dumps(drive(scheduler_kind, *map(int, sys.argv[1:]))), flush=True)
