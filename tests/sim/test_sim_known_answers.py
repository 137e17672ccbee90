"""Each defence taken away is noticed by a checker, and with it in place the same run is clean."""

import pytest

from sekisho.sim.defences import DEFENCES
from sekisho.sim.known_answers import known_answers


@pytest.mark.parametrize("name", DEFENCES)
def test_the_absence_of_a_defence_is_noticed(name: str) -> None:
    [known] = known_answers([name], 60, lambda known: None)
    assert known.failure is not None, f"nobody noticed in {known.seed} seeds"
    assert known.failure.checker in DEFENCES[name].checker
    assert known.with_it is None, f"seed {known.seed} of {known.fault}: {known.with_it}"
    print(f"without {name}: seed {known.seed}, {known.fault}: {known.failure.message}")
