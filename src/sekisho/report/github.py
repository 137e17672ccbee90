"""Workflow commands of GitHub Actions.

Escaping as in the runner's own toolkit (``packages/core/src/command.ts`` of actions/toolkit):
``%``, CR and LF in a message; ``:`` and ``,`` as well in a property.
"""

from sekisho.report.clean import one_line
from sekisho.report.model import Case, Report, Status


def github(report: Report) -> str:
    """One annotation a case that is no pass, and one for the verdict."""
    lines = [_command(case, report.tool) for case in report.cases if case.status != Status.PASS]
    level = "notice" if report.exit_code == 0 else "error"
    lines.append(f"::{level} title={_property(report.tool)}::{_data(report.verdict)}")
    return "\n".join(lines) + "\n"


def _command(case: Case, tool: str) -> str:
    # What is inconclusive fails the step, so it must not look like a warning.
    level = "warning" if case.status == Status.WARNING else "error"
    if case.waived:
        level = "notice"
    title = f"{tool} {case.rule} {case.name}".strip()
    parts = [case.message]
    if case.location:
        parts.append(f"({case.location})")
    if case.waived:
        parts.append(f"waived {case.waived}")
    return f"::{level} title={_property(title)}::{_data(' '.join(parts))}"


def _data(value: str) -> str:
    return one_line(value).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")
