"""``sekisho lab``: the incident of 2026 in miniature, with a real model."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sekisho.cli.conventions import one_line, unwritable
from sekisho.cli.progress import clear, progress

if TYPE_CHECKING:
    from sekisho.lab.incident import Lab
    from sekisho.lab.results import LabReport

app = typer.Typer(
    help="Replay the incident of 2026 with a real model, defence by defence.",
    rich_markup_mode=None,
)

Trials = Annotated[int, typer.Option(min=1, max=10_000, help="Trials, 1 to 10000.")]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**63 - 1, help="Repeat the run of this seed.")
]
Json = Annotated[
    Path | None, typer.Option("--json", help="Write everything found to this file, as JSON.")
]
Report = Annotated[
    Path | None, typer.Option("--report", help="Write one self-contained page to this file.")
]


@app.command()
def incident(
    trials: Trials = 1,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave this defect out; may be repeated.")
    ] = None,
    defences: Annotated[
        list[str] | None, typer.Option("--with", help="Put this defence back; may be repeated.")
    ] = None,
    seed: Seed = None,
    json: Json = None,
    report: Report = None,
) -> None:
    """A runs, B runs: B's answer with A's words marked, beside what the gateway saw.

    Exit code 0: it leaked where it should, in one trial or more, or never did where it must not;
    1: otherwise; 2: it could not run.
    """
    from sekisho.lab.switches import SwitchError, switches

    try:
        engine = switches(without or (), defences or ())
    except SwitchError as error:
        raise typer.BadParameter(str(error)) from None
    _writable(json, report)
    with _lab(seed) as lab:
        from sekisho.lab.matrix import disagreements, run_trials
        from sekisho.lab.show import incident_lines, new_report, trials_line

        shown, cell = run_trials(lab, engine, trials, progress())
        _print([*incident_lines(shown), "", trials_line(cell, lab.seed)])
        _write(new_report(shown, trials=cell), json, report)
        _judge(disagreements(cell))


@app.command()
def matrix(
    trials: Trials = 10, seed: Seed = None, json: Json = None, report: Report = None
) -> None:
    """All 32 combinations of the defects, then each defence alone against all five.

    Exit code 0: every engine did what its switches say; 1: one did not; 2: it could not run.
    """
    _writable(json, report)
    with _lab(seed) as lab:
        from sekisho.lab.matrix import disagreements, run_matrix
        from sekisho.lab.show import matrix_lines, new_report
        from sekisho.lab.switches import switches

        shown = lab.play(0, switches())
        found = run_matrix(lab, trials, progress())
        _print(matrix_lines(found))
        _write(new_report(shown, found), json, report)
        cells = [*found.combinations, *found.single_defences]
        _judge([line for cell in cells for line in disagreements(cell)])


@app.command()
def erase(
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds, 1 to 1000.")] = 5,
    seed: Seed = None,
    json: Json = None,
    report: Report = None,
) -> None:
    """The price of safety: tokens and bytes per second of five ways, interleaved."""
    # Some machines force an old OpenBLAS kernel through these two; a measurement must not
    # inherit it. Nothing has imported numpy yet.
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(name, None)
    _writable(json, report)
    with _errors():
        from sekisho.lab.erase import run_erase
        from sekisho.lab.machine import load_lab_model
        from sekisho.lab.show import erase_lines, new_report

        found = run_erase(load_lab_model(), rounds, seed or 0, progress())
        _print(erase_lines(found))
        _write(new_report(erase=found), json, report)


@contextmanager
def _errors() -> Iterator[None]:
    """What the user can mend becomes one line and exit code 2."""
    from sekisho.engine.spec import ModelError
    from sekisho.lab.unsafe import LabError
    from sekisho.transport import TransportError

    with one_line(ModelError, LabError, TransportError, OSError):
        yield


@contextmanager
def _lab(seed: int | None) -> Iterator["Lab"]:
    with _errors():
        from sekisho.lab.incident import Lab
        from sekisho.lab.machine import load_lab_model

        lab = Lab(load_lab_model(), secrets.randbits(63) if seed is None else seed)
        try:
            yield lab
        finally:
            lab.machine.close()


def _print(lines: list[str]) -> None:
    clear()
    print("\n".join(lines), flush=True)


def _writable(*paths: Path | None) -> None:
    path = unwritable(*paths)
    if path is not None:
        raise typer.BadParameter(f"{path} cannot be written")


def _write(found: "LabReport", json: Path | None, report: Path | None) -> None:
    if json is not None:
        import msgspec

        json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    if report is not None:
        from sekisho.lab.report import write_report

        write_report(found, report)


def _judge(findings: list[str]) -> None:
    for line in findings:
        print(f"sekisho: {line}", file=sys.stderr)
    if findings:
        raise typer.Exit(1)
