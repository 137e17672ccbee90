"""Compiles the C++ kernels at first use into the user's cache folder and loads them."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
# No contraction and no reordering: the bits of a result are part of the contract. What is hot is
# unrolled in the source, so -O3 would only double the time to compile.
FLAGS = (
    "-O2",
    "-fvect-cost-model=dynamic",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
COMPILE_SECONDS = 300


class KernelUnavailable(Exception):  # noqa: N818 - a state, not a mistake
    """The native kernels cannot run here; the text says why."""


@cache
def load_library() -> ctypes.CDLL:
    """The kernels as a shared library, compiled unless the cache folder has them.

    Raises:
        KernelUnavailable: no g++, a compile error, an unsafe cache folder.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise KernelUnavailable("no g++ on PATH")
    try:
        library = _folder() / f"{_fingerprint(compiler)}.so"
        if not library.exists():
            _compile(compiler, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise KernelUnavailable(str(error)) from error


def _folder() -> Path:
    """The cache folder, mode 0700. Code is loaded from it, so nobody else may write there."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "sekisho" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise KernelUnavailable(f"{folder} belongs to, or can be written by, somebody else")
    return folder


def _fingerprint(compiler: str) -> str:
    """Hash over all that decides the library: sources, compiler, flags, machine."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_SECONDS
    ).stdout
    hasher = hashlib.blake2b(digest_size=16)
    parts = [version, " ".join(FLAGS).encode(), platform.machine().encode()]
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".cpp", ".h"}:
            parts += [source.name.encode(), source.read_bytes()]
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def _compile(compiler: str, library: Path) -> None:
    """Compile beside the target and rename: another process sees all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        command = [compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(output)]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS
        )
        if result.returncode != 0:
            errors = [line for line in result.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else f"g++ ended with {result.returncode}"
            raise KernelUnavailable(f"compile error: {reason}")
        output.replace(library)


def main() -> None:
    """Compile ahead of the first use, so that no start of a server waits for it."""
    try:
        load_library()
    except KernelUnavailable as error:
        print(f"native kernels: {error}; plain torch serves instead")


if __name__ == "__main__":
    main()
