"""What a run of the lab found, as lines for a terminal, and as the values of a report."""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby

from sekisho import __version__
from sekisho.lab.matrix import verdict
from sekisho.lab.results import (
    Cell,
    ErasePrice,
    Incident,
    LabReport,
    Matrix,
    PageView,
    Side,
)
from sekisho.lab.switches import DEFECTS, DEFENCES

_OPEN, _CLOSE = ">>>", "<<<"


def new_report(
    incident: Incident | None = None,
    matrix: Matrix | None = None,
    erase: Sequence[ErasePrice] = (),
    trials: Cell | None = None,
) -> LabReport:
    """The values of a report that is made now."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return LabReport(__version__, created, incident, matrix, list(erase), trials)


def incident_lines(incident: Incident) -> list[str]:
    """One trial: what both were told, and what the gateway saw of it."""
    lines = [
        f"{incident.model}: window {incident.window} tokens, "
        f"prefill pool {incident.prefill_pool}, decode pool {incident.decode_pool}",
        f"defects   {', '.join(incident.defects) or 'none'}",
        f"defences  {', '.join(incident.defences) or 'none'}",
        "",
        f"tenant-a asks: …{_end_of(incident.document)}",
        *_side(incident.a, incident.a.text),
        "",
        f"tenant-b asks: …{_end_of(incident.question)}",
        *_side(incident.b, marked(incident.b)),
    ]
    for name, views in (("reserved", incident.before), ("attended to", incident.after)):
        if views:
            lines.append(f"  pages {name}: {_owners(views)}")
    lines += [f"  evidence: {line}" for line in incident.b.evidence[:3]]
    told = "stands" if incident.leaked else "does not stand"
    lines += ["", f"A's secret, {incident.secret}, {told} in B's answer."]
    return lines


def marked(side: Side) -> str:
    """An answer with the spans that are A's words between ``>>>`` and ``<<<``."""
    parts, at = [], 0
    for start, end in side.marked:
        parts += [side.text[at:start], _OPEN, side.text[start:end], _CLOSE]
        at = end
    return "".join([*parts, side.text[at:]])


def trials_line(cell: Cell, seed: int) -> str:
    """How many trials ended how."""
    outcomes = ", ".join(f"{count} {name}" for name, count in cell.outcomes.items())
    trials = "1 trial" if cell.trials == 1 else f"{cell.trials} trials"
    return f"{trials}, seed {seed}: {outcomes}; leak rate {_rate(cell)}"


def matrix_lines(matrix: Matrix) -> list[str]:
    """Two tables: a mark for each defect that is in, and a line for each defence."""
    head = "  ".join(DEFECTS)
    lines = [f"{matrix.model}, {matrix.trials} trials each, seed {matrix.seed}", "", head]
    for cell in matrix.combinations:
        marks = "  ".join(("x" if d in cell.defects else ".").center(len(d)) for d in DEFECTS)
        lines.append(f"{marks}  {_rate(cell):24} {_outcomes(cell)}")
    lines += ["", "all five defects, and this defence alone"]
    width = max(map(len, DEFENCES))
    for cell in matrix.single_defences:
        name = "+".join(cell.defences)
        lines.append(f"{name:{width}}  {verdict(cell):9} {_rate(cell):24} {_outcomes(cell)}")
    return lines


def erase_lines(prices: Sequence[ErasePrice]) -> list[str]:
    """A line for each way to be safe."""
    lines = [f"{'':15} {'tokens/s':>9} {'ratio':>6} {'GB/s':>6}"]
    lines += [
        f"{price.name:15} {price.tokens_per_second:9.1f} {price.ratio:6.3f} "
        f"{price.bytes_per_second / 1e9:6.2f}  {price.note}"
        for price in prices
    ]
    return lines


def _side(side: Side, text: str) -> list[str]:
    seen = (
        f"  gateway: {side.status} {side.finish}, {side.prompt_tokens} + {side.completion_tokens} "
        f"tokens, {side.latency_ms:.0f} ms"
    )
    return [seen, f"  answer: {text!r}"]


def _owners(views: Sequence[PageView]) -> str:
    """Runs of one owner, as ``B×1 A×27``."""
    runs = [(owner, len(list(run))) for owner, run in groupby(view.owner for view in views)]
    return " ".join(f"{owner}×{count}" for owner, count in runs)


def _rate(cell: Cell) -> str:
    rate = cell.leaks / cell.trials
    return f"{rate:.0%} (95 %: {cell.low:.0%} to {cell.high:.0%})"


def _outcomes(cell: Cell) -> str:
    return ", ".join(f"{name} {count}" for name, count in cell.outcomes.items())


def _end_of(content: str) -> str:
    return content.rpartition("\n")[2]
