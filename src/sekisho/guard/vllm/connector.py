"""The connector that vLLM loads: around another one, which goes on moving the blocks.

    --kv-transfer-config '{"kv_connector": "SekishoConnector",
      "kv_connector_module_path": "sekisho.guard.vllm.connector", "kv_role": …,
      "kv_connector_extra_config": {"inner": "MooncakeConnector", …the inner one's own…}}'

Every method, class method and property of vLLM's base class is either guarded here or handed to
the inner connector; a name that is in neither list ends the engine at its start.
"""

import abc
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from sekisho.guard.seams import SeamError
from sekisho.guard.vllm import holds, inner, start
from sekisho.guard.vllm import scheduler as scheduling
from sekisho.guard.vllm import worker as working
from sekisho.guard.vllm.drain import DrainServer
from sekisho.guard.vllm.kind import InnerError
from sekisho.guard.vllm.manifest import KeyMissingError, load_key
from sekisho.guard.vllm.messages import Handshake, StepMeta, WorkerMeta
from sekisho.guard.vllm.metrics import Metrics, Stats
from sekisho.guard.vllm.witness import Witness

_HANDED_ON = (
    "get_mem_pool_context",
    "clear_connector_metadata",
    "_get_connector_metadata",
    "has_connector_metadata",
    "set_host_xfer_buffer_ops",
    "finish_forward",
    "reset_capture_state",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "get_finished",
    "shutdown",
    "get_kv_connector_kv_cache_events",
    "bind_kv_cache_manager",
    "bind_gpu_block_pool",
    "get_loaded_kv_cache_group_ids",
    "get_external_cache_hit_sources",
    "register_finished_partial_tail",
    "take_events",
    "has_pending_block_frees",
    "has_pending_push_work",
    "get_finished_count",
    "set_xfer_handshake_metadata",
    "reset_cache",
    "handle_preemptions",
)
_HANDED_ON_PROPERTIES = ("supports_divergent_local_hybrid_hits", "requires_kv_delivery")
_GUARDED = (
    "__init__",
    "role",
    "bind_connector_metadata",
    "register_kv_caches",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_handshake_metadata",
    "build_connector_worker_meta",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "on_new_request",
    "update_connector_output",
    "request_finished",
    "get_required_kvcache_layout",
    "requires_piecewise_for_cudagraph",
    "build_kv_connector_stats",
    "set_xfer_handshake_metadata_pp_aware",
    "build_prom_metrics",
)


class SekishoConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See above. ``inner``: the connector that moves the blocks, of the same role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        try:
            self._begin(vllm_config, role, kv_cache_config)
        except (InnerError, KeyMissingError, SeamError) as error:
            start.end(str(error))
        except BaseException as error:  # whatever it is, no engine without its guard
            start.end(f"{type(error).__name__}: {error}")

    def _begin(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        start.check_version()
        unknown = missing_names()
        if unknown:
            raise SeamError(f"vLLM's connectors have {unknown}, which the guard does not know")
        reason = start.unsupported(vllm_config, kv_cache_config)
        if reason:
            start.end(reason)
        self._key = load_key()
        self._side = start.role_of(vllm_config)
        self._layout = start.layout_of(vllm_config, kv_cache_config)
        self._sidecar = inner.sidecar_name(kv_cache_config)
        self._bad_blocks: set[int] = set()
        self._drain: DrainServer | None = None
        self._scheduling: scheduling.Scheduling | None = None
        self._worker: working.Worker | None = None
        config, made = inner.own_config(vllm_config), inner.class_of(vllm_config)
        self._kind = inner.kind_of(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self.inner = made(config, role, kv_cache_config)
            self._begin_scheduling(vllm_config, kv_cache_config)
        else:
            self.inner = made(config, role, inner.with_sidecar(kv_cache_config, self._sidecar))
            self._begin_working(kv_cache_config)

    def _begin_scheduling(self, vllm_config: Any, kv_cache_config: Any) -> None:
        holds.hold_once(holds.SCHEDULER_SEAMS)
        keeper = start.make_keeper(self._layout, kv_cache_config.num_blocks)
        self._scheduling = scheduling.Scheduling(
            keeper,
            self._side,
            vllm_config.kv_transfer_config.engine_id,
            self._key,
            self.inner.get_finished_count() or vllm_config.parallel_config.world_size,
            self._kind,
        )
        scheduling.begin(self._scheduling)

    def _begin_working(self, kv_cache_config: Any) -> None:
        holds.hold_once(holds.WORKER_SEAMS)
        decodes = self._side == "decode"
        witness = Witness(self._key) if decodes and self._kind.reads else None
        self._worker = working.Worker(self._layout, kv_cache_config.num_blocks, witness)
        working.begin(self._worker)
        holds.hold_once(self._kind.decode_seams if decodes else self._kind.prefill_seams)
        if not decodes:
            host, held = self._kind.host_of(self.inner), self._kind.holder(self.inner)
            self._drain = DrainServer(self._kind, self._key, host, held)

    @property
    def role(self) -> Any:
        return self._role

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The headers join the layers that the inner connector moves, last."""
        self.inner.register_kv_caches({**kv_caches, self._sidecar: self._work.tensor})
        try:
            self._kind.check_moved(self.inner, self._sidecar)
        except (InnerError, AttributeError) as error:
            start.end(str(error))

    def bind_connector_metadata(self, connector_metadata: StepMeta) -> None:
        self._work.bind(connector_metadata)
        self.inner.bind_connector_metadata(connector_metadata.inner)

    def handle_preemptions(self, kv_connector_metadata: StepMeta) -> None:
        self.inner.handle_preemptions(kv_connector_metadata.inner)

    def wait_for_save(self) -> None:
        self._work.after_forward()
        self.inner.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self.inner.get_transfer_results(finished_req_ids)
        bad = self.inner.get_block_ids_with_load_errors()
        self._bad_blocks |= bad
        self._work.failed(bad, results.failed_recving)
        arrived = self._work.witnessed(results.finished_recving)
        failing = self._work.arrived(arrived)
        return KVConnectorTransferResults(
            finished_sending=results.finished_sending,
            finished_recving=arrived,
            failed_recving=results.failed_recving | failing,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        return self._work.report(self.inner.build_connector_worker_meta())

    def get_handshake_metadata(self) -> Handshake:
        drain = "" if self._drain is None else self._drain.address
        return Handshake(self.inner.get_handshake_metadata(), drain)

    def get_kv_connector_stats(self) -> Stats | None:
        counts = {} if self._scheduling is None else self._scheduling.report.take()
        stats = self.inner.get_kv_connector_stats()
        if stats is None and not counts:
            return None
        return Stats.of(counts, stats, type(self.inner))

    # -- scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Handshake]) -> None:
        self._sched.drains = tuple(said.drain for said in metadata.values() if said.drain)
        own = {rank: said.inner for rank, said in metadata.items() if said.inner is not None}
        if own:
            self.inner.set_xfer_handshake_metadata_pp_aware(own)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._sched.put_in_pool = partial(holds.really_free, kv_cache_manager.block_pool)
        self.inner.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        if self._sched.admit(request):
            self.inner.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._sched.refused(request):
            return None, False  # vLLM leaves it where it is, until it fails a moment later
        out: tuple[int | None, bool] = self.inner.get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return out

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._sched.allocated(request, num_external_tokens)
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        meta = self.inner.build_connector_meta(scheduler_output)
        return self._sched.step(scheduler_output, meta)

    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, WorkerMeta):
            connector_output.kv_connector_worker_meta = said.inner
        self.inner.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        sends, params = False, None
        if self._sched.tells_inner(request):
            if isinstance(self.inner, SupportsHMA):
                sends, params = self.inner.request_finished_all_groups(request, block_ids)
            else:
                sends, params = self.inner.request_finished(request, block_ids[0])
        own = self._sched.ended(request, sends, params)
        return sends, params if own is None else {**(params or {}), **own}

    # -- of the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        try:
            own, made = inner.own_config(vllm_config), inner.class_of(vllm_config)
        except InnerError as error:  # vLLM asks the class before it makes one
            start.end(str(error))
        found: str | None = made.get_required_kvcache_layout(own)
        return found

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        found = KVConnectorFactory.get_connector_class_by_name(extra_config[inner.INNER])
        return bool(found.requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        return None if data is None else Stats(data=data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Metrics:
        own = inner.own_config(vllm_config)
        made = inner.class_of(vllm_config).build_prom_metrics(own, *args, **kwargs)
        return Metrics(made, vllm_config, *args, *kwargs.values())

    @property
    def _work(self) -> working.Worker:
        if self._worker is None:
            raise RuntimeError("asked of the scheduler's half")
        return self._worker

    @property
    def _sched(self) -> scheduling.Scheduling:
        if self._scheduling is None:
            raise RuntimeError("asked of a worker's half")
        return self._scheduling


def missing_names() -> str:
    """Names of vLLM's base class that are neither guarded nor handed on; empty if none."""
    known = {*_HANDED_ON, *_HANDED_ON_PROPERTIES, *_GUARDED}
    plain = {"__module__", "__doc__", "__dict__", "__weakref__", "__abstractmethods__", "_abc_impl"}
    names = set(vars(KVConnectorBase_V1)) - plain - known - {"_cache_hit_source"}
    return ", ".join(sorted(name for name in names if not name.startswith("__annot")))


def _hand_on(name: str) -> Callable[..., Any]:
    def method(self: SekishoConnector, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in _HANDED_ON:
    if _name not in vars(SekishoConnector):
        setattr(SekishoConnector, _name, _hand_on(_name))
for _name in _HANDED_ON_PROPERTIES:
    setattr(SekishoConnector, _name, property(attrgetter(f"inner.{_name}")))
abc.update_abstractmethods(SekishoConnector)
