"""Which controls of the OWASP AI Security Verification Standard a finding speaks against.

Numbers of the published version 1.0, whose identifiers its authors call stable, read at `COMMIT`.
A finding shows that a control does not hold; no finding shows nothing about one.
"""

VERSION = "1.0"
COMMIT = "94fbad5acee4e4716bff263a4c455dfd780e53a7"
"""Of github.com/OWASP/AISVS, 2026-07-15."""

CONTROLS = {
    "2.1.4": "input beyond the token limit is rejected, not cut",
    "5.2.4": "no answer holds data that its requester may not have",
    "5.3.1": "on shared serving, one tenant neither influences nor observes another",
    "5.3.2": "nor through shared compute resources",
}
"""The numbers that are used here, in our words; the levels are 1, 2, 2 and 3."""

_OF_RULES = {
    "PROBE001": ("5.2.4", "5.3.1"),
    "PROBE002": ("5.2.4", "5.3.1"),
    "PROBE003": ("2.1.4",),
    "PROBE005": ("2.1.4",),  # a prompt that is counted otherwise was cut or replaced
    "PROBE007": ("2.1.4",),
    "PROBE008": ("5.2.4", "5.3.1"),
    "PROBE010": ("5.3.1", "5.3.2"),
    "PROBE011": ("5.2.4", "5.3.1"),
    "PROBE012": ("5.2.4", "5.3.1"),
    "PROBE013": ("5.3.1", "5.3.2"),
    "PROBE014": ("5.3.1",),
}


def controls(rule: str) -> tuple[str, ...]:
    """Numbers out of `CONTROLS`; none where no control says what the rule says."""
    return _OF_RULES.get(rule, ())


def identifier(number: str) -> str:
    """As the standard wants to be cited: ``v1.0-C5.3.1``."""
    return f"v{VERSION}-C{number}"
