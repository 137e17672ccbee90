"""What the guard tells: evidence in the log, counts beside SGLang's own on ``/metrics``.

Evidence is one JSON object a line after ``sekisho evidence``: ids and numbers, never text.
"""

import logging
import os
from collections.abc import Sequence

from sekisho.core.errors import Evidence
from sekisho.guard.evidence import evidence_line

log = logging.getLogger("sekisho.guard")


class Report:
    """Counters of one scheduler process; made after SGLang has set up prometheus-client."""

    def __init__(self, role: str) -> None:
        # Not at import: prometheus-client reads its directory of processes when it is imported.
        from prometheus_client import Counter, Gauge

        self._role = role
        labels = ["role", "kind"]
        self._violations = Counter(
            "sekisho_guard_violations", "Requests failed by a check of page ownership.", labels
        )
        self._refused = Counter(
            "sekisho_guard_refused", "Requests refused before anything was reserved.", labels
        )
        self._commits = Counter("sekisho_guard_commits", "Hand-offs found whole.", ["role"])
        self._steps = Counter("sekisho_guard_steps", "Forward batches that were checked.", ["role"])
        shared = {"multiprocess_mode": "mostrecent"} if _many_processes() else {}
        self._quarantined = Gauge(
            "sekisho_guard_quarantined_pages",
            "Pages given back that wait for a writer or reader to end.",
            ["role"],
            **shared,  # type: ignore[arg-type]
        )

    def violation(self, name: str, evidence: Sequence[Evidence], at: str) -> None:
        """A request failed: say why, at most 16 pages of it."""
        self._violations.labels(self._role, evidence[0].kind).inc()
        log.error("%s", evidence_line(name, self._role, evidence, at))

    def refused(self, kind: str) -> None:
        self._refused.labels(self._role, kind).inc()

    def commit(self) -> None:
        self._commits.labels(self._role).inc()

    def step(self) -> None:
        self._steps.labels(self._role).inc()

    def quarantined(self, pages: int) -> None:
        self._quarantined.labels(self._role).set(pages)


def _many_processes() -> bool:
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ
