"""``--watch``: check again and again, and export what was found as Prometheus metrics.

A pool is sized at each start from the memory that is free then, so that a deployment which held
yesterday may not hold after a restart.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sekisho.gate.model import GateError, Result
from sekisho.gate.run import Plan, check_async


class ResultMetrics(Collector):
    """The last result as metrics. Nothing of an earlier one stays: a series that is gone is gone.

    Before the first result there are no series at all, so that an alert on absence works.
    """

    def __init__(self) -> None:
        self.result: Result | None = None
        self.checked_at = 0.0

    def collect(self) -> Iterator[Metric]:
        result = self.result
        if result is None:
            return
        code = result.exit_code()
        yield GaugeMetricFamily(
            "sekisho_gate_holds", "1 if every advertised window is held, else 0", int(code == 0)
        )
        yield GaugeMetricFamily(
            "sekisho_gate_exit_code", "0 holds, 1 finding, 3 inconclusive", code
        )
        yield GaugeMetricFamily(
            "sekisho_gate_last_check_timestamp_seconds", "Unix time of the check", self.checked_at
        )
        yield GaugeMetricFamily(
            "sekisho_gate_unread_engines", "Engines that could not be read", len(result.unread)
        )
        advertised = GaugeMetricFamily(
            "sekisho_gate_advertised_tokens", "The largest claimed window", labels=["model"]
        )
        for model, window in result.advertised.items():
            advertised.add_metric([model], window)
        yield advertised
        servable = GaugeMetricFamily(
            "sekisho_gate_servable_tokens",
            "The longest request that the role's smallest rank holds",
            labels=["model", "role"],
        )
        for capacity in result.capacities:
            servable.add_metric([capacity.model, capacity.role], capacity.servable)
        yield servable
        yield _findings(result)


def _findings(result: Result) -> Metric:
    counts: dict[tuple[str, str, str], int] = {}
    for finding in result.findings:
        waived = "true" if finding.waived_until else "false"
        labels = (finding.rule, finding.severity.value, waived)
        counts[labels] = counts.get(labels, 0) + 1
    family = GaugeMetricFamily(
        "sekisho_gate_findings", "Findings of the check", labels=["rule", "severity", "waived"]
    )
    for labels, count in counts.items():
        family.add_metric(list(labels), count)
    return family


async def watch(
    plan: Plan, every_s: float, host: str, port: int, told: Callable[[Result], None]
) -> int:
    """Check every ``every_s`` seconds until SIGINT or SIGTERM; the exit code of the last result.

    ``told`` is called with each result. ``port`` 0: no metrics are served.

    Raises:
        GateError: the plan cannot be run, or the port cannot be bound.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    metrics = ResultMetrics()
    close = _serve(metrics, host, port) if port else _nothing
    try:
        while True:
            metrics.result = await check_async(plan)
            metrics.checked_at = time.time()
            told(metrics.result)
            try:
                async with asyncio.timeout(every_s):
                    await stop.wait()
            except TimeoutError:
                continue
            return metrics.result.exit_code()
    finally:
        close()


def _serve(metrics: ResultMetrics, host: str, port: int) -> Callable[[], None]:
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise GateError(f"cannot bind {host} port {port}: {error.strerror or error}") from None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close


def _nothing() -> None:
    pass
