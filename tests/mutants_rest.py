"""Mutants of core/ that mutmut does not make: properties, module level, cells of the tables.

mutmut changes bodies of functions that have no decorator. This makes the same changes in the bodies
of properties and in what stands outside functions, and then changes every table of states cell by
cell: an entry is taken out, put in where there was none, or leads somewhere else. Each mutant is
one process with the selection of tests that mutmut uses; a copy of core/ in a temporary folder is
what is changed.

    python tests/mutants_rest.py [word …]      only mutants whose name contains one of the words

It does not see what only the end of a name, a type or a docstring would change.
"""

import ast
import enum
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.stateful  # noqa: F401  (imported once here and not by every process)
import libcst as cst
import numpy  # noqa: F401
import pytest
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
CORE = ROOT / "src" / "sekisho" / "core"
PLUGINS = ["-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin"]
OPTIONS = ["-x", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", *PLUGINS]
SECONDS_MAX = 120
BYTES_MAX = 8 << 30
SEPARATE = (cst.Import, cst.ImportFrom, cst.Annotation, cst.TypeAlias)


class Mutant(NamedTuple):
    """``text`` is the whole file ``path`` as it would be."""

    name: str
    path: str
    text: str


# ---- what mutmut would do, where it does not


class Places(cst.CSTVisitor):
    """The nodes outside functions, and within functions that have a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, cst.CSTNode]] = []
        self._within: list[str] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, SEPARATE):
            return False
        if isinstance(node, cst.FunctionDef):
            if not node.decorators:
                return False
            self._within.append(node.name.value)
        elif isinstance(node, cst.ClassDef):
            self._within.append(node.name.value)
        self.found.append((".".join(self._within) or "module", node))
        return not isinstance(node, cst.Decorator)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.ClassDef) or (
            isinstance(original_node, cst.FunctionDef) and original_node.decorators
        ):
            self._within.pop()


def by_operators(path: str, text: str) -> Iterator[Mutant]:
    """What mutmut's own operators make of those nodes."""
    wrapper = MetadataWrapper(cst.parse_module(text))
    spans, tree, code = wrapper.resolve(ByteSpanPositionProvider), wrapper.module, text.encode()
    places = Places()
    tree.visit(places)
    for where, node in places.found:
        for kind, operator in mutation_operators:
            for new in operator(node) if isinstance(node, kind) else ():
                start, end = spans[node].start, spans[node].start + spans[node].length
                there, instead = code[start:end].decode(), tree.code_for_node(new)
                changed = code[:start].decode() + instead + code[end:].decode()
                yield Mutant(f"{path} {where}: {there} -> {instead}", path, changed)


# ---- tables of states, cell by cell


def cells(table: Any, enums: list[type[enum.Enum]]) -> Iterator[tuple[str, str, list[str]]]:
    """Per cell its name, what is in it, and all that could be in it."""
    if isinstance(table, frozenset):
        for item in next(kind for kind in product_of(enums) if table <= set(kind)):
            yield spelled(item), str(item in table), ["True", "False"]
        return
    nested = isinstance(next(iter(table.values())), dict)
    rows = {f"[{spelled(key)}]": row for key, row in table.items()} if nested else {"": table}
    for prefix, row in rows.items():
        column, target = next(iter(row.items()))
        targets = list(type(target)) if isinstance(target, enum.Enum) else set(row.values())
        for key in type(column):
            now = spelled(row[key]) if key in row else "nothing"
            yield f"{prefix}[{spelled(key)}]", now, [*map(spelled, targets), "nothing"]


def product_of(enums: list[type[enum.Enum]]) -> Iterator[list[Any]]:
    yield from (list(kind) for kind in enums)
    yield from (list(product(*pair)) for pair in product(enums, repeat=2))


def spelled(item: Any) -> str:
    if isinstance(item, tuple):
        return f"({', '.join(map(spelled, item))})"
    return f"{type(item).__name__}.{item.name}" if isinstance(item, enum.Enum) else str(item)


def by_cells(path: str, text: str) -> Iterator[Mutant]:
    """The file with one more statement behind a table, which changes one of its cells."""
    module = importlib.import_module(f"sekisho.core.{Path(path).stem}")
    enums: list[type[enum.Enum]] = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and list(kind)
    ]
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        name = node.target.id
        table = getattr(module, name)
        is_table = isinstance(table, dict) and isinstance(next(iter(table)), enum.Enum)
        if not (is_table or isinstance(table, frozenset)):
            continue
        for cell, now, options in cells(table, enums):
            for option in options:
                if option == now:
                    continue
                if isinstance(table, frozenset):
                    change = f"{name} {'|' if option == 'True' else '-'}= {{{cell}}}"
                elif option == "nothing":
                    change = f"del {name}{cell}"
                else:
                    change = f"{name}{cell} = {option}"
                changed = [*lines[: node.end_lineno], change, "\n", *lines[node.end_lineno or 0 :]]
                yield Mutant(f"{path} {name}{cell}: {now} -> {option}", path, "".join(changed))


def mutants() -> Iterator[Mutant]:
    makers: list[Callable[[str, str], Iterator[Mutant]]] = [by_operators, by_cells]
    for file in sorted(CORE.glob("[a-z]*.py")):
        text = file.read_text(encoding="utf-8")
        for make in makers:
            yield from make(file.name, text)


# ---- running


def selection() -> tuple[list[str], list[str]]:
    """Options, and the tests that mutmut runs."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    words = [*config["pytest_add_cli_args"], *config["pytest_add_cli_args_test_selection"]]
    files = [word for word in words if word.endswith(".py")]
    return [word for word in words if word not in files], files


def verdict(mutant: Mutant, folder: Path) -> str:
    """``killed``, ``survived`` or ``timeout``: by the tests of that file, if not by all others."""
    options, files = selection()
    module = f"sekisho.core.{Path(mutant.path).stem} import"
    near = [file for file in files if module in (ROOT / file).read_text(encoding="utf-8")]
    far = [file for file in files if file not in near]
    found = outcome(mutant, folder, [*options, *near])
    return outcome(mutant, folder, [*options, *far]) if found == "survived" and far else found


def outcome(mutant: Mutant, folder: Path, arguments: list[str]) -> str:
    """What becomes of the mutant in a process that imports it."""
    core = folder / "sekisho" / "core"
    (core / mutant.path).write_text(mutant.text, encoding="utf-8")
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS_MAX)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES_MAX, BYTES_MAX))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = 1
        try:
            code = int(pytest.main([*OPTIONS, *arguments]))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    shutil.copy(CORE / mutant.path, core)
    shutil.rmtree(core / "__pycache__", ignore_errors=True)  # within a second it looks up to date
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) == signal.SIGALRM else "killed"
    return "killed" if os.WEXITSTATUS(status) else "survived"


def main(words: list[str]) -> None:
    todo = [one for one in mutants() if not words or any(word in one.name for word in words)]
    for name in [name for name in sys.modules if name.split(".")[0] == "sekisho"]:
        del sys.modules[name]
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of a short run is loading them
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(CORE, folder / "sekisho" / "core")
        shutil.copy(CORE.parent / "__init__.py", folder / "sekisho")
        sys.path.insert(0, name)
        clean = Mutant("unchanged", "pool.py", (CORE / "pool.py").read_text(encoding="utf-8"))
        if verdict(clean, folder) != "survived":
            raise SystemExit("the tests fail without a mutant")
        for mutant in todo:
            found = verdict(mutant, folder)
            counts[found] += 1
            if found != "killed":
                print(f"{found}: {' '.join(mutant.name.split())}", flush=True)
    print(f"{len(todo)} mutants: {dict(counts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
