"""docs/guard-vllm.md says what the code says."""

import re
from pathlib import Path

from sekisho.guard.vllm.versions import CONNECTORS, VERSIONS, Known

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guard-vllm.md").read_text()
SOURCES = {path.stem: path.read_text() for path in (ROOT / "src/sekisho/guard/vllm").glob("*.py")}


def _rows(known: dict[str, Known]) -> set[str]:
    return {
        f"| {name} | {'yes' if one.supported else 'no'} | {one.how} |"
        for name, one in known.items()
    }


def test_the_tables_of_versions_are_those_of_the_package() -> None:
    lines = set(PAGE.splitlines())
    assert _rows(VERSIONS) | _rows(CONNECTORS) <= lines
    told = {line for line in lines if re.match(r"\| \S+ \| (yes|no) \|", line)}
    assert told == _rows(VERSIONS) | _rows(CONNECTORS)


def test_every_metric_is_on_the_page() -> None:
    named = set(re.findall(r"name=\"(sekisho_guard_\w+)\"", SOURCES["metrics"]))
    assert named
    for name in named:
        assert re.search(rf"`{name}(_total)?`", PAGE), name


def test_every_reason_to_refuse_is_on_the_page() -> None:
    kinds = set(re.findall(r"Refused\(\s*\"(\w+)\"", SOURCES["admission"]))
    row = next(line for line in PAGE.splitlines() if "sekisho_guard_refused_total" in line)
    assert kinds == set(re.findall(r"`(\w+)`", row.rpartition("admission")[2]))


def test_every_kind_of_evidence_is_on_the_page() -> None:
    said = PAGE.partition("## Metrics and evidence")[2].partition("Kinds:")[2]
    kinds = set().union(*(re.findall(r"Evidence\(\s*\"(\w+)\"", s) for s in SOURCES.values()))
    assert kinds
    assert {kind for kind in kinds if f"`{kind}`" not in said} == set()
