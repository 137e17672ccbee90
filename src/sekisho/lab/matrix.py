"""All combinations of the five defects, and every defence alone against all five.

Trial by trial, and within a trial engine by engine, so that all engines meet the same texts.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from sekisho.engine.demo import NAME
from sekisho.lab.incident import Lab, outcome_of
from sekisho.lab.results import OUTCOMES, Cell, Incident, Matrix, wilson
from sekisho.lab.switches import DEFECTS, DEFENCES, Switches, switches

Progress = Callable[[str], None]


def run_matrix(lab: Lab, trials: int, progress: Progress) -> Matrix:
    """``trials`` of each engine; ``progress`` gets a line of text after each of them."""
    combinations = [
        switches(without)
        for count in range(len(DEFECTS), -1, -1)
        for without in itertools.combinations(DEFECTS, len(DEFECTS) - count)
    ]
    singles = [switches((), [defence]) for defence in DEFENCES]
    engines = [*combinations, *singles]
    found: dict[Switches, list[str]] = {engine: [] for engine in engines}
    total, leaks = trials * len(engines), 0
    for trial in range(trials):
        for number, engine in enumerate(engines, 1 + trial * len(engines)):
            outcome = outcome_of(lab.play(trial, engine))
            found[engine].append(outcome)
            leaks += outcome == "leak"
            progress(f"trial {trial + 1} of {trials}, {number} of {total} runs, {leaks} leaks")
    return Matrix(
        model=NAME,
        trials=trials,
        seed=lab.seed,
        combinations=[tally(engine, found[engine]) for engine in combinations],
        single_defences=[tally(engine, found[engine]) for engine in singles],
    )


def run_trials(
    lab: Lab, engine: Switches, trials: int, progress: Progress
) -> tuple[Incident, Cell]:
    """The trial to show, which is the first that leaked or else the first, and the count of all."""
    outcomes: list[str] = []
    shown: Incident | None = None
    for trial in range(trials):
        incident = lab.play(trial, engine)
        outcomes.append(outcome_of(incident))
        if shown is None or (incident.leaked and not shown.leaked):
            shown = incident
        progress(f"trial {trial + 1} of {trials}, {outcomes.count('leak')} leaks")
    if shown is None:
        raise ValueError("trials must be above 0")
    return shown, tally(engine, outcomes)


def tally(engine: Switches, outcomes: Sequence[str]) -> Cell:
    """Outcome classes counted."""
    counts = Counter(outcomes)
    leaks = counts["leak"]
    low, high = wilson(leaks, len(outcomes))
    defects, defences = engine.names()
    seen = {name: counts[name] for name in OUTCOMES if counts[name]}
    return Cell(defects, defences, len(outcomes), leaks, low, high, seen)


def verdict(cell: Cell) -> str:
    """What a defence did in its trials, in the words of `switches.Defence.verdict`."""
    if cell.leaks:
        return "fails"
    return "narrows" if "wrong-answer" in cell.outcomes else "suffices"


def disagreements(cell: Cell) -> list[str]:
    """Where the trials of an engine do not agree with what its switches say; one line each."""
    engine = switches(set(DEFECTS) - set(cell.defects), cell.defences)
    name = f"{'+'.join(cell.defects) or 'no defect'}, with {'+'.join(cell.defences) or 'nothing'}"
    if engine.leaks and not cell.leaks:
        return [f"{name}: should leak, and did not in {cell.trials} trials"]
    if not engine.leaks and cell.leaks:
        return [f"{name}: must never leak, and did in {cell.leaks} of {cell.trials} trials"]
    whole = len(cell.defects) == len(DEFECTS) and len(cell.defences) == 1
    if whole and verdict(cell) != DEFENCES[cell.defences[0]].verdict:
        expected = DEFENCES[cell.defences[0]].verdict
        return [f"{name}: {verdict(cell)}, where it should be that it {expected}"]
    return []
