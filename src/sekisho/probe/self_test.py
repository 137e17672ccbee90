"""The probe's own controls: does each technique catch the defect it is meant for, and is it silent
where there is none?

A technique that fails here is not believed (`doubt`). The servers come from the caller, since what
the probe judges it must not know from inside.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import msgspec

from sekisho.gate.fetch import Key
from sekisho.probe.budget import Cost
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Account, Endpoint
from sekisho.probe.exchange import Outcome
from sekisho.probe.model import Finding, Result, TechniqueResult, Verdict
from sekisho.probe.oracles import settle
from sekisho.probe.rules import RULES, Certainty
from sekisho.probe.sizes import budget_of
from sekisho.probe.stats import Interval, rate_interval
from sekisho.probe.techniques import Technique

TRIALS_MAX = 20
"""A leak that is there must show in so many questions, where it shows in the text."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A control that runs; its two keys belong to two tenants."""

    base_url: str
    model: str
    key_a: Key
    key_b: Key


Start = Callable[[], AbstractAsyncContextManager[Server]]


@dataclass(frozen=True, kw_only=True)
class Control:
    """A server with the defect that ``technique`` is to find.

    Attributes:
        report: the public report of the defect.
        start: runs it, from now to the end of the context.
    """

    technique: Technique
    defect: str
    report: str
    start: Start


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """What a technique saw of its defect.

    Attributes:
        caught: the defect was found; within `TRIALS_MAX` questions where one shows it.
        trials: of the technique.
        shown: of them, those that showed it; 0 where only all of them together do.
        rate: 0.95 interval of the two.
        first: how many questions had been asked when it first showed, by the second account where
            only that one asks; 0: never, or by a test over all.
        p: of the test that found it, adjusted.
        reason: the verdict's sentence.
    """

    technique: str
    defect: str
    report: str
    caught: bool
    trials: int
    shown: int
    rate: Interval
    first: int
    p: float | None
    reason: str

    def sentence(self) -> str:
        """For people."""
        if not self.caught:
            return f"{self.technique}: missed {self.defect} ({self.report}): {self.reason}"
        if self.p is not None and not self.shown:
            how = f"by a test over {self.trials} trials, p = {self.p:.2g}"
        else:
            how = (
                f"in {self.shown} of {self.trials} trials ({self.rate.low:.0%} to "
                f"{self.rate.high:.0%}), first at question {self.first}"
            )
        return f"{self.technique}: caught {self.defect} ({self.report}) {how}"


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """What a technique said where nothing leaks.

    Attributes:
        rate: 0.95 interval of false alarms per trial.
        reason: the verdict's sentence, or what was found.
    """

    technique: str
    silent: bool
    trials: int
    false_alarms: int
    rate: Interval
    reason: str

    def sentence(self) -> str:
        """For people."""
        if self.silent:
            return (
                f"{self.technique}: silent in {self.trials} trials without a defect (false alarms "
                f"in {self.rate.high:.1%} of them at most)"
            )
        return f"{self.technique}: not silent where there is no defect: {self.reason}"


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """All controls of a run.

    Attributes:
        untested: techniques for which there is no control with a defect.
    """

    positive: tuple[Sensitivity, ...]
    negative: tuple[Silence, ...]
    untested: tuple[str, ...] = ()

    def doubts(self) -> dict[str, str]:
        """Why a technique is not believed, by its name."""
        found = dict.fromkeys(self.untested, "its self-test has no control")
        for silence in self.negative:
            if not silence.silent:
                found[silence.technique] = "its self-test failed: it was not silent"
        for one in self.positive:
            if not one.caught:
                found[one.technique] = f"its self-test failed: it missed {one.defect}"
        return found

    def passed(self) -> bool:
        """Is every technique believed?"""
        return not self.doubts()

    def sentence(self) -> str:
        """Of the whole."""
        caught = sum(one.caught for one in self.positive)
        alarms = sum(one.false_alarms for one in self.negative)
        trials = sum(one.trials for one in self.negative)
        doubts = self.doubts()
        also = f"; not believed: {', '.join(doubts)}" if doubts else ""
        return (
            f"{'passed' if self.passed() else 'failed'}: {caught} of {len(self.positive)} "
            f"defects caught; {alarms} false alarms in {trials} trials without one{also}"
        )


