"""Compiling the kernels: when it cannot be done the reason is said, and nothing is half there."""

import subprocess
import sys
from pathlib import Path

import pytest

from sekisho.engine.kernels import build
from sekisho.engine.kernels.build import FLAGS, KernelUnavailable, load_library

load = load_library.__wrapped__  # without the per-process cache
VISIBLE = 'extern "C" __attribute__((visibility("default")))'
EMPTY = f"{VISIBLE} int sk_supported(int) {{ return 1; }}"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny kernels.cpp in place of the real one, and a fresh cache folder."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "kernels.cpp").write_text(EMPTY)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "sekisho" / "kernels").iterdir())


def test_compiles_once_for_each_content(sources: Path, tmp_path: Path) -> None:
    assert load().sk_supported(0) == 1
    (library,) = cached(tmp_path)
    assert library.parent.stat().st_mode & 0o777 == 0o700
    before = library.stat().st_mtime_ns
    load()
    assert cached(tmp_path) == [library]
    assert library.stat().st_mtime_ns == before
    (sources / "kernels.cpp").write_text(EMPTY.replace("1;", "2;"))
    assert load().sk_supported(0) == 2
    assert len(cached(tmp_path)) == 2


def test_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(sources))
    with pytest.raises(KernelUnavailable, match=r"no g\+\+"):
        load()


def test_compile_error(sources: Path, tmp_path: Path) -> None:
    (sources / "kernels.cpp").write_text("int broken(")
    with pytest.raises(KernelUnavailable, match=r"compile error: .*error"):
        load()
    assert cached(tmp_path) == []


def test_a_folder_that_others_may_write_is_not_loaded_from(sources: Path, tmp_path: Path) -> None:
    load()
    (tmp_path / "cache" / "sekisho" / "kernels").chmod(0o777)
    with pytest.raises(KernelUnavailable, match="somebody else"):
        load()


def test_processes_that_compile_at_once_all_load(sources: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from sekisho.engine.kernels import build;"
        "build.SOURCES = pathlib.Path(sys.argv[1]);"
        "sys.exit(build.load_library().sk_supported(0) - 1)"
    )
    command = [sys.executable, "-c", code, str(sources)]
    racing = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(timeout=120) for process in racing] == [0] * 4
    assert len(cached(tmp_path)) == 1


def test_the_compiler_may_not_change_the_arithmetic() -> None:
    assert "-ffp-contract=off" in FLAGS
    assert not {"-ffast-math", "-Ofast", "-march=native"} & set(FLAGS)
