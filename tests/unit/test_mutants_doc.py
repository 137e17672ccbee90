"""docs/mutants.md stays true as far as can be told without the half hour of `make mutants`: the
numbers add up, and each survivor that it explains is of code that is still there."""

import ast
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src" / "sekisho" / "core"
PAGE = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
NUMBERS = {"made", "killed", "timed out", "survived"}


class Row(NamedTuple):
    """A survivor or several of one kind: where, how many, what is changed."""

    file: str
    place: str
    mutants: int
    change: str


def table_rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def section(heading: str) -> str:
    found = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no section {heading}"
    return found[1]


def survivors(heading: str) -> list[Row]:
    return [
        Row(cells[0].strip("`"), cells[1].strip("`"), int(cells[2]), cells[3])
        for cells in table_rows(section(heading))
        if cells[2].isdigit()
    ]


def numbers(column: int) -> dict[str, int]:
    """The counts of one run, from the table of numbers."""
    rows = table_rows(section("Numbers"))
    return {row[0]: int(row[column].replace(",", "")) for row in rows if row[0] in NUMBERS}


def source_of(file: str, place: str) -> str | None:
    """The text of a function, of a class, or of a module; None where there is none."""
    text = (CORE / file).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in [] if place == "module" else place.split("."):
        inner = [one for one in ast.iter_child_nodes(node) if getattr(one, "name", "") == name]
        if not inner:
            return None
        node = inner[0]
    return text if place == "module" else ast.get_source_segment(text, node)


def quoted(change: str) -> list[str]:
    """Code that a change replaces: each code span, or list of them, before an arrow."""
    return re.findall(r"`([^`]+)`(?=(?:, `[^`]+`)* →)", change)


def complaint(row: Row) -> str | None:
    if not (CORE / row.file).is_file():
        return f"no file {row.file}"
    source = source_of(row.file, row.place)
    if source is None:
        return f"no {row.place} in {row.file}"
    squeezed = " ".join(source.split())
    missing = [code for code in quoted(row.change) if code not in squeezed]
    return f"{row.place} has no {missing[0]}" if missing else None


ALL = [*survivors("Survivors of mutmut"), *survivors("Survivors of the rest")]


@pytest.mark.parametrize("row", ALL, ids=lambda row: f"{row.file} {row.place}")
def test_what_survives_is_still_there(row: Row) -> None:
    assert complaint(row) is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row("pool.py", "Pool.grant", 1, "`count > 0` → `count > 1`"), None),
        (Row("pol.py", "Pool.grant", 1, ""), "no file pol.py"),
        (Row("pool.py", "Pool.lend", 1, ""), "no Pool.lend in pool.py"),
        (Row("pool.py", "Pool.grant", 1, "`count > 7` → `x`"), "Pool.grant has no count > 7"),
        (Row("ledger.py", "module", 1, "`_ILLEGAL = 255` → `256`"), None),
    ],
)
def test_what_is_gone_would_be_seen(row: Row, words: str | None) -> None:
    assert complaint(row) == words


@pytest.mark.parametrize(
    ("heading", "column"), [("Survivors of mutmut", 1), ("Survivors of the rest", 2)]
)
def test_each_survivor_is_explained_and_the_numbers_add_up(heading: str, column: int) -> None:
    run = numbers(column)
    assert set(run) == NUMBERS
    assert run["killed"] + run["timed out"] + run["survived"] == run["made"]
    assert sum(row.mutants for row in survivors(heading)) == run["survived"]


def test_the_selection_of_tests_exists_and_no_test_of_core_is_forgotten() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    chosen = set(config["pytest_add_cli_args_test_selection"])
    assert all((ROOT / file).is_file() for file in chosen)
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_core_*.py")}
    assert files - chosen == {"tests/unit/test_core_imports.py"}
