"""The incident with the real model: it leaks, and with any one of three defences it does not."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sekisho.cli import main
from sekisho.lab.incident import Lab, outcome_of
from sekisho.lab.machine import load_lab_model
from sekisho.lab.results import LabReport
from sekisho.lab.switches import DEFECTS, switches

TRIALS, SEED = 5, 20260908

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def lab(demo_model_folder: Path) -> Iterator[Lab]:
    assert demo_model_folder.is_dir()
    made = Lab(load_lab_model(), SEED)
    yield made
    made.machine.close()


@pytest.fixture(scope="module")
def outcomes(lab: Lab) -> dict[str, list[str]]:
    """Outcome classes by defence; trial by trial, so that what precedes B is computed once."""
    defences = ("", "admission", "commit-check", "step-check")
    engines = {name: switches((), [name] if name else []) for name in defences}
    found: dict[str, list[str]] = {name: [] for name in engines}
    for trial in range(TRIALS):
        for name, engine in engines.items():
            found[name].append(outcome_of(lab.play(trial, engine)))
    return found


def test_with_all_five_defects_the_real_model_leaks_in_most_trials(
    outcomes: dict[str, list[str]],
) -> None:
    print(f"seed {SEED}: {outcomes}")
    assert outcomes[""].count("leak") > TRIALS / 2


@pytest.mark.parametrize(
    ("defence", "outcome"),
    [("admission", "refused"), ("commit-check", "failed"), ("step-check", "failed")],
)
def test_with_one_defence_restored_it_never_does(
    outcomes: dict[str, list[str]], defence: str, outcome: str
) -> None:
    assert outcomes[defence] == [outcome] * TRIALS


def test_the_command_shows_the_leak_and_what_the_gateway_saw(
    demo_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo_model_folder.is_dir()
    file = tmp_path / "found.json"
    assert main(["lab", "incident", "--seed", str(SEED), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    report = msgspec.json.decode(file.read_bytes(), type=LabReport)
    incident = report.incident
    assert incident is not None and incident.leaked
    assert incident.defects == list(DEFECTS) and incident.defences == []
    assert incident.prefill_pool < incident.b.prompt_tokens <= incident.window
    # Proportion of the incident's window and pool, to a thousandth.
    assert incident.prefill_pool / incident.window == pytest.approx(681_280 / 1_048_576, abs=1e-3)
    assert incident.secret in incident.a.text
    assert (incident.b.status, incident.b.evidence) == (200, [])
    words = [incident.b.text[start:end] for start, end in incident.b.marked]
    assert any(incident.secret in part for part in words)
    assert f"{incident.secret}<<<" in printed
    assert f"gateway: 200 {incident.b.finish}, {incident.b.prompt_tokens} + " in printed
    assert f"1 trial, seed {SEED}: 1 leak; leak rate 100%" in printed
