"""Loading the guard: it is wholly there, or the process ends with code 2 and one line. Each case
runs in a process of its own, beside a package ``sglang`` that has just what the case needs."""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from sekisho.guard.sglang.plugin import VARIABLE, all_seams
from sekisho.guard.sglang.versions import VERSIONS

ROOT = Path(__file__).parents[2]
SUPPORTED = [version for version, known in VERSIONS.items() if known.supported]
QUEUE = "sglang.srt.disaggregation.mooncake.conn:FastQueue"

# As SGLang does: a plugin that raises is logged, and the server goes on without it.
LOAD = """
from importlib import import_module
module, _, name = ENTRY.partition(":")
try:
    getattr(import_module(module), name)()
except BaseException as error:
    print(f"logged: {error}")
print("serving")
"""

SHOW = """
for name in sorted(set(sys.modules) - before):
    if name.partition(".")[0] not in sys.stdlib_module_names:
        print(name)
"""


def entry_point() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["sglang.srt.plugins"].values()
    return str(entry)


def run(folder: Path, value: str | None, script: str = LOAD) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != VARIABLE}
    env["PYTHONPATH"] = str(folder)
    if value is not None:
        env[VARIABLE] = value
    code = f"ENTRY = {entry_point()!r}\n{script}"
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )


def refusal(folder: Path, value: str) -> str:
    """The one line with which a server does not start."""
    done = run(folder, value)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("sekisho guard: ")
    return line.removeprefix("sekisho guard: ")


def fake_sglang(folder: Path, version: str) -> Path:
    """Every function that the guard holds on to, with the parameters it knows, and no more."""
    modules: dict[str, dict[str, dict[str, tuple[str, ...]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for seam in all_seams():
        module, _, path = seam.target.partition(":")
        owner, name = path.split(".")
        modules[module][owner][name] = seam.parameters
    queue_module, _, queue = QUEUE.partition(":")
    modules[queue_module][queue] = {"put": ("self", "item"), "get": ("self",)}
    for module, classes in modules.items():
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for owner, methods in classes.items():
            lines.append(f"class {owner}:")
            for name, parameters in methods.items():
                mark = ["    @classmethod"] if parameters[0] == "cls" else []
                lines += [*mark, f"    def {name}({', '.join(parameters)}): pass"]
        file.write_text("\n".join(lines))
        for parent in file.parents:
            if parent == folder:
                break
            (parent / "__init__.py").touch()
    (folder / "sglang" / "__init__.py").write_text(f"__version__ = {version!r}")
    return folder


def test_the_entry_point_leads_to_the_guard() -> None:
    module, _, name = entry_point().partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("value", [None, "", "off"])
def test_without_the_variable_nothing_is_imported(tmp_path: Path, value: str | None) -> None:
    (tmp_path / "sglang.py").write_text("raise SystemExit('imported')")
    script = f"import sys\nbefore = set(sys.modules)\n{LOAD}\n{SHOW}"
    done = run(tmp_path, value, script)
    assert (done.returncode, done.stderr) == (0, "")
    parts = ["sekisho", "sekisho.guard", "sekisho.guard.sglang", "sekisho.guard.sglang.plugin"]
    assert done.stdout.splitlines() == ["serving", *parts]


@pytest.mark.parametrize("value", ["ON", "1", "true", "on ", "decode", "nonsense"])
def test_another_value_starts_no_server(tmp_path: Path, value: str) -> None:
    said = refusal(fake_sglang(tmp_path, SUPPORTED[0]), value)
    assert said == f"{VARIABLE} is {value!r}, and must be on or off"


UNSUPPORTED = [version for version, known in VERSIONS.items() if not known.supported]


@pytest.mark.parametrize("version", ["0.5.99", "0.5.19.post1", "", *UNSUPPORTED])
def test_an_unknown_version_starts_no_server(tmp_path: Path, version: str) -> None:
    said = refusal(fake_sglang(tmp_path, version), "on")
    supported = ", ".join(SUPPORTED)
    assert said == f"SGLang {version} is not a version that the guard knows ({supported})"


def test_without_sglang_no_server_starts(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").write_text("raise ModuleNotFoundError('No module named sglang')")
    assert refusal(tmp_path, "on") == "ModuleNotFoundError: No module named sglang"


def test_an_sglang_that_cannot_say_its_version_starts_no_server(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").write_text("")
    assert refusal(tmp_path, "on").startswith("AttributeError: ")


def test_an_exit_of_something_imported_starts_no_server_either(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").write_text("raise SystemExit")
    assert refusal(tmp_path, "on") == "SystemExit()"


# A child for each seam, forked once everything is imported.
EACH = """
import importlib, json, os, sys, tempfile
from sekisho.guard import seams
from sekisho.guard.sglang import plugin

def child(break_it):
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if pid == 0:
            os.dup2(said.fileno(), 2)
            break_it()
            plugin.load()
            seams.check_held(plugin.all_seams())
            queue = importlib.import_module("sglang.srt.disaggregation.mooncake.conn").FastQueue
            os._exit(0 if queue.__name__ == "GuardedQueue" else 3)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        return [code, said.read()]

def owner_of(target):
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name

def gone(target):
    owner, name = owner_of(target)
    return lambda: delattr(owner, name)

def changed(target):
    owner, name = owner_of(target)
    return lambda: setattr(owner, name, lambda renamed: None)

found = {"whole": child(lambda: None)}
for seam in plugin.all_seams():
    found["gone " + seam.target] = child(gone(seam.target))
    found["changed " + seam.target] = child(changed(seam.target))
queue = "sglang.srt.disaggregation.mooncake.conn:FastQueue"
found["gone " + queue] = child(gone(queue))
for method in ("put", "get"):
    found[f"gone {queue}.{method}"] = child(gone(f"{queue}.{method}"))
print(json.dumps(found))
"""


def test_one_function_missing_or_changed_starts_no_server(tmp_path: Path) -> None:
    done = run(fake_sglang(tmp_path, SUPPORTED[0]), "on", EACH)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found.pop("whole") == [0, ""]
    assert len(found) == 2 * len({seam.target for seam in all_seams()}) + 3
    for case, (code, said) in found.items():
        action, target = case.split()
        assert code == 2, case
        (line,) = said.splitlines()
        if target.startswith(QUEUE):
            assert "FastQueue" in line, line
        elif action == "gone":
            assert line.startswith(f"sekisho guard: SeamError: {target} is missing: "), line
        else:
            known = f"sekisho guard: SeamError: {target} has parameters renamed, not the known"
            assert line.startswith(known), line
