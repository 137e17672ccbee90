"""SARIF 2.1.0 (OASIS), for code scanning and for archives."""

import hashlib
import json
from collections import Counter
from typing import Any
from urllib.parse import quote, urlsplit

from sekisho.report.clean import one_line
from sekisho.report.model import Case, Report, RuleText, Status

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_LEVELS = {Status.ERROR: "error", Status.WARNING: "warning", Status.INCONCLUSIVE: "none"}


def sarif(report: Report) -> str:
    """One run: rules with stable ids, a result for every case that is no pass.

    What could not be judged has the kind ``open``, whose level the standard fixes as ``none``
    (3.27.9, 3.27.10); so that it is not overlooked it is a notification of the run as well.
    Fingerprints hold the rule, name and location, not the numbers: a finding stays the same one
    while its pool shrinks.
    """
    rules = [rule.rule for rule in report.rules]
    seen: Counter[str] = Counter()
    results = [_result(case, rules, seen) for case in report.cases if case.status != Status.PASS]
    open_ones = [c for c in report.cases if c.status == Status.INCONCLUSIVE and not c.waived]
    run = {
        "tool": {
            "driver": {
                "name": report.tool,
                "version": one_line(report.version),
                "rules": [_rule(rule) for rule in report.rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": not open_ones,
                "exitCode": report.exit_code,
                "exitCodeDescription": one_line(report.verdict),
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": one_line(case.message) or "unknown"}}
                    for case in open_ones
                ],
            }
        ],
        "results": results,
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


def _rule(rule: RuleText) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": rule.rule,
        "name": rule.name,
        "shortDescription": {"text": rule.text},
        "help": {"text": rule.text},
        "defaultConfiguration": {"level": _LEVELS[rule.status]},
    }
    if rule.tags:
        described["properties"] = {"tags": list(rule.tags)}
    return described


def _result(case: Case, rules: list[str], seen: Counter[str]) -> dict[str, Any]:
    identity = json.dumps([case.rule, case.name, case.location])
    seen[identity] += 1
    key = hashlib.sha256(f"{identity}{seen[identity]}".encode()).hexdigest()
    name = f"{one_line(case.name)}: " if case.name else ""
    result: dict[str, Any] = {
        "kind": "open" if case.status == Status.INCONCLUSIVE else "fail",
        "level": _LEVELS[case.status],
        # Braces and brackets are placeholders and links in a message (3.11.5, 3.11.6).
        "message": {"text": _message(name + one_line(case.message))},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": uri(case.location)}},
                "logicalLocations": [{"name": one_line(case.name) or "run", "kind": "resource"}],
            }
        ],
        "partialFingerprints": {"sekisho/v1": key},
    }
    if case.rule:
        result["ruleId"] = case.rule
        if case.rule in rules:
            result["ruleIndex"] = rules.index(case.rule)
    if case.details:
        result["properties"] = {one_line(name): one_line(value) for name, value in case.details}
    if case.waived:
        result["suppressions"] = [
            {"kind": "external", "status": "accepted", "justification": one_line(case.waived)}
        ]
    return result


def _message(value: str) -> str:
    for mark in "{}":
        value = value.replace(mark, mark * 2)
    for mark in "\\[]":
        value = value.replace(mark, "\\" + mark)
    return value


def uri(location: str) -> str:
    """A URI reference (RFC 3986) for a URL, a file or the name of an option."""
    shown = one_line(location) or "sekisho"
    try:
        parts = urlsplit(shown)
        if parts.scheme in {"http", "https"} and parts.hostname:
            host = quote(parts.netloc, safe=":[]")
            return f"{parts.scheme}://{host}{quote(parts.path, safe='/')}"
    except ValueError:
        pass
    return quote(shown, safe="/")
