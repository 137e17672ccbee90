"""The guard's counts on vLLM's way to ``/metrics``, around those of the inner connector.

scheduler, worker: `Stats` -> API server: `Metrics`, which vLLM makes from the connector's class
"""

import importlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from sekisho import __version__
from sekisho.guard.vllm.start import role_of

_GAUGES = {"quarantined"}


class Stats(KVConnectorStats):  # type: ignore[misc]
    """``data``: ``guard``, the counts of `Report.take`; ``inner``, the inner connector's data, and
    ``class``, the module and name of its class, so that any process can make it again."""

    data: dict[str, Any]

    @classmethod
    def of(cls, guard: dict[str, int], inner: Any, inner_class: type) -> "Stats":
        data = None if inner is None else inner.to_dict()
        where = [inner_class.__module__, inner_class.__qualname__]
        return cls(data={"guard": guard, "inner": data, "class": where})

    def reset(self) -> None:
        self.data = {**self.data, "guard": {}, "inner": None}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        guard = dict(self.data["guard"])
        for key, value in other.data["guard"].items():
            guard[key] = value if key in _GAUGES else guard.get(key, 0) + value
        mine, theirs = self.inner(), Stats(data=other.data).inner()
        if mine is not None and theirs is not None:
            mine = mine.aggregate(theirs)
        inner = theirs if mine is None else mine
        data = None if inner is None else inner.to_dict()
        return Stats(data={"guard": guard, "inner": data, "class": self.data["class"]})

    def reduce(self) -> dict[str, int | float]:
        inner = self.inner()
        own = {f"sekisho {key}": value for key, value in self.data["guard"].items()}
        return own if inner is None else {**inner.reduce(), **own}

    def is_empty(self) -> bool:
        inner = self.inner()
        return not self.data["guard"] and (inner is None or inner.is_empty())

    def inner(self) -> Any:
        """The inner connector's statistics, None where there are none."""
        data = self.data["inner"]
        if data is None:
            return None
        module, name = self.data["class"]
        return getattr(importlib.import_module(module), name).build_kv_connector_stats(data)


class Metrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``sekisho_guard_…`` with vLLM's own labels, and the inner connector's metrics."""

    def __init__(self, inner: Any, vllm_config: Any, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        self._inner = inner
        labels = self._labelnames
        # Made once every engine core is up, and none comes up without its guard (`start.end`).
        active = self._gauge_cls(
            name="sekisho_guard_active",
            documentation="1: every block of this engine is under the guard's checks.",
            labelnames=[*labels, "role", "version"],
        )
        for values in self.per_engine_labelvalues.values():
            active.labels(*values, role_of(vllm_config), __version__).set(1)
        self._violations = self._counter_cls(
            name="sekisho_guard_violations",
            documentation="Requests failed by a check of block ownership.",
            labelnames=[*labels, "kind"],
        )
        self._refused = self._counter_cls(
            name="sekisho_guard_refused",
            documentation="Requests refused before anything was reserved.",
            labelnames=[*labels, "kind"],
        )
        self._commits = self._counter_cls(
            name="sekisho_guard_commits",
            documentation="Hand-offs found whole.",
            labelnames=labels,
        )
        self._steps = self._counter_cls(
            name="sekisho_guard_steps",
            documentation="Batches that were checked.",
            labelnames=labels,
        )
        self._quarantined = self._gauge_cls(
            name="sekisho_guard_quarantined_blocks",
            documentation="Blocks given back that wait for a writer to end.",
            labelnames=labels,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if self._inner is not None and transfer_stats_data["inner"] is not None:
            self._inner.observe(transfer_stats_data["inner"], engine_idx)
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data["guard"].items():
            family, _, kind = key.partition("/")
            metric = getattr(self, f"_{family}")
            if family in _GAUGES:
                metric.labels(*engine).set(value)
            else:
                metric.labels(*engine, *([kind] if kind else [])).inc(value)
