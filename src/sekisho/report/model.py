"""What every verb that judges hands to a format."""

from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    PASS = "pass"
    ERROR = "error"
    WARNING = "warning"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that was judged.

    Attributes:
        name: what was judged, such as a model.
        rule: a stable id out of `Report.rules`; empty for a pass.
        location: the URL, file or option it is about; never with a credential.
        waived: why and until when it is accepted; empty: it is not.
        details: names and values of what it rests on; formats may cut long values.
    """

    name: str
    status: Status
    message: str
    rule: str = ""
    location: str = ""
    waived: str = ""
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RuleText:
    """A rule as SARIF describes it: ``rule`` is stable, ``name`` a slug, ``text`` a sentence,
    ``tags`` what else names it, such as controls of a standard."""

    rule: str
    name: str
    text: str
    status: Status
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of as many cells as there are ``columns``."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of one verb.

    Attributes:
        tool: such as ``sekisho gate``.
        created: ISO time, UTC.
        verdict: one sentence.
        exit_code: of the process. Where it is not 0, some case must be an error or inconclusive
            and not waived, else a format that knows no exit code would show green.
    """

    tool: str
    version: str
    created: str
    verdict: str
    exit_code: int
    cases: list[Case]
    rules: list[RuleText]
    tables: list[Table] = field(default_factory=list)
