"""What the guard tells: evidence in the log, counts that travel with vLLM's own statistics.

Evidence is one JSON object a line after ``sekisho evidence``: ids and numbers, never text. Counts
are collected in the scheduler and reach ``/metrics`` in the API server (`metrics.py`).
"""

import logging
from collections import Counter
from collections.abc import Sequence

from sekisho.core.errors import Evidence
from sekisho.guard.evidence import evidence_line

log = logging.getLogger("vllm.sekisho")  # vLLM sets up handlers for its own name alone


class Report:
    """Counts since the last `take`, of one scheduler.

    Keys are ``violations/KIND``, ``refused/KIND``, ``commits`` and ``steps``; ``quarantined`` is
    the number now.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self._counts: Counter[str] = Counter()
        self._quarantined = self._told = 0

    def violation(self, name: str, evidence: Sequence[Evidence], at: str) -> None:
        """A request failed: say why, at most 16 pages of it."""
        self._counts[f"violations/{evidence[0].kind}"] += 1
        log.error("%s", evidence_line(name, self.role, evidence, at))

    def refused(self, name: str, kind: str, reason: str) -> None:
        """A request ends before anything is reserved for it."""
        log.warning("sekisho: refused %s (%s): %s", name, kind, reason)
        self._counts[f"refused/{kind}"] += 1

    def commit(self) -> None:
        self._counts["commits"] += 1

    def step(self) -> None:
        self._counts["steps"] += 1

    def quarantined(self, pages: int) -> None:
        self._quarantined = pages

    def take(self) -> dict[str, int]:
        """What is new since the last call; empty if nothing is."""
        if not self._counts and self._quarantined == self._told:
            return {}
        out = dict(self._counts) | {"quarantined": self._quarantined}
        self._counts.clear()
        self._told = self._quarantined
        return out
