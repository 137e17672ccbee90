"""docs/protocol.md shows the tables of the code: its diagrams are made from them.

After a change of a table run this file with Python: it writes the diagrams anew.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from sekisho.core.handoff import (
    GIVE_TRANSITIONS,
    GIVE_WHEN_QUIET,
    TAKE_TRANSITIONS,
    WRITER_TRANSITIONS,
    Give,
    Take,
    Writer,
)
from sekisho.core.ledger import PAGE_TRANSITIONS, State

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
LINES_MAX = 120
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n```mermaid\n)(.*?)(```\n)", re.DOTALL)

Edge = tuple[str, str, str]
_S = TypeVar("_S", bound=StrEnum)
_E = TypeVar("_E", bound=StrEnum)


def rows(table: Mapping[_S, Mapping[_E, _S]]) -> list[Edge]:
    """(from, label, to) of a table of state and event."""
    return [
        (before.value, event.value, after.value)
        for before, row in table.items()
        for event, after in row.items()
    ]


def diagram(start: str, ends: Iterable[str], edges: Iterable[Edge]) -> str:
    """A Mermaid state diagram; events that lead the same way share an arrow."""
    labels: dict[tuple[str, str], list[str]] = {}
    for before, label, after in edges:
        labels.setdefault((before, after), []).append(label)
    lines = ["stateDiagram-v2", f"[*] --> {start}"]
    lines += [f"{a} --> {b}: {' / '.join(words)}" for (a, b), words in labels.items()]
    lines += [f"{end} --> [*]" for end in ends]
    return "\n    ".join(lines) + "\n"


def diagrams() -> dict[str, str]:
    """Every diagram of the page by name."""
    quiet = [
        (before.value, "no write under way", after.value)
        for before, after in GIVE_WHEN_QUIET.items()
    ]
    pages = [
        (before.name.lower(), event.value, after.name.lower())
        for event, row in PAGE_TRANSITIONS.items()
        for before, after in row.items()
    ]
    return {
        "TAKE": diagram(Take.OFFERED.value, [], rows(TAKE_TRANSITIONS)),
        "WRITER": diagram(Writer.ACTIVE.value, [Writer.TERMINAL.value], rows(WRITER_TRANSITIONS)),
        "GIVE": diagram(
            Give.WRITING.value,
            [Give.COMPLETED.value, Give.DRAINED.value],
            [*rows(GIVE_TRANSITIONS), *quiet],
        ),
        "PAGE": diagram(State.FREE.name.lower(), [], pages),
    }


def with_diagrams(text: str) -> str:
    """``text`` with every generated block made anew."""
    made = diagrams()
    return BLOCK.sub(lambda found: found[1] + made[found[2]] + found[4], text)


def test_the_page_shows_every_table_as_it_is() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [found[2] for found in BLOCK.finditer(text)] == list(diagrams())
    assert with_diagrams(text) == text, "run: python tests/unit/test_protocol_doc.py"
    assert text.count("```mermaid") == len(diagrams())


def test_every_transition_has_its_arrow() -> None:
    made = diagrams()
    assert "    offered --> committed: complete, proved\n" in made["TAKE"]
    assert "    finishing --> completed: no write under way\n" in made["GIVE"]
    assert "    quarantined --> free: last pin gone\n" in made["PAGE"]
    tables = {
        "TAKE": rows(TAKE_TRANSITIONS),
        "WRITER": rows(WRITER_TRANSITIONS),
        "GIVE": rows(GIVE_TRANSITIONS),
    }
    for name, edges in tables.items():
        for before, label, after in edges:
            arrow = next(
                line for line in made[name].splitlines() if f" {before} --> {after}:" in line
            )
            assert label in arrow.split(": ", 1)[1].split(" / ")


def test_a_changed_table_changes_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_diagrams(text.replace("offered --> rejected", "offered --> committed")) == text
    assert diagram("a", ["b"], [("a", "x", "b"), ("a", "y", "b"), ("b", "z", "b")]) == (
        "stateDiagram-v2\n    [*] --> a\n    a --> b: x / y\n    b --> b: z\n    b --> [*]\n"
    )


def test_the_page_is_one_page() -> None:
    assert PAGE.read_text(encoding="utf-8").count("\n") < LINES_MAX


if __name__ == "__main__":
    PAGE.write_text(with_diagrams(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
