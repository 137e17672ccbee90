"""The lab's report: one HTML page that needs nothing else, no network and no script.

Everything a model or a user wrote is hostile here: templates escape all values, the page forbids
itself every source by its Content-Security-Policy, and control characters are shown as signs.
Equal values give equal bytes.
"""

from pathlib import Path

import jinja2

from sekisho.lab import figures
from sekisho.lab.figures import DEFECTS
from sekisho.lab.results import Cell, Incident, LabReport, Matrix
from sekisho.report import page

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(report: LabReport, path: Path) -> None:
    """Write ``report`` to ``path`` as one self-contained page, without the parts that were not run.

    Raises:
        OSError: ``path`` cannot be written.
    """
    path.write_text(render(report), encoding="utf-8")


def render(report: LabReport) -> str:
    """The page as text."""
    incident, matrix = report.incident, report.matrix
    return (
        _environment()
        .get_template("page.html")
        .render(
            report=report,
            incident=None if incident is None else _incident(incident, report.incident_trials),
            matrix=None if matrix is None else _matrix(matrix),
            erase=report.erase,
            # Bars may pass 1: in a noisy run a dearer way can come out ahead of "nothing".
            ratio_max=max([1.0, *(price.ratio for price in report.erase)]),
            owners=figures.OWNERS,
            outcomes=figures.OUTCOME_WORDS,
        )
    )


def _environment() -> jinja2.Environment:
    environment = page.environment(_TEMPLATES)
    environment.filters["whole"] = lambda value: f"{value:,.0f}"
    environment.filters["share"] = lambda value: f"{100 * value:.2f}%"
    environment.filters["percent"] = lambda value: f"{100 * value:.0f} %"
    environment.filters["giga"] = lambda value: f"{value / 1e9:.2f}"
    environment.globals.update(shares=figures.outcome_shares, heat=figures.heat)
    return environment


def _incident(incident: Incident, trials: Cell | None) -> dict[str, object]:
    """What the template shows of one trial."""
    spans = figures.occurrences(incident.document, incident.secret)
    near = figures.excerpt(incident.document, spans[0][0] if spans else 0)
    return {
        **{field: getattr(incident, field) for field in incident.__struct_fields__},
        "trials": trials,
        "story": figures.story(incident),
        "lead": figures.lead(incident),
        "answer": page.segments(incident.b.text, incident.b.marked),
        "answer_a": page.segments(incident.a.text, incident.a.marked),
        "question_excerpt": figures.excerpt(incident.question, len(incident.question)),
        "note": page.segments(incident.document, spans),
        "note_excerpt": page.segments(near, figures.occurrences(near, incident.secret)),
        "grids": [
            figures.grid(
                "Reserved", "right after B reserved them", incident.before, incident.page_size
            ),
            figures.grid("Read", "at B's first decode step", incident.after, incident.page_size),
        ]
        if incident.before or incident.after
        else [],
        "lengths": _lengths(incident),
    }


def _lengths(incident: Incident) -> list[tuple[str, str, int]]:
    """Label, kind and tokens of each bar of the first figure."""
    return [
        ("Advertised window", "promise", incident.window),
        ("Decode pool", "room", incident.decode_pool),
        ("Prefill pool", "room", incident.prefill_pool),
        ("Prompt of tenant A", "a", incident.a.prompt_tokens),
        ("Prompt of tenant B", "b", incident.b.prompt_tokens),
    ]


def _matrix(matrix: Matrix) -> dict[str, object]:
    combinations = sorted(
        matrix.combinations,
        key=lambda cell: (-len(cell.defects), -cell.leaks, sorted(cell.defects), cell.defences),
    )
    full = next((c for c in combinations if len(c.defects) == len(DEFECTS)), None)
    singles: list[figures.Case] = figures.cases(full, matrix.single_defences)
    leaking = [set(cell.defects) for cell in combinations if cell.leaks]
    return {
        "model": matrix.model,
        "trials": matrix.trials,
        "seed": matrix.seed,
        "names": list(DEFECTS),
        "defects": DEFECTS,
        "combinations": combinations,
        "leaking": len(leaking),
        "always": [name for name in DEFECTS if leaking and all(name in c for c in leaking)],
        "singles": singles,
    }
