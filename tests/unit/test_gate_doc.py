"""docs/gate.md says what the code says: rules, families, exit codes, files."""

import re
from pathlib import Path

from sekisho.gate.plan_families import FAMILIES
from sekisho.gate.rules import RULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")


def test_the_table_of_rules_is_the_rules() -> None:
    rows = re.findall(r"^\| (GATE\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
    assert rows == [(r.id, r.name, r.default_severity.value, r.help) for r in RULES.values()]


def test_every_family_is_on_the_page_and_no_other() -> None:
    table = PAGE.split("| family (`model_type`)", 1)[1].split("\n\n", 1)[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert sorted(name for cell in cells for name in re.findall(r"\w+", cell)) == sorted(FAMILIES)


def test_every_file_of_deploy_is_on_the_page_and_no_other() -> None:
    files = {p.relative_to(ROOT / "deploy").as_posix() for p in (ROOT / "deploy").rglob("*.*ml")}
    assert files == set(re.findall(r"^\| `([\w/.-]+ml)`", PAGE, re.MULTILINE))
