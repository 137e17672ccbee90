"""docs/probe.md says what the code says: techniques, rules, formats."""

import re
from pathlib import Path

from sekisho.probe.output import FORMATS
from sekisho.probe.rules import RULES
from sekisho.probe.techniques import TECHNIQUES

PAGE = (Path(__file__).parents[2] / "docs" / "probe.md").read_text(encoding="utf-8")


def test_the_table_of_rules_is_the_rules() -> None:
    rows = re.findall(r"^\| (PROBE\d+) \| (\S+) \| (\w+) \| (yes|no) \| (.+?) \|$", PAGE, re.M)
    told = [
        (r.id, r.name, r.certainty.value, "yes" if r.is_leak else "no", r.help)
        for r in RULES.values()
    ]
    assert rows == told


def test_the_table_of_techniques_is_the_techniques() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| to (.+?) \| (.+?) \|$", PAGE, re.M)
    assert rows == [(one.name, one.goal, one.report) for one in TECHNIQUES.values()]


def test_every_statistical_rule_has_its_test_on_the_page() -> None:
    section = PAGE.partition("## Statistics")[2]
    statistical = {rule.id for rule in RULES.values() if rule.certainty == "statistical"}
    assert statistical == set(re.findall(r"^\| (PROBE\d+) \|", section, re.M))


def test_every_format_is_on_the_page() -> None:
    for name in FORMATS:
        assert re.search(rf"\b{name}\b", PAGE, re.I), name
