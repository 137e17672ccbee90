"""``sekisho serve`` as a user starts it: a command, its output, Ctrl-C."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SEKISHO = str(Path(sys.executable).with_name("sekisho"))
START_S = 240.0
STOP_S = 120.0


class ServeError(Exception):
    """The command did not do what it should; the message holds what it printed on stderr."""


@dataclass
class Launched:
    """A running command."""

    process: subprocess.Popen[bytes]
    folder: Path

    def output(self) -> str:
        """Everything on stdout so far."""
        return (self.folder / "stdout").read_text()

    def log(self) -> str:
        """Everything on stderr so far."""
        return (self.folder / "stderr").read_text()

    def processes(self) -> list[int]:
        """Ids of the command's process and of all below it."""
        return [self.process.pid, *_descendants(self.process.pid)]

    def interrupt(self) -> None:
        """What Ctrl-C does: a SIGINT to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        """The exit code, once the command has ended."""
        return self.process.wait(STOP_S)

    def left_behind(self) -> list[str]:
        """Folders and files in its folder for temporary files."""
        return sorted(path.name for path in (self.folder / "tmp").iterdir())


@dataclass
class Served(Launched):
    """A platform that serves. ``keys`` are by tenant, ``curl`` is the line to try it with."""

    url: str
    model: str
    tokens_max: int
    keys: dict[str, str]
    curl: str


@contextlib.contextmanager
def launch(command: Sequence[str]) -> Iterator[Launched]:
    """Run ``command``, with its own folder for temporary files; what is left of it at the end is
    killed."""
    # Short: the paths of sockets below it have a limit of 107 bytes.
    with tempfile.TemporaryDirectory(prefix="serve-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "TMPDIR": str(folder / "tmp")},
                start_new_session=True,
            )
        try:
            yield Launched(process, folder)
        finally:
            left = [process.pid, *_descendants(process.pid)]
            if process.poll() is None:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def serve(command: Sequence[str]) -> Iterator[Served]:
    """Run ``command`` until it says that it serves, and to the end of the block.

    Raises:
        ServeError: it ended, or said nothing within `START_S`.
    """
    with launch(command) as launched:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and launched.process.poll() is None:
            output = launched.output()
            if "\ncurl " in output and output.endswith("\n\n"):
                break
            time.sleep(0.1)
        else:
            code = launched.process.poll()
            state = "says nothing" if code is None else f"ended with {code}"
            raise ServeError(f"the command {state}: {launched.log()}")
        yield _parsed(launched, output)


def _parsed(launched: Launched, output: str) -> Served:
    served = re.search(r"^Sekisho serves (\S+) at (http://\S+)/v1$", output, re.MULTILINE)
    longest = re.search(r"^Longest request: (\d+) tokens", output, re.MULTILINE)
    keys = dict(re.findall(r"^  (\S+): (sk-sekisho-\S+)$", output, re.MULTILINE))
    curl = re.search(r"^curl [^\n]*\\\n[^\n]*$", output, re.MULTILINE)
    if not (served and longest and curl and len(keys) == 2):
        raise ServeError(f"this is not what it should print: {output}")
    return Served(
        process=launched.process,
        folder=launched.folder,
        url=served[2],
        model=served[1],
        tokens_max=int(longest[1]),
        keys=keys,
        curl=curl[0],
    )


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def is_alive(pid: int) -> bool:
    """Whether that process exists; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def writing_below(place: Path) -> list[int]:
    """Processes whose standard output goes to a file that is, or is below, ``place``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "fd" / "1").readlink().is_relative_to(place):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
