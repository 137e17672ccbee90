"""From the gate's result to the cases that a format shows."""

from sekisho.gate.model import Finding, Result, Severity
from sekisho.gate.rules import RULES
from sekisho.report import Case, Report, RuleText, Status, Table

_VERDICTS = {
    0: "every advertised window is held",
    1: "a window or a rule is broken",
    3: "inconclusive: something could not be judged, which is no pass",
}


def report_of(result: Result) -> Report:
    """The report of a run; not green wherever ``result.exit_code()`` is not 0."""
    cases = [_case(finding) for finding in result.findings]
    cases += _unread(result)
    if not result.capacities:
        cases.append(
            Case(
                name="run",
                status=Status.INCONCLUSIVE,
                message="no capacity was judged",
                rule="GATE003",
            )
        )
    cases += _held(result)
    waived = result.waived()
    verdict = _VERDICTS[result.exit_code()] + (f"; {waived} waived" if waived else "")
    return Report(
        tool="sekisho gate",
        version=result.version,
        created=result.created,
        verdict=verdict,
        exit_code=result.exit_code(),
        cases=cases,
        rules=[
            RuleText(
                rule=rule.id, name=rule.name, text=rule.help, status=Status(rule.default_severity)
            )
            for rule in RULES.values()
        ],
        tables=[_windows(result), _capacities(result)],
    )


def _case(finding: Finding) -> Case:
    message = finding.message
    if finding.report:
        message += f" [{finding.report}]"
    waived = ""
    if finding.waived_until:
        waived = f"until {finding.waived_until}: {finding.waived_because}"
    return Case(
        name=finding.model,
        status=Status(finding.severity),
        message=message,
        rule=finding.rule,
        location=finding.source,
        waived=waived,
    )


def _unread(result: Result) -> list[Case]:
    """Engines that were not read and that no open finding names: a waiver hides none of them."""
    told = {
        f.source for f in result.findings if not f.waived_until and f.severity != Severity.WARNING
    }
    return [
        Case(
            name=unread.model,
            status=Status.INCONCLUSIVE,
            message=unread.reason,
            rule="GATE003",
            location=unread.source,
        )
        for unread in result.unread
        if unread.source not in told
    ]


def _held(result: Result) -> list[Case]:
    """A pass for every model whose window is held and about which nothing else is open."""
    open_ones = {
        f.model for f in result.findings if not f.waived_until and f.severity != Severity.WARNING
    }
    return [
        Case(
            name=model,
            status=Status.PASS,
            message=f"{result.servable[model]:,} tokens served of {window:,} advertised",
        )
        for model, window in result.advertised.items()
        if result.servable.get(model, -1) >= window and model not in open_ones
    ]


def _windows(result: Result) -> Table:
    models = dict.fromkeys([*result.advertised, *result.servable])
    return Table(
        title="Windows (tokens)",
        columns=("model", "advertised", "servable"),
        rows=[
            (m, _number(result.advertised.get(m)), _number(result.servable.get(m))) for m in models
        ],
    )


def _capacities(result: Result) -> Table:
    return Table(
        title="What decides",
        columns=("model", "role", "servable", "engine", "rank", "because"),
        rows=[
            (c.model, c.role, _number(c.servable), c.source, c.rank, c.because)
            for c in result.capacities
        ],
    )


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
