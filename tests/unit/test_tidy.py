"""The house style (docs/STYLE.md) as a test: each rule runs over the whole tree, and once over a
planted violation, so that no rule can go blind."""

import ast
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sekisho"
LINES_MAX = 400
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
STRUCTURES_LINES_MAX = 60
CODE = {".py", ".cpp", ".h"}
TEXT = CODE | {".md", ".toml", ".yaml", ".ini", ".mako"}
SKIPPED = {".git", ".venv", ".engines", "__pycache__", "build", "dist", "mutants"}


@dataclass(frozen=True)
class Source:
    """A file of the tree: its path from the root, and its text."""

    path: str
    text: str

    @property
    def in_src(self) -> bool:
        return self.path.startswith("src/")

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)


Rule = Callable[[Source], Iterator[tuple[int, str]]]


def file_length(source: Source) -> Iterator[tuple[int, str]]:
    count = source.text.count("\n")
    if source.in_src and Path(source.path).suffix in CODE and count > LINES_MAX:
        yield count, f"{count} lines, at most {LINES_MAX}"


def line_length(source: Source) -> Iterator[tuple[int, str]]:
    """For what ruff does not read; it leaves Python lines longer only for a trailing pragma."""
    if Path(source.path).suffix in CODE - {".py"}:
        for number, line in enumerate(source.text.splitlines(), 1):
            if len(line) > COLUMNS_MAX:
                yield number, f"{len(line)} columns, at most {COLUMNS_MAX}"


def function_length(source: Source) -> Iterator[tuple[int, str]]:
    if source.in_src and source.is_python:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                count = node.end_lineno - node.lineno + 1
                if count > FUNCTION_LINES_MAX:
                    yield node.lineno, f"{node.name} has {count} lines, at most 70"


def no_assert(source: Source) -> Iterator[tuple[int, str]]:
    """``python -O`` strips asserts; a check that guards a tenant must not be strippable."""
    if source.in_src and source.is_python:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assert):
                yield node.lineno, "assert: use check(...) or raise"


def nothing_unfinished(source: Source) -> Iterator[tuple[int, str]]:
    marks = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X]|NotImplemented[E]rror)\b")
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := marks.search(line):
            yield number, f"{found[0]}: finish it"


def no_machine_path(source: Source) -> Iterator[tuple[int, str]]:
    """Home and work folders of one machine; system folders such as /dev/shm are fine."""
    path = re.compile(r"(?<![\w.~$}*/-])/(?:home|root|Users|work|farm|mnt)/")
    for number, line in enumerate(source.text.splitlines(), 1):
        if path.search(line):
            yield number, "absolute path of one machine"


def ascii_identifiers(source: Source) -> Iterator[tuple[int, str]]:
    """Look-alike letters hide one name behind another."""
    if not source.is_python or source.text.isascii():
        return
    for node in ast.walk(source.tree):
        names = [
            value
            for field in ("id", "name", "arg", "attr", "asname")
            if isinstance(value := getattr(node, field, None), str)
        ]
        for name in names:
            if not name.isascii():
                line = getattr(node, "lineno", 0)
                yield line, f"identifier {name!r} is not ASCII"


def docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """Modules, and the public functions and classes of a module. An enum's members speak for it."""
    if not (source.in_src and source.is_python and source.text.strip()):
        return
    tree = source.tree
    if ast.get_docstring(tree) is None:
        yield 1, "module without a docstring"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_enum = isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).split(".")[-1] in {"Enum", "IntEnum", "StrEnum", "Flag"}
            for base in node.bases
        )
        if not node.name.startswith("_") and not is_enum and ast.get_docstring(node) is None:
            yield node.lineno, f"public {node.name} without a docstring"


PLANTED: dict[Rule, Source] = {
    file_length: Source("src/a.py", "x = 1\n" * 401),
    line_length: Source("tests/a.cpp", "//" + "-" * 99),
    function_length: Source("src/a.py", "def f() -> None:\n" + "    x = 1\n" * 70),
    no_assert: Source("src/a.py", "def f(x: int) -> None:\n    assert x\n"),
    nothing_unfinished: Source("docs/a.md", "one day: " + "todo".upper()),
    no_machine_path: Source("docs/a.md", "see " + "/".join(["", "home", "somebody", "notes"])),
    ascii_identifiers: Source("tests/a.py", "аdmin = 1\n"),
    docstrings: Source("src/a.py", '"""A module."""\n\ndef public() -> None:\n    pass\n'),
}


@functools.cache
def tree() -> list[Source]:
    """Every text file of the checkout that the rules read."""
    sources = []
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            n for n in names if n not in SKIPPED and not n.endswith(("_cache", ".egg-info"))
        ]
        for name in files:
            path = Path(folder, name)
            if path.suffix in TEXT or name in {"Makefile", "run", "missing"}:
                text = path.read_text(encoding="utf-8")
                sources.append(Source(path.relative_to(ROOT).as_posix(), text))
    return sources


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_tree_follows_the_rule(rule: Rule) -> None:
    found = [f"{s.path}:{line}: {text}" for s in tree() for line, text in rule(s)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_rule_sees_a_planted_violation(rule: Rule) -> None:
    assert len(list(rule(PLANTED[rule]))) == 1
    assert not list(rule(Source("src/sekisho/core/a.py", '"""A module."""\n')))


def test_the_rules_read_the_whole_tree() -> None:
    paths = {source.path for source in tree()}
    assert {"src/sekisho/core/page.py", "tests/unit/test_tidy.py", "Makefile"} <= paths
    assert {"README.md", "docs/STYLE.md", "pyproject.toml", ".ci/run"} <= paths


def test_structures_is_short_and_names_every_package() -> None:
    text = (ROOT / "docs" / "structures.md").read_text(encoding="utf-8")
    assert text.count("\n") <= STRUCTURES_LINES_MAX
    packages = [folder.parent for folder in PACKAGE.glob("*/__init__.py")]
    assert packages
    missing = [folder.name for folder in packages if f"`{folder.name}/`" not in text]
    assert not missing


def test_names_of_test_files_are_unique() -> None:
    """Without packages, pytest imports two files of one name as one module."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1]
