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
from typing import Any, NamedTuple, TypeVar

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
BYTES_MAX = 4 << 30
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


class Change(NamedTuple):
    """A statement that changes one cell of ``table``, and those behind it that read the table."""

    name: str
    path: str
    table: str
    code: str

    def apply(self) -> None:
        """Run it in the module that is loaded, and hand new objects to all who imported them."""
        module = importlib.import_module(f"sekisho.core.{Path(self.path).stem}")
        before = dict(vars(module))
        exec(compile(self.code, self.name, "exec"), vars(module))
        for name, value in before.items():
            if (new := vars(module)[name]) is not value:
                for other in list(sys.modules.values()):
                    if getattr(other, name, None) is value:
                        setattr(other, name, new)


def by_cells(path: str, text: str) -> Iterator[Change]:
    """All changes of one cell of a table whose keys are members of an enum."""
    module = importlib.import_module(f"sekisho.core.{Path(path).stem}")
    enums: list[type[enum.Enum]] = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and list(kind)
    ]
    for node in (body := ast.parse(text).body):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        name = node.target.id
        table = getattr(module, name)
        is_table = isinstance(table, dict) and isinstance(next(iter(table)), enum.Enum)
        if not (is_table or isinstance(table, frozenset)):
            continue
        readers = [
            ast.unparse(later)
            for later in body[body.index(node) + 1 :]
            if isinstance(later, ast.Assign | ast.AnnAssign) and name in reads(later)
        ]
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
                full = "\n".join([change, *readers])
                yield Change(f"{path} {name}{cell}: {now} -> {option}", path, name, full)


def reads(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


# ---- running


class Cells:
    """In place of pytest's loop over the tests: one loop for each change, in a process of its own,
    all of which share the one collection."""

    def __init__(self, changes: list[Change]) -> None:
        self.changes = changes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        clean = Change("no change", "pool.py", "", "")
        if self.run(clean, session) != "survived":
            raise SystemExit("the tests fail without a mutant")
        report(self.changes, lambda change: self.run(change, session))
        return True

    def run(self, change: Change, session: pytest.Session) -> str:
        near = {Path(ROOT, file) for file in tests_of(change.path)}
        length = Counter(item.path for item in session.items)
        items = sorted(session.items, key=lambda item: (item.path not in near, length[item.path]))

        def tests() -> int:
            change.apply()
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    return 1
            return 0

        return forked(tests)


def forked(tests: Callable[[], int]) -> str:
    """``killed``, ``survived`` or ``timeout``: what becomes of a process that runs the tests."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(SECONDS_MAX)
            resource.setrlimit(resource.RLIMIT_AS, (BYTES_MAX, BYTES_MAX))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            code = tests()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) == signal.SIGALRM else "killed"
    return "killed" if os.WEXITSTATUS(status) else "survived"


def selection() -> tuple[list[str], list[str]]:
    """Options, and the tests that mutmut runs."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    options = [*OPTIONS, *config["pytest_add_cli_args"]]
    return options, config["pytest_add_cli_args_test_selection"]


def tests_of(path: str) -> list[str]:
    """Those of the selection that import from a file of core/."""
    line = f"sekisho.core.{Path(path).stem} import"
    return [file for file in selection()[1] if line in (ROOT / file).read_text(encoding="utf-8")]


def verdict(mutant: Mutant, folder: Path) -> str:
    """By the tests of that file, and if these see nothing, by all others."""
    options, files = selection()
    near = tests_of(mutant.path)
    found = "survived"
    for part in (near, [file for file in files if file not in near]):
        if part and found == "survived":
            found = with_text(mutant, folder, [*options, *part])
    return found


def with_text(mutant: Mutant, folder: Path, arguments: list[str]) -> str:
    """What becomes of the mutant in a process that imports it."""
    core = folder / "sekisho" / "core"
    (core / mutant.path).write_text(mutant.text, encoding="utf-8")
    found = forked(lambda: int(pytest.main(arguments)))
    shutil.copy(CORE / mutant.path, core)
    shutil.rmtree(core / "__pycache__", ignore_errors=True)  # within a second it looks up to date
    return found


One = TypeVar("One", Mutant, Change)


def report(todo: list[One], judge: Callable[[One], str]) -> None:
    """Judge each, and print what was not killed."""
    counts: Counter[str] = Counter()
    for one in todo:
        found = judge(one)
        counts[found] += 1
        if found != "killed":
            print(f"{found}: {' '.join(one.name.split())}", flush=True)
    print(f"{len(todo)} mutants: {dict(counts)}", flush=True)


def wanted(make: Callable[[str, str], Iterator[One]], words: list[str]) -> list[One]:
    return [
        one
        for file in sorted(CORE.glob("[a-z]*.py"))
        for one in make(file.name, file.read_text(encoding="utf-8"))
        if not words or any(word in one.name for word in words)
    ]


def run_cells(words: list[str]) -> int:
    options, files = selection()
    return int(pytest.main([*options, "-s", *files], plugins=[Cells(wanted(by_cells, words))]))


def main(words: list[str]) -> None:
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of a short run is loading them
    if os.fork() == 0:  # a process for itself, since it imports core/ as it is
        os._exit(run_cells(words))
    if os.wait()[1]:
        raise SystemExit("the run of the tables failed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(CORE, folder / "sekisho" / "core")
        shutil.copy(CORE.parent / "__init__.py", folder / "sekisho")
        sys.path.insert(0, name)
        report(wanted(by_operators, words), lambda mutant: verdict(mutant, folder))


if __name__ == "__main__":
    main(sys.argv[1:])
