"""What the probe says. Ids and numbers only: what was planted and received lies in the exchanges.

Every struct is JSON-able as it stands and never holds a key.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from sekisho.probe.exchange import Answer, Inconclusive, Outcome, Refused
from sekisho.probe.power import PowerPoint
from sekisho.probe.rules import RULES
from sekisho.probe.stats import CONFIDENCE, rate_caught


class Verdict(StrEnum):
    """Of one technique. There is no "secure": trials without a hit exclude a rate, not a fault."""

    LEAK = "leak"
    NO_LEAK_SEEN = "no leak seen"
    INCONCLUSIVE = "inconclusive"


class Span(msgspec.Struct, frozen=True):
    """Where in an exchange: which of its ``texts()``, and the characters from start to end."""

    text: int
    start: int
    end: int


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One broken rule.

    Attributes:
        rule: a key of `rules.RULES`.
        message: one sentence, without a secret.
        seen_in: serial of the exchange that shows it; 0 where many together do.
        planted_in: serial of the exchange that sent the secret, or 0.
        canary: serial of the secret, or 0.
        bits, chance: of a certain one: the entropy that was matched, and how often chance alone
            would show as much in the whole run.
        p: of a statistical one, adjusted for all tests of the run.
        observed, expected: two numbers that were compared.
        report: a public report of such a fault, as ``project#number``, or empty.
    """

    rule: str
    technique: str
    message: str
    seen_in: int = 0
    planted_in: int = 0
    canary: int = 0
    span: Span | None = None
    bits: float = 0.0
    chance: float = 0.0
    p: float | None = None
    observed: int | None = None
    expected: int | None = None
    report: str = ""


class TestRun(msgspec.Struct, frozen=True, kw_only=True):
    """A statistical test that was made, whatever it showed.

    All of a run's are adjusted together (`oracles.settle`), so none may be left out.

    Attributes:
        p: before that.
        effect: in the test's own unit, stated by ``message``.
    """

    __test__ = False  # it is none of pytest's

    rule: str
    technique: str
    p: float
    effect: float
    message: str
    report: str = ""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One question of a known length, for the map of leaks by length. It leaked where a finding
    of a leak is seen in exchange ``serial``."""

    tokens: int
    serial: int
    outcome: Literal["answered", "refused", "inconclusive"]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token, where the other's prefix could be hit and where it could not."""

    hits_s: tuple[float, ...]
    misses_s: tuple[float, ...]


class TechniqueResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one technique did and saw.

    Attributes:
        clean_trials: trials that could have shown a leak, and did not.
        unusable: sentences, and how many trials failed with each; such a trial shows nothing.
        rate_caught: the smallest rate of leaks per trial that the clean ones exclude with
            confidence 0.95; 1.0 where they exclude none.
        sensitivity: the share of leaks that a trial is taken to notice.
        not_offered: parts of a technique that this endpoint refuses as such; they were not tried.
        points, times, own_times, power: for figures, of the techniques that have them;
            ``own_times`` are those of the first account with its own prefix.
        notes: what else the verdict rests on; parts of its sentence.
    """

    technique: str
    verdict: Verdict
    clean_trials: int
    unusable: dict[str, int]
    rate_caught: float
    sensitivity: float
    findings: tuple[Finding, ...]
    tests: tuple[TestRun, ...] = ()
    points: tuple[Point, ...] = ()
    times: Times | None = None
    own_times: Times | None = None
    power: tuple[PowerPoint, ...] = ()
    notes: tuple[str, ...] = ()
    not_offered: tuple[str, ...] = ()

    def sentence(self) -> str:
        """The verdict with what it rests on."""
        unusable = sum(self.unusable.values())
        also = f"; {unusable} more could not be used" if unusable else ""
        also += f"; not offered here: {', '.join(self.not_offered)}" if self.not_offered else ""
        noted = "".join(f"; {note}" for note in self.notes)
        also += noted
        if self.verdict == Verdict.LEAK:
            count = sum(RULES[f.rule].is_leak for f in self.findings)
            return f"leak: {count} finding{'s' if count > 1 else ''}{noted}"
        if self.verdict == Verdict.INCONCLUSIVE:
            return f"inconclusive: {self.clean_trials} usable trials{also}"
        noticed = "" if self.sensitivity == 1 else f", if {self.sensitivity:.0%} of leaks show"
        return (
            f"no leak seen in {self.clean_trials} trials: a leak in {self.rate_caught:.2%} of them "
            f"or more would have been caught with {CONFIDENCE:.0%} confidence{noticed}{also}"
        )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. ``not_run``: names of techniques that were planned and did not run."""

    techniques: tuple[TechniqueResult, ...]
    not_run: tuple[str, ...] = ()

    def exit_code(self) -> int:
        """0: no leak seen and nothing found. 1: a finding. 3: something could not be judged."""
        if any(one.findings for one in self.techniques):
            return 1
        judged = [one for one in self.techniques if one.verdict != Verdict.INCONCLUSIVE]
        return 0 if judged and len(judged) == len(self.techniques) and not self.not_run else 3


def point(tokens: int, outcome: Outcome) -> Point:
    """Of a question that has about ``tokens`` tokens."""
    kind: Literal["answered", "refused", "inconclusive"] = "inconclusive"
    if isinstance(outcome, Answer):
        kind = "answered"
    elif isinstance(outcome, Refused):
        kind = "refused"
    return Point(tokens=tokens, serial=outcome.serial, outcome=kind)


def conclude(
    technique: str,
    trials: Sequence[Outcome],
    findings: Sequence[Finding],
    *,
    tests: tuple[TestRun, ...] = (),
    sensitivity: float = 1.0,
    unplanted: dict[str, int] | None = None,
) -> TechniqueResult:
    """The verdict over ``trials``, the outcomes in which a leak could have shown.

    What is inconclusive is no clean trial: a broken answer never counts towards "no leak seen",
    and where more than half of the trials are unusable, the rest is not representative.

    Args:
        unplanted: trials that were not made because planting failed, by reason.
    """
    unusable = dict(unplanted or {})
    for outcome in trials:
        if isinstance(outcome, Inconclusive):
            unusable[outcome.reason] = unusable.get(outcome.reason, 0) + 1
    clean = sum(not isinstance(outcome, Inconclusive) for outcome in trials)
    rate = rate_caught(clean, sensitivity=sensitivity)
    if any(RULES[finding.rule].is_leak for finding in findings):
        verdict = Verdict.LEAK
    elif rate >= 1 or sum(unusable.values()) > clean:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.NO_LEAK_SEEN
    return TechniqueResult(
        technique=technique,
        verdict=verdict,
        clean_trials=clean,
        unusable=unusable,
        rate_caught=rate,
        sensitivity=sensitivity,
        findings=tuple(findings),
        tests=tests,
    )
