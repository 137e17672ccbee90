"""What is asked for beyond the rules: the margin, and waivers."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from sekisho.gate.model import Finding, Severity
from sekisho.gate.rules import RULES

MARGIN = 2.0
"""Windows that the smallest pool should hold: what the cloud of the 2026 incident settled on."""


class Waiver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An accepted finding: which rule, until which day (inclusive), and why.

    ``model`` and ``source`` narrow it; empty means any.
    """

    rule: str
    until: datetime.date
    because: str
    model: str = ""
    source: str = ""

    def covers(self, finding: Finding) -> bool:
        """It is about this finding, be it expired or not."""
        return (
            finding.rule == self.rule
            and self.model in ("", finding.model)
            and self.source in ("", finding.source)
        )

    def fault(self) -> str:
        """Why it is no waiver, or nothing."""
        if self.rule not in RULES:
            return f"{self.rule!r} is no rule"
        if self.rule in ("GATE003", "GATE009", "GATE010"):
            return f"{self.rule} cannot be waived"
        if not self.because.strip():
            return "because is empty: say why it is accepted"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """``margin`` in windows; ``now`` with a time zone decides which waivers have expired."""

    now: datetime.datetime
    margin: float = MARGIN
    margin_is_required: bool = False
    waivers: Sequence[Waiver] = field(default=())

    def waive(self, findings: Sequence[Finding]) -> list[Finding]:
        """Mark what is covered; add what is wrong with the waivers themselves."""
        today = self.now.date()
        marked = [self._marked(finding, today) for finding in findings]
        for waiver in self.waivers:
            if waiver.until < today:
                text = f"the waiver of {waiver.rule} ended on {waiver.until}: {waiver.because}"
                marked.append(_about(waiver, "GATE009", text))
            elif not any(waiver.covers(finding) for finding in findings):
                text = f"the waiver of {waiver.rule} covers nothing: {waiver.because}"
                marked.append(_about(waiver, "GATE010", text))
        return marked

    def _marked(self, finding: Finding, today: datetime.date) -> Finding:
        for waiver in self.waivers:
            if waiver.until >= today and waiver.covers(finding):
                return msgspec.structs.replace(
                    finding,
                    waived_until=waiver.until.isoformat(),
                    waived_because=waiver.because,
                )
        return finding


def _about(waiver: Waiver, rule: str, message: str) -> Finding:
    severity: Severity = RULES[rule].default_severity
    return Finding(
        rule=rule, severity=severity, model=waiver.model, source=waiver.source, message=message
    )
