"""Known answers: with a defence taken away, a checker must fail; with it, none may.

What is not shown here: that a defence is needed in every fault it stops. One seed is enough.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sekisho.sim.defences import DEFENCES, Defence
from sekisho.sim.generate import generate
from sekisho.sim.run import run
from sekisho.sim.scenario import Failure


class Known(NamedTuple):
    """``failure`` is None if no seed below the limit showed the defence's absence.
    ``with_it`` is what failed on the same seed with the defence in place: None, or a bug."""

    defence: Defence
    seed: int
    fault: str
    failure: Failure | None
    with_it: Failure | None


def known_answers(
    names: Sequence[str], seeds_max: int, told: Callable[[Known], None]
) -> list[Known]:
    """For each defence the first seed at which one of its checkers notices that it is gone."""
    answers = []
    for name in names:
        answer = _search(DEFENCES[name], seeds_max)
        answers.append(answer)
        told(answer)
    return answers


def _search(defence: Defence, seeds_max: int) -> Known:
    for seed in range(seeds_max):
        fault = defence.faults[seed % len(defence.faults)]
        failure = run(generate(seed, [fault], [defence.name])).failure
        if failure is not None and failure.checker in defence.checker:
            return Known(defence, seed, fault, failure, run(generate(seed, [fault])).failure)
    return Known(defence, seeds_max, "", None, None)
