"""Runs of the simulator: they repeat byte for byte, are clean, and each fault really fires."""

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from sekisho.sim.atlas import ATLAS, Seam
from sekisho.sim.campaign import Plan, Tally, campaign, run_seeds
from sekisho.sim.defences import DEFENCES
from sekisho.sim.draft import everyday, need
from sekisho.sim.generate import generate
from sekisho.sim.run import run
from sekisho.sim.scenario import Scenario

EVERYTHING = tuple(ATLAS)


def digest(seed: int) -> str:
    return run(generate(seed, EVERYTHING)).digest


def test_the_same_seed_is_the_same_run_here_and_in_another_process() -> None:
    seeds = [3, 5, 8]
    here = [digest(seed) for seed in seeds]
    assert here == [digest(seed) for seed in seeds]
    assert len(set(here)) == len(seeds)
    code = (
        "import logging; logging.disable(50)\n"
        "from sekisho.sim.atlas import ATLAS\n"
        "from sekisho.sim.generate import generate\n"
        "from sekisho.sim.run import run\n"
        f"for seed in {seeds}: print(run(generate(seed, tuple(ATLAS))).digest)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "77", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == here


def test_a_scenario_survives_json_and_runs_the_same() -> None:
    scenario = generate(11, EVERYTHING)
    again = msgspec.json.decode(msgspec.json.encode(scenario), type=Scenario)
    assert again == scenario
    assert run(again).digest == run(scenario).digest


def test_ordinary_days_are_clean_and_everybody_is_answered() -> None:
    for seed in range(20):
        result = run(generate(seed, ()), alone=seed % 5 == 0)
        assert result.failure is None, f"seed {seed}: {result.failure}"
        gone = [a for a in result.answers if not a.served and a.code != "client_gone"]
        assert not gone, f"seed {seed}: {gone}"


def test_seeds_under_all_faults_are_clean() -> None:
    tally = run_seeds(Plan(EVERYTHING), range(500, 560))
    assert tally.failed is None, f"seed and failure: {tally.failed}"


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_fault_fires_and_is_coped_with(name: str) -> None:
    fired = 0
    for seed in range(60):
        result = run(generate(seed, (name,)))
        assert result.failure is None, f"seed {seed}: {result.failure}"
        fired += result.fired[name]
        if fired and seed >= 2:
            return
    raise AssertionError("it never fired")


def test_a_campaign_on_two_cores_adds_up_to_the_same() -> None:
    plan = Plan(("lost-notice", "rebound"))
    alone = run_seeds(plan, range(45))
    told: list[int] = []
    total = Tally()
    campaign(
        plan,
        iter(range(45)),
        total,
        until=None,
        cores=2,
        progress=lambda: told.append(total.seeds),
    )
    assert (total.seeds, total.handoffs, total.fired, total.caught) == (
        alone.seeds,
        alone.handoffs,
        alone.fired,
        alone.caught,
    )
    assert told[-1] == 45


def test_a_campaign_ends_at_the_first_failure() -> None:
    plan = Plan(("claimed-unwritten",), ("commit-check",))
    total = Tally()
    campaign(plan, iter(range(10_000)), total, until=None, cores=2, progress=lambda: None)
    assert total.failed is not None and total.failed[1].checker == "ownership"
    assert total.seeds < 10_000


def test_a_campaign_takes_no_seed_long_before_it_is_run() -> None:
    """So that the time that it may take is kept to some chunks."""
    taken = 0

    def seeds() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    def stop() -> None:
        raise KeyboardInterrupt

    total = Tally()
    with pytest.raises(KeyboardInterrupt):
        campaign(Plan(()), seeds(), total, until=None, cores=2, progress=stop)
    assert total.seeds == 20
    assert taken <= 6 * 20


def test_every_fault_names_a_report_a_seam_and_a_defence() -> None:
    for fault in ATLAS.values():
        assert fault.reports and fault.sort
        assert fault.stops in DEFENCES
    assert {fault.seam for fault in ATLAS.values()} == set(Seam)
    numbers = {fault.sort for fault in ATLAS.values() if fault.sort[1:].isdigit()}
    assert numbers == {f"F{number}" for number in range(1, 19)}


def test_an_unknown_need_is_refused() -> None:
    import random

    with pytest.raises(ValueError, match="needs something unknown"):
        need(everyday(random.Random(1)), "no-such-need")
