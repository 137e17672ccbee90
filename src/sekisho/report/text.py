"""Text for a terminal."""

from sekisho.report.clean import one_line
from sekisho.report.model import Report, Table


def text(report: Report) -> str:
    """The verdict, every case on a line, then the tables."""
    lines = [f"{one_line(report.tool)}: {one_line(report.verdict)}"]
    for case in report.cases:
        about = f" [{one_line(case.rule)}]" if case.rule else ""
        at = f" ({one_line(case.location)})" if case.location else ""
        waived = f"; waived {one_line(case.waived)}" if case.waived else ""
        name = f"{one_line(case.name)}: " if case.name else ""
        lines.append(f"{case.status.value}{about} {name}{one_line(case.message)}{at}{waived}")
        lines += [f"    {one_line(label)}: {one_line(value)}" for label, value in case.details]
    for table in report.tables:
        if table.rows:
            lines += ["", *_columns(table)]
    return "\n".join(lines) + "\n"


def _columns(table: Table) -> list[str]:
    rows = [table.columns, *(tuple(map(one_line, row)) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [one_line(table.title)] + [
        ("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
