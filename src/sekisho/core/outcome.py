"""The one outcome of a request, set once.

Every queue, every node, the HTTP status and the bill read this value. Rejection never edits the
request: its original length stays what it was, so that no later check measures a placeholder.
(In the incident of 2026 the verdict went to one field and ``finished()`` read another.)
"""

import enum
from dataclasses import dataclass

from sekisho.core.errors import check


class Kind(enum.StrEnum):
    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"
    FAILED = "failed"


# code -> (kind, HTTP status of an answer that has not begun)
CODES: dict[str, tuple[Kind, int]] = {
    "stop": (Kind.FINISHED, 200),
    "length": (Kind.FINISHED, 200),
    "context_length_exceeded": (Kind.REJECTED, 400),
    "queue_full": (Kind.REJECTED, 429),
    "capacity_exceeded": (Kind.REJECTED, 503),
    "not_ready": (Kind.REJECTED, 503),
    "client_gone": (Kind.ABORTED, 499),
    "shutting_down": (Kind.ABORTED, 503),
    "ownership_violation": (Kind.FAILED, 500),
    "transfer_failed": (Kind.FAILED, 502),
    "node_lost": (Kind.FAILED, 503),
    "internal_error": (Kind.FAILED, 500),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. ``code`` is one of `CODES`; ``message`` never holds prompt text."""

    code: str
    message: str = ""

    def __post_init__(self) -> None:
        check(self.code in CODES, f"unknown outcome code {self.code!r}")

    @property
    def kind(self) -> Kind:
        return CODES[self.code][0]

    @property
    def http_status(self) -> int:
        return CODES[self.code][1]


class OutcomeCell:
    """Holds the outcome of one request; the first one wins, for good."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: Outcome | None = None

    @property
    def value(self) -> Outcome | None:
        return self._value

    def settle(self, outcome: Outcome) -> bool:
        """Set the outcome if none is set; say whether this call set it."""
        if self._value is not None:
            return False
        self._value = outcome
        return True