async def self_test(
    controls: Sequence[Control],
    start: Start,
    techniques: Sequence[Technique],
    *,
    untested: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _line: None,
) -> SelfTest:
    """Each control with its technique; then all ``techniques`` against ``start``, which is a
    server without a defect."""
    positive = []
    for control in controls:
        progress(f"self-test: {control.technique.name} against {control.defect}")
        async with control.start() as server:
            positive.append(await _sensitivity(control, server))
    async with start() as server:
        raw = []
        for technique in techniques:
            progress(f"self-test: {technique.name} against no defect")
            raw.append((await _run(technique, server))[0])
    negative = tuple(_silence(one) for one in settle(raw).techniques)
    return SelfTest(positive=tuple(positive), negative=negative, untested=tuple(untested))


def doubt(result: Result, doubts: dict[str, str]) -> Result:
    """``result`` with techniques that are not believed as inconclusive; what they found stays, and
    a secret in an answer is proof whoever saw it."""
    return msgspec.structs.replace(
        result, techniques=tuple(_doubted(one, doubts) for one in result.techniques)
    )


def is_proof(finding: Finding) -> bool:
    """A leak that is certain."""
    rule = RULES[finding.rule]
    return rule.is_leak and rule.certainty == Certainty.CERTAIN


def _doubted(one: TechniqueResult, doubts: dict[str, str]) -> TechniqueResult:
    reason = doubts.get(one.technique)
    if reason is None or any(map(is_proof, one.findings)):
        return one
    return msgspec.structs.replace(
        one, verdict=Verdict.INCONCLUSIVE, notes=(*one.notes, f"not believed, since {reason}")
    )


async def _sensitivity(control: Control, server: Server) -> Sensitivity:
    raw, asked = await _run(control.technique, server)
    [result] = settle([raw]).techniques
    # Faults of status and counts are no catch; changed answers are, though no leak by themselves.
    caught = [one for one in result.findings if RULES[one.rule].certainty != Certainty.STRUCTURAL]
    serials = {finding.seen_in for finding in caught if finding.seen_in}
    # Where the first account asks as well, as in `Crossed`, what it asked counts too.
    counted = [serial for serial, account in asked.items() if account == "B"]
    if not serials <= set(counted):
        counted = list(asked)
    first = sum(serial <= min(serials) for serial in counted) if serials else 0
    values = [finding.p for finding in caught if finding.p is not None]
    trials = result.clean_trials + sum(result.unusable.values())
    # An answer that was searched, but is no trial, may show it too.
    shown = min(len(serials), trials)
    return Sensitivity(
        technique=control.technique.name,
        defect=control.defect,
        report=control.report,
        caught=bool(caught) and first <= TRIALS_MAX,
        trials=trials,
        shown=shown,
        rate=rate_interval(shown, trials),
        first=first,
        p=min(values, default=None),
        reason=result.sentence(),
    )


def _silence(result: TechniqueResult) -> Silence:
    """Any finding breaks it, and so does a technique that could not judge."""
    count = len(result.findings)
    trials = result.clean_trials
    judged = result.verdict != Verdict.INCONCLUSIVE
    told = "; ".join(dict.fromkeys(finding.message for finding in result.findings[:3]))
    return Silence(
        technique=result.technique,
        silent=judged and not count,
        trials=trials,
        false_alarms=count,
        rate=rate_interval(min(count, trials), trials),
        reason=told or result.sentence(),
    )


async def _run(technique: Technique, server: Server) -> tuple[TechniqueResult, dict[int, str]]:
    """Its result, not settled, and who sent what, by serial."""
    accounts = Account("A", server.key_a), Account("B", server.key_b)
    asked: dict[int, str] = {}

    def log(outcome: Outcome) -> None:
        asked[outcome.serial] = outcome.account

    budget = budget_of(technique.cost() + Cost(1))
    async with Endpoint(server.base_url, server.model, accounts, budget=budget, log=log) as found:
        return await technique.run(found, Mint(secrets.randbits(63))), asked
