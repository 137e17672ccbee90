"""Counting trials, and whether they agree with what the switches say; over the stand-in model."""

import msgspec
import pytest

from lab_kit import stand_in_lab
from sekisho.lab.matrix import disagreements, run_matrix, run_trials, tally, verdict
from sekisho.lab.results import LabReport, PageView, Side, wilson
from sekisho.lab.show import incident_lines, marked, matrix_lines, new_report, trials_line
from sekisho.lab.switches import DEFECTS, DEFENCES, SwitchError, Switches, switches


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [  # from the closed form, to four places (Newcombe 1998, method 3)
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_interval_is_wilsons(hits: int, trials: int, low: float, high: float) -> None:
    assert wilson(hits, trials) == pytest.approx((low, high), abs=5e-5)


def test_every_defect_names_its_report_and_every_defence_its_verdict() -> None:
    assert len(DEFECTS) == 5
    assert all(defect.report and defect.text for defect in DEFECTS.values())
    assert {defence.verdict for defence in DEFENCES.values()} == {"suffices", "narrows", "fails"}


@pytest.mark.parametrize("given", [{"without": ["nothing"]}, {"defences": ["window"]}])
def test_an_unknown_switch_is_named_with_those_that_exist(given: dict[str, list[str]]) -> None:
    with pytest.raises(SwitchError, match=r"is called '(nothing|window)'; there are: \w+, "):
        switches(**given)


def test_only_the_whole_chain_leaks_and_any_defence_that_works_cuts_it() -> None:
    assert switches().leaks
    assert not any(switches([defect]).leaks for defect in DEFECTS)
    leaking = {name for name in DEFENCES if switches((), [name]).leaks}
    assert leaking == {"payload-digest"}
    assert not switches((), ["payload-digest", "step-check"]).leaks


@pytest.mark.parametrize(
    ("engine", "outcomes", "finding"),
    [
        (switches(), ["wrong-answer", "leak"], ""),
        (switches(), ["wrong-answer"] * 9, "should leak, and did not in 9 trials"),
        (switches(["window"]), ["refused"], ""),
        (switches(["window"]), ["refused", "leak"], "must never leak, and did in 1 of 2 trials"),
        (switches((), ["step-check"]), ["failed"], ""),
        (switches((), ["step-check"]), ["failed", "wrong-answer"], "narrows, where it should be"),
        (switches((), ["erase-on-reuse"]), ["wrong-answer"], ""),
        (switches((), ["erase-on-reuse"]), ["failed"], "suffices, where it should be"),
    ],
)
def test_trials_are_held_against_the_switches(
    engine: Switches, outcomes: list[str], finding: str
) -> None:
    found = disagreements(tally(engine, outcomes))
    assert [finding in line for line in found] == ([True] if finding else [])


def test_the_matrix_has_every_combination_and_every_defence_once() -> None:
    lab = stand_in_lab(seed=5)
    said: list[str] = []
    found = run_matrix(lab, 2, said.append)
    lab.machine.close()
    assert len({tuple(cell.defects) for cell in found.combinations}) == 32
    assert all(cell.trials == 2 == sum(cell.outcomes.values()) for cell in found.combinations)
    assert [cell.defences for cell in found.single_defences] == [[name] for name in DEFENCES]
    assert len(said) == 2 * (32 + len(DEFENCES))
    assert said[-1] == f"trial 2 of 2, {len(said)} of {len(said)} runs, 0 leaks"
    # The stand-in says no words, so what the real model leaks is a wrong answer of it.
    whole, least = found.combinations[0], found.combinations[-1]
    assert (whole.defects, whole.outcomes) == (list(DEFECTS), {"wrong-answer": 2})
    assert (least.defects, least.outcomes) == ([], {"refused": 2})
    lines = matrix_lines(found)
    assert lines[3].split()[:6] == ["x", "x", "x", "x", "x", "0%"]
    assert [line.split()[:2] for line in lines[-7:-5]] == [
        ["admission", "suffices"],
        ["one-outcome", "suffices"],
    ]
    assert verdict(found.single_defences[4]) == "narrows"


def test_one_incident_is_shown_with_its_count_and_survives_json() -> None:
    lab = stand_in_lab(seed=6)
    shown, cell = run_trials(lab, switches(), 3, lambda _: None)
    lab.machine.close()
    assert (cell.trials, cell.leaks) == (3, 0)
    lines = incident_lines(shown)
    assert any("gateway: 200 length" in line for line in lines)
    assert any(line.startswith("  pages attended to: B×1 A×") for line in lines)
    assert "stands in B's answer" not in lines[-1]
    assert trials_line(cell, 6).startswith("3 trials, seed 6: 3 wrong-answer; leak rate 0% (95 %:")
    report = new_report(shown, trials=cell)
    again = msgspec.json.decode(msgspec.json.encode(report), type=LabReport)
    assert again == report
    assert isinstance(again.incident and again.incident.after[0], PageView)


def test_marks_stand_around_the_spans() -> None:
    side = Side("tenant-b", 200, "stop", "a secret word", [(2, 8)], 1, 1, 1.0, [])
    assert marked(side) == "a >>>secret<<< word"
