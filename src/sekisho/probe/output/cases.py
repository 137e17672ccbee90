"""From the probe's result to the cases that a format shows.

A finding is an error whatever its rule, for any of them ends the process with 1; what could not
be judged is no pass.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from sekisho.probe import aisvs
from sekisho.probe.exchange import Outcome
from sekisho.probe.model import Finding, Result, TechniqueResult, Verdict
from sekisho.probe.output.about import About
from sekisho.probe.output.evidence import Shown, evidence, plain
from sekisho.probe.rules import RULES, Certainty
from sekisho.report import Case, Report, RuleText, Status, Table

TOOL = "sekisho probe"
NOT_JUDGED = RuleText(
    rule="PROBE000",
    name="not-judged",
    text="A technique could not judge the endpoint. That is no pass: it says nothing either way.",
    status=Status.INCONCLUSIVE,
)
"""No finding has it; it is what a pipeline sees where there is no verdict."""
_ORDER = {kind: place for place, kind in enumerate(Certainty)}
_ALIKE_MAX = 3
"""Of one rule and technique, so many findings are told apart where people read."""


def verdict(result: Result) -> str:
    """The run in one sentence."""
    count = len(result.techniques)
    leaks = [one for one in result.techniques if one.verdict == Verdict.LEAK]
    unclear = [one for one in result.techniques if one.verdict == Verdict.INCONCLUSIVE]
    findings = sum(len(one.findings) for one in result.techniques)
    also = f"; {len(unclear)} could not judge" if unclear else ""
    also += f"; not run: {', '.join(result.not_run)}" if result.not_run else ""
    if leaks:
        names = ", ".join(one.technique for one in leaks)
        return f"leak, seen by {len(leaks)} of {count} techniques: {names}{also}"
    if findings:
        return f"no leak seen, but {findings} fault{'s' if findings > 1 else ''} found{also}"
    if not count:
        return f"inconclusive: no technique was run{also}"
    if unclear or result.not_run:
        return f"inconclusive: {count - len(unclear)} of {count} techniques saw no leak{also}"
    return f"no leak seen by {count} techniques; each says which rate of leaks it would have caught"


def ordered(result: Result) -> list[Finding]:
    """All findings: certain ones first, leaks before what leads there."""
    found = [finding for one in result.techniques for finding in one.findings]
    return sorted(
        found, key=lambda f: (not RULES[f.rule].is_leak, _ORDER[RULES[f.rule].certainty], f.rule)
    )


def few(result: Result, alike_max: int) -> tuple[list[Finding], list[tuple[str, str, int]]]:
    """`ordered`, with at most so many of one rule and technique; and, as rule, technique and
    count, how many of which are left out."""
    alike: Counter[tuple[str, str]] = Counter()
    shown = []
    for finding in ordered(result):
        kind = finding.rule, finding.technique
        alike[kind] += 1
        if alike[kind] <= alike_max:
            shown.append(finding)
    hidden = [(*kind, count - alike_max) for kind, count in alike.items() if count > alike_max]
    return shown, hidden


def by_finding(
    result: Result, about: About, exchanges: Mapping[int, Outcome], *, every: bool
) -> Report:
    """A case for each finding, and one for each technique that has none.

    Args:
        every: also of those of one rule and technique that are much like the others.
    """
    shown, hidden = (ordered(result), []) if every else few(result, _ALIKE_MAX)
    cases = [_case(finding, about, exchanges) for finding in shown]
    for rule, technique, count in hidden:
        message = f"{count:,} more findings like these; json and sarif hold all"
        cases.append(Case(name=technique, status=Status.ERROR, message=message, rule=rule))
    cases += [_technique(one, about) for one in result.techniques if _is_told(one)]
    return _report(result, about, cases)


def by_technique(result: Result, about: About, exchanges: Mapping[int, Outcome]) -> Report:
    """One case for each technique, for formats that count tests."""
    cases = []
    for one in result.techniques:
        case = _technique(one, about)
        if one.findings:
            shown = ordered(Result(techniques=(one,)))[:_ALIKE_MAX]
            details = [pair for finding in shown for pair in _details(finding, exchanges)]
            rules = sorted({finding.rule for finding in one.findings})
            told = "; ".join(finding.message for finding in shown)
            more = len(one.findings) - len(shown)
            case = Case(
                name=one.technique,
                status=Status.ERROR,
                message=f"{one.sentence()}: {told}" + (f"; and {more:,} more" if more else ""),
                rule=" ".join(rules),
                location=about.base_url,
                details=tuple(details),
            )
        cases.append(case)
    return _report(result, about, cases)


def numbers(finding: Finding) -> list[tuple[str, str]]:
    """How sure it is, by name and value; p-values and chances with two digits."""
    rule = RULES[finding.rule]
    told = [("certainty", rule.certainty.value)]
    if finding.bits:
        told += [("matched", f"{finding.bits:.0f} bits"), ("chance", f"{finding.chance:.1e}")]
    if finding.p is not None:
        told.append(("p, adjusted for all tests of the run", f"{finding.p:.1e}"))
    if finding.observed is not None:
        told.append(("observed", f"{finding.observed:,}"))
    if finding.expected is not None:
        told.append(("expected", f"{finding.expected:,}"))
    if finding.report:
        told.append(("report of such a fault", finding.report))
    if aisvs.controls(finding.rule):
        listed = ", ".join(map(aisvs.identifier, aisvs.controls(finding.rule)))
        told.append(("OWASP AISVS", listed))
    return told


def _report(result: Result, about: About, cases: list[Case]) -> Report:
    lost = [(name, "was planned and did not run") for name in result.not_run]
    if not result.techniques:
        lost.append(("run", "no technique was run"))
    cases += [
        Case(
            name=name,
            status=Status.INCONCLUSIVE,
            message=message,
            rule=NOT_JUDGED.rule,
            location=about.base_url,
        )
        for name, message in lost
    ]
    techniques = Table(
        title="Techniques",
        columns=("technique", "verdict"),
        rows=[(one.technique, one.sentence()) for one in result.techniques],
    )
    return Report(
        tool=TOOL,
        version=about.version,
        created=about.started,
        verdict=verdict(result),
        exit_code=result.exit_code(),
        cases=cases,
        rules=[NOT_JUDGED, *(_rule(name) for name in RULES)],
        tables=[techniques, Table(title="Run", columns=("what", "value"), rows=list(about.rows()))],
    )


def _rule(name: str) -> RuleText:
    rule = RULES[name]
    kind = "leak" if rule.is_leak else "fault"
    controls = tuple(f"OWASP-AISVS-{aisvs.identifier(one)}" for one in aisvs.controls(name))
    return RuleText(
        rule=rule.id,
        name=rule.name,
        text=rule.help,
        status=Status.ERROR,
        tags=(kind, rule.certainty.value, *controls),
    )


def _is_told(one: TechniqueResult) -> bool:
    return not one.findings or one.verdict == Verdict.INCONCLUSIVE


def _technique(one: TechniqueResult, about: About) -> Case:
    """A pass only where the technique judged and found nothing."""
    unclear = one.verdict == Verdict.INCONCLUSIVE
    reasons = tuple(
        ("not usable", f"{count:,} times: {reason}") for reason, count in one.unusable.items()
    )
    return Case(
        name=one.technique,
        status=Status.INCONCLUSIVE if unclear else Status.PASS,
        message=one.sentence(),
        rule=NOT_JUDGED.rule if unclear else "",
        location=about.base_url,
        details=reasons,
    )


def _case(finding: Finding, about: About, exchanges: Mapping[int, Outcome]) -> Case:
    return Case(
        name=finding.technique,
        status=Status.ERROR,
        message=finding.message,
        rule=finding.rule,
        location=about.base_url,
        details=tuple(_details(finding, exchanges)),
    )


def _details(finding: Finding, exchanges: Mapping[int, Outcome]) -> Iterator[tuple[str, str]]:
    yield "rule", f"{RULES[finding.rule].name}: {RULES[finding.rule].help}"
    yield from numbers(finding)
    both = evidence(finding, exchanges)
    if both.seen is not None:
        yield from _side("seen in", both.seen)
    if both.planted is not None:
        yield from _side("planted in", both.planted)


def _side(name: str, shown: Shown) -> Iterator[tuple[str, str]]:
    yield name, f"request {shown.serial} of account {shown.account}, {shown.outcome}"
    yield f"{name}, prompt", plain(shown.prompt)
    yield f"{name}, received ({shown.place})", plain(shown.received)
