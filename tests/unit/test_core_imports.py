"""core/ has no way to ask for time, chance or input: it imports next to nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sekisho.core

FOLDER = Path(sekisho.core.__file__).parent
ALLOWED = {"numpy", "hashlib", "enum", "dataclasses", "typing", "itertools", "collections"}
FILES = sorted(FOLDER.glob("*.py"))


def imported(tree: ast.Module) -> set[str]:
    """Every module that a tree imports, wherever in it; a relative one as it is written."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Name) and node.id in {"__import__", "eval", "exec", "open"}:
            names.add(node.id)
    return names


def forbidden(names: set[str]) -> set[str]:
    return {
        name
        for name in names
        if (name.split(".")[0] not in ALLOWED and not name.startswith("sekisho.core."))
        or name.startswith("numpy.random")
    }


def test_there_are_files_to_look_at() -> None:
    assert {"pool.py", "handoff.py", "table.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_core_imports_nothing_that_knows_the_world(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not forbidden(imported(tree))
    drawn = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not drawn & {"random", "datetime64"}


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "from os import path",
        "from . import pool",
        "import numpy.random",
        "def f():\n    import random",
        "from sekisho.engine import batch",
        "__import__('time')",
        "open('x')",
    ],
)
def test_the_look_is_not_blind(line: str) -> None:
    assert forbidden(imported(ast.parse(line)))


def test_core_loads_nothing_else_of_this_package() -> None:
    code = (
        "import sys, importlib, pkgutil, sekisho.core as core\n"
        "for item in pkgutil.iter_modules(core.__path__):\n"
        "    importlib.import_module('sekisho.core.' + item.name)\n"
        "print(*[name for name in sys.modules if name.startswith(('sekisho', 'torch', 'zmq'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(done.stdout.split())
    assert {"sekisho.core.pool", "sekisho.core.handoff"} <= names
    assert not {name for name in names if name != "sekisho" and "sekisho.core" not in name}
