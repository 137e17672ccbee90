"""The result as JSON, for programs."""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from sekisho.probe import aisvs
from sekisho.probe.exchange import Outcome
from sekisho.probe.model import Finding, Result, TechniqueResult
from sekisho.probe.output.about import About
from sekisho.probe.output.cases import verdict
from sekisho.probe.output.evidence import Excerpt, Shown, evidence
from sekisho.probe.rules import RULES

SCHEMA = "sekisho-probe/1"
"""Fields are added under one number; where one goes or changes its meaning, the number grows."""


def as_json(result: Result, about: About, exchanges: Mapping[int, Outcome]) -> str:
    """One object, in ASCII with every control character escaped::

        schema      `SCHEMA`
        verdict     the run in one sentence
        exit_code   0, 1 or 3
        about       the fields of `About`
        aisvs       {version, commit} of the standard that findings name controls of
        techniques  [the fields of `TechniqueResult`, with ``sentence``; each of its findings with
                     rule_name, certainty, is_leak, help, aisvs: [number],
                     evidence: {seen, planted}, each null or
                       {serial, account, outcome, place, prompt, received}, the last two as
                       {before, pieces: [{text, marked}], after}; before and after count the
                       characters that are left out]
        not_run     [techniques that were planned and did not run]

    A number that JSON cannot hold is null.
    """
    whole = {
        "schema": SCHEMA,
        "verdict": verdict(result),
        "exit_code": result.exit_code(),
        "about": msgspec.to_builtins(about),
        "aisvs": {"version": aisvs.VERSION, "commit": aisvs.COMMIT},
        "techniques": [_technique(one, exchanges) for one in result.techniques],
        "not_run": list(result.not_run),
    }
    return json.dumps(_finite(whole), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _technique(one: TechniqueResult, exchanges: Mapping[int, Outcome]) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(one)
    found["sentence"] = one.sentence()
    found["findings"] = [_finding(finding, exchanges) for finding in one.findings]
    return found


def _finding(finding: Finding, exchanges: Mapping[int, Outcome]) -> dict[str, Any]:
    rule = RULES[finding.rule]
    both = evidence(finding, exchanges)
    found: dict[str, Any] = msgspec.to_builtins(finding)
    return found | {
        "rule_name": rule.name,
        "certainty": rule.certainty.value,
        "is_leak": rule.is_leak,
        "help": rule.help,
        "aisvs": list(aisvs.controls(finding.rule)),
        "evidence": {"seen": _shown(both.seen), "planted": _shown(both.planted)},
    }


def _shown(shown: Shown | None) -> dict[str, Any] | None:
    if shown is None:
        return None
    prompt, received = _excerpt(shown.prompt), _excerpt(shown.received)
    return shown._asdict() | {"prompt": prompt, "received": received}


def _excerpt(cut: Excerpt) -> dict[str, Any]:
    return {
        "before": cut.before,
        "pieces": [piece._asdict() for piece in cut.pieces],
        "after": cut.after,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
