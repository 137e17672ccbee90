"""A failure is shrunk to what still fails the same way, kept in a file, and replayed."""

from pathlib import Path

import pytest

from sekisho.sim.generate import generate
from sekisho.sim.run import run
from sekisho.sim.scenario import Failure, Scenario
from sekisho.sim.shrink import TraceError, _minimal, load, save, shrink, size_of


def failing() -> tuple[Scenario, Failure]:
    scenario = generate(0, ("claimed-unwritten",), ("commit-check",))
    failure = run(scenario).failure
    assert failure is not None
    return scenario, failure


def test_shrinking_keeps_the_checker_and_leaves_only_what_matters() -> None:
    scenario, failure = failing()
    small = shrink(scenario, failure.checker)
    found = run(small).failure
    assert found is not None and found.checker == failure.checker
    assert len(small.strikes) == 1 and small.events == []
    assert size_of(small) < size_of(scenario) / 2
    for name in ("strikes", "asks"):
        for n in range(len(getattr(small, name))):
            kept = [item for i, item in enumerate(getattr(small, name)) if i != n]
            less = Scenario(
                **{**{f: getattr(small, f) for f in small.__struct_fields__}, name: kept}
            )
            again = run(less).failure
            assert again is None or again.checker != failure.checker or name == "asks"


@pytest.mark.parametrize("needed", [set(), {0}, {99}, {3, 50}, set(range(0, 100, 7))])
def test_minimal_finds_the_needed_ones(needed: set[int]) -> None:
    tried: list[int] = []

    def still(kept: list[int]) -> bool:
        tried.append(len(kept))
        return needed <= set(kept)

    assert set(_minimal(list(range(100)), still)) == needed
    assert len(tried) < 1000


def test_a_saved_run_is_the_same_run(tmp_path: Path) -> None:
    scenario, failure = failing()
    path = tmp_path / "sim-0.json"
    save(scenario, failure, 42, "1.2.3", path)
    saved = load(path)
    assert (saved.scenario, saved.failure) == (scenario, failure)
    assert (saved.shrunk_from, saved.version) == (42, "1.2.3")
    lines: list[str] = []
    assert run(saved.scenario, lines.append).digest == run(scenario).digest
    assert any("Complete" in line for line in lines)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        (b"", "is no saved run"),
        (b"{}", "is no saved run"),
        (b"\xff\xfe", "is no saved run"),
    ],
)
def test_a_file_that_is_no_run_is_refused_in_one_line(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=told) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_another_format_is_refused(tmp_path: Path) -> None:
    scenario, failure = failing()
    path = tmp_path / "x.json"
    save(scenario, failure, 1, "1", path)
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(TraceError, match="format 2, this version reads 1"):
        load(path)
