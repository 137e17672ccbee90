"""The gate over the named servers, before the first request is taken."""

from collections.abc import Sequence

from sekisho.gate.judge import judge, utc_now
from sekisho.gate.model import Claim, Finding, Severity
from sekisho.gate.policy import Policy
from sekisho.gateway.engines.replica import Examined, Replica

_GUARDED = frozenset({"sglang#30233", "sglang#28651"})
"""Faults of versions that an active guard closes; nobody serves without one."""


def refusal(window: int, prompt_max: int, fleet: Sequence[tuple[Replica, Examined]]) -> str:
    """Why ``window`` must not be advertised over ``fleet``, in one line that names the server;
    empty if it may.

    ``prompt_max``: longest prompt that the gateway lets through. What an engine advertises itself
    is judged too: some other client may believe it.
    """
    for replica, examined in fleet:
        if examined.held < window:
            return f"{replica.name}: holds {examined.held} tokens, the window is {window}"
    readings = [examined.reading for _, examined in fleet]
    claims = [
        Claim(model=model, window=window, source="window", prompt_max=prompt_max)
        for model in dict.fromkeys(reading.model for reading in readings)
    ]
    result = judge(readings, [], claims, Policy(now=utc_now(), margin=0.0))
    return "; ".join(_line(f) for f in result.findings if _counts(f))


def _counts(finding: Finding) -> bool:
    return finding.severity is not Severity.WARNING and finding.report not in _GUARDED


def _line(finding: Finding) -> str:
    return f"{finding.source}: {finding.message}" if finding.source else finding.message
