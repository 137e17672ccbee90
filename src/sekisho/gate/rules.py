"""The rules by stable id: what SARIF, the docs and waivers name."""

import msgspec

from sekisho.gate.model import Severity


class Rule(msgspec.Struct, frozen=True):
    """``name`` is a slug, ``help`` one sentence; the severity can be raised by an option."""

    id: str
    name: str
    help: str
    default_severity: Severity


_E, _W, _I = Severity.ERROR, Severity.WARNING, Severity.INCONCLUSIVE

RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(
            "GATE001",
            "window-above-capacity",
            "A role cannot hold a request of the advertised window: less is served than promised.",
            _E,
        ),
        Rule(
            "GATE002",
            "role-missing",
            "A role of the model has no engine that was read: prefill without decode, or the "
            "reverse.",
            _E,
        ),
        Rule(
            "GATE003",
            "engine-unread",
            "An engine did not answer, or not with its capacity, so that nothing is known of it.",
            _I,
        ),
        Rule(
            "GATE004",
            "thin-margin",
            "The smallest pool holds fewer requests of the whole window than the margin asks for.",
            _W,
        ),
        Rule(
            "GATE005",
            "roles-disagree",
            "Prefill and decode refuse at different lengths: a request between the two is admitted "
            "by one role and refused by the other.",
            _W,
        ),
        Rule(
            "GATE006",
            "claims-differ",
            "Two places advertise different windows for one model; the larger one is judged.",
            _W,
        ),
        Rule(
            "GATE007",
            "faulty-version",
            "The engine's version has a published fault of this family in the role it has here.",
            _E,
        ),
        Rule(
            "GATE008",
            "prefix-cache-shared",
            "Prompts of different tenants share one prefix cache, and no key of the tenant "
            "separates them.",
            _W,
        ),
        Rule(
            "GATE009",
            "waiver-expired",
            "A waiver's date has passed: what it covered counts again, and so does the waiver.",
            _E,
        ),
        Rule(
            "GATE010",
            "waiver-unused",
            "A waiver covers nothing that was found: remove it.",
            _W,
        ),
        Rule(
            "GATE011",
            "nothing-claimed",
            "No window is advertised for a model, so that there is nothing to compare with.",
            _I,
        ),
        Rule(
            "GATE012",
            "role-contradicted",
            "An engine states another role than the one it was named for.",
            _E,
        ),
    )
}
