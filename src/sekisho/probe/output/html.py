"""The result as one page that needs nothing else: no network, no script.

What an endpoint sent is hostile: the template escapes all of it, and `sekisho.report.page` shows
what cannot be seen. Equal values give equal bytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sekisho.probe import aisvs
from sekisho.probe.exchange import Outcome
from sekisho.probe.model import Finding, Result, TechniqueResult, Verdict
from sekisho.probe.output import figures
from sekisho.probe.output.about import About
from sekisho.probe.output.cases import few, numbers, verdict
from sekisho.probe.output.evidence import evidence
from sekisho.probe.rules import RULES
from sekisho.probe.stats import CONFIDENCE
from sekisho.report.page import environment

_TEMPLATES = Path(__file__).parent / "templates"
_ALIKE_MAX = 5
"""Findings of one rule and technique that are shown in full."""
_TONES = {
    Verdict.LEAK: ("bad", "LEAK"),
    Verdict.NO_LEAK_SEEN: ("calm", "NO LEAK SEEN"),
    Verdict.INCONCLUSIVE: ("doubt", "UNCLEAR"),
}


def html(result: Result, about: About, exchanges: Mapping[int, Outcome]) -> str:
    """The page as text."""
    shown, hidden = few(result, _ALIKE_MAX)
    tone, stamp = _lead(result)
    return (
        environment(_TEMPLATES)
        .get_template("probe.html")
        .render(
            about=about,
            tone=tone,
            stamp=stamp,
            verdict=verdict(result),
            techniques=[_technique(one) for one in result.techniques],
            not_run=result.not_run,
            findings=[_finding(one, exchanges, place) for place, one in enumerate(shown, 1)],
            hidden=hidden,
            maps=_drawn(result, figures.leak_map),
            times=_times(result),
            powers=_drawn(result, figures.power_chart),
            lanes=figures.LANES,
            lane_height=figures.LANE_HEIGHT,
            frame=figures,
            controls=_controls(result),
            aisvs=aisvs,
            confidence=f"{CONFIDENCE:.0%}",
        )
    )


def _lead(result: Result) -> tuple[str, str]:
    """Tone and stamp; a fault without a leak is no calm."""
    code = result.exit_code()
    if any(one.verdict == Verdict.LEAK for one in result.techniques):
        return _TONES[Verdict.LEAK]
    if code == 1:
        return "doubt", "FAULTS"
    return _TONES[Verdict.NO_LEAK_SEEN if code == 0 else Verdict.INCONCLUSIVE]


def _technique(one: TechniqueResult) -> dict[str, Any]:
    tone, _ = _TONES[one.verdict]
    excludes = one.verdict == Verdict.NO_LEAK_SEEN
    return {
        "name": one.technique,
        "tone": tone,
        "verdict": one.verdict.value,
        "sentence": one.sentence(),
        "clean": f"{one.clean_trials:,}",
        "unusable": sorted(one.unusable.items(), key=lambda pair: -pair[1]),
        "rate": f"{one.rate_caught:.2%} or more" if excludes else "none",
        "findings": len(one.findings),
        "tests": [(test.message, f"{test.p:.2g}", test.rule) for test in one.tests],
    }


def _finding(finding: Finding, exchanges: Mapping[int, Outcome], place: int) -> dict[str, Any]:
    rule = RULES[finding.rule]
    both = evidence(finding, exchanges)
    sides = [("planted", "sent by", both.planted), ("seen", "received by", both.seen)]
    return {
        "place": place,
        "rule": rule,
        "technique": finding.technique,
        "message": finding.message,
        "numbers": numbers(finding),
        "sides": [(kind, words, side) for kind, words, side in sides if side is not None],
    }


def _drawn(result: Result, draw: Any) -> list[tuple[str, Any]]:
    """Name and figure of each technique that has one."""
    found = [(one.technique, draw(one)) for one in result.techniques]
    return [(name, figure) for name, figure in found if figure is not None]


def _times(result: Result) -> list[tuple[str, figures.Chart]]:
    found = []
    for one in result.techniques:
        for kind, times in (
            ("The other account's prefix", one.times),
            ("The account's own prefix", one.own_times),
        ):
            chart = figures.time_chart(times) if times is not None else None
            if chart is not None:
                found.append((f"{kind} ({one.technique})", chart))
    return found


def _controls(result: Result) -> list[tuple[str, str, str]]:
    """Number, words and rules of each control that a finding speaks against."""
    broken = {finding.rule for one in result.techniques for finding in one.findings}
    return [
        (
            aisvs.identifier(number),
            words,
            ", ".join(sorted(rule for rule in broken if number in aisvs.controls(rule))),
        )
        for number, words in aisvs.CONTROLS.items()
        if any(number in aisvs.controls(rule) for rule in broken)
    ]
