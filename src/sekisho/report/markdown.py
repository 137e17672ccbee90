"""Markdown (GitHub's), for a job summary or a comment on a pull request."""

import re

from sekisho.report.clean import one_line
from sekisho.report.model import Report, Table

_MARKS = re.compile(r"[\\`*_{}\[\]()#+!|~$^=-]")
# As entities, since GitHub looks for HTML, mentions and bare links in text that is escaped by
# backslashes too.
_ENTITIES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", ":": "&#58;", ".": "&#46;"}
)


def markdown(report: Report) -> str:
    """A heading, the verdict, the cases as a table, what they rest on, then the other tables."""
    cases = Table(
        title="",
        columns=("", "rule", "about", "what", "where", "waived"),
        rows=[
            (c.status.value, c.rule, c.name, c.message, c.location, c.waived) for c in report.cases
        ],
    )
    parts = [f"## {escaped(report.tool)}", f"**{escaped(report.verdict)}**", _table(cases)]
    for case in report.cases:
        if case.details:
            told = [f"- **{escaped(label)}** {escaped(value)}" for label, value in case.details]
            parts += [f"### {escaped(f'{case.rule} {case.name}')}", "\n".join(told)]
    for table in report.tables:
        if table.rows:
            parts += [f"### {escaped(table.title)}", _table(table)]
    return "\n\n".join(parts) + "\n"


def escaped(value: str) -> str:
    """``value`` as text that shows as it is and means nothing: no mark, HTML, mention or link."""
    return _MARKS.sub(r"\\\g<0>", one_line(value)).translate(_ENTITIES).strip()


def _table(table: Table) -> str:
    rows = [table.columns, ("---",) * len(table.columns)]
    rows += [tuple(escaped(cell) for cell in row) for row in table.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
