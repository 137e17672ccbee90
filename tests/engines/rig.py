"""Starts and stops real engines on this machine's CPU: each a session of its own, on loopback.

What all engines share; `rig_sglang` and `rig_vllm` know the engines. ``SEKISHO_ENGINES`` names the
folder that `install.py` filled, by default ``.engines`` in the checkout.
"""

import contextlib
import ctypes
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

ROOT = Path(__file__).parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"
START_S = 600.0
_STOP_S = 8.0
_TAIL_LINES = 25
_PORTS = range(20000, 30000)  # below those that the kernel gives to outgoing connections
_DROPPED = ("PYTHON", "OPENBLAS_", "SEKISHO_", "VIRTUAL_ENV")
_PR_SET_PDEATHSIG = 1
_LIBC, _SIGTERM = ctypes.CDLL(None), int(signal.SIGTERM)
_given_out: set[int] = set()


class EngineError(Exception):
    """An engine is not installed, ended, or was not ready in time; with the tail of its log."""


@dataclass(frozen=True)
class Answer:
    """What came back for one request. ``status`` 0: no HTTP answer came, ``body`` says why."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)


def engines_root() -> Path:
    """The folder that the engines are installed in."""
    return Path(os.environ.get("SEKISHO_ENGINES") or ROOT / ".engines")


def installed(*parts: str, ask: str) -> Path:
    """A folder below `engines_root`; ``ask`` is what `install.py` is to be told for it.

    Raises:
        EngineError: it isn't there, or its installation did not come to its end.
    """
    folder = engines_root().joinpath(*parts)
    if not (folder / ".installed").is_file():
        raise EngineError(f"not installed: python tests/engines/install.py {ask}")
    return folder


def free_port() -> int:
    """A port of loopback that nobody listens on, and that this process has not given out before."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port not in _given_out and probe.connect_ex(("127.0.0.1", port)) != 0:
                _given_out.add(port)
                return port


def environment(pythonpath: Sequence[Path], more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would steer another Python, and with ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, pythonpath)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MC_FORCE_TCP": "1",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "MOONCAKE_PROTOCOL": "tcp",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


class EngineProcess:
    """One server. ``log`` grows over restarts."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], port: int, log: Path
    ) -> None:
        self.name = name
        self.command = list(command)
        self.env = dict(env)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the leader, whose session holds all of the engine's processes."""
        if self._process is None:
            raise EngineError(f"{self.name} was not started")
        return self._process.pid

    def start(self) -> None:
        """Begin; see `wait_ready`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The tests' main thread forks here: the function takes no lock.
                preexec_fn=_end_with_parent if _is_main_thread() else None,  # noqa: PLW1509
            )

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process is not None else None

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(line[:300] for line in text.splitlines()[-lines:])

    def wait_ready(self, timeout_s: float = START_S, path: str = "/v1/models") -> None:
        """Until ``path`` answers 200, or 401.

        Raises:
            EngineError: it ended, or the time is over.
        """
        end = time.monotonic() + timeout_s
        while not self._answers(path):
            code = self.exit_code()
            if code is not None:
                raise EngineError(f"{self.name} ended with {code}; its log ends:\n{self.tail()}")
            if time.monotonic() > end:
                what = f"{self.name} was not ready in {timeout_s:.0f} s"
                raise EngineError(f"{what}; its log ends:\n{self.tail()}")
            time.sleep(0.5)

    def get(self, path: str, timeout_s: float = 10.0) -> bytes:
        """The body of a 200.

        Raises:
            OSError: no answer, or another one.
        """
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return bytes(answer.read())

    def _answers(self, path: str) -> bool:
        try:
            self.get(path, 2.0)
        except urllib.error.HTTPError as error:
            return error.code == http.HTTPStatus.UNAUTHORIZED  # it serves, with keys
        except (OSError, http.client.HTTPException):
            return False
        return True

    def resident(self) -> int:
        """Bytes of memory that its processes have, what they share counted for each."""
        pages = 0
        for pid in self._session():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def stop(self) -> None:
        """End all its processes; the ones that do not end in time are killed."""
        self._signal(signal.SIGTERM)
        end = time.monotonic() + _STOP_S
        while self._session() and time.monotonic() < end:
            time.sleep(0.1)
        self.kill()

    def freeze(self) -> None:
        """Its processes keep all they have and do nothing more, until `kill`."""
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End all its processes at once, as a crash does."""
        while self._session():
            self._signal(signal.SIGKILL)
            time.sleep(0.05)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _session(self) -> list[int]:
        """The processes of its session that still run. The leader is reaped only by `kill`, so
        that nobody else can have its number meanwhile."""
        if self._process is None:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    state, session = fields[0], int(fields[3])
                    if session == self._process.pid and state != "Z":
                        found.append(int(entry.name))
        return found


class Engines:
    """Several processes that are started and stopped together."""

    def __init__(self, processes: Sequence[EngineProcess]) -> None:
        self.processes = tuple(processes)
        self.start_seconds = 0.0

    def start(self, timeout_s: float = START_S) -> Self:
        """Start all at once, and wait for all.

        Raises:
            EngineError: one ended or was late; then all are stopped.
        """
        began = time.monotonic()
        try:
            for process in self.processes:
                process.start()
            self._wait(timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def _wait(self, timeout_s: float) -> None:
        """In turns, so that one that ends is seen while another still loads."""
        end = time.monotonic() + timeout_s
        waiting = list(self.processes)
        while waiting:
            for process in list(waiting):
                try:
                    process.wait_ready(0.0)
                    waiting.remove(process)
                except EngineError:
                    if process.exit_code() is not None or time.monotonic() > end:
                        raise
            time.sleep(0.5)

    def stop(self) -> None:
        for process in self.processes:
            process.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.stop()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end_with_parent() -> None:
    """An engine spins a core even when idle: it must not outlive a test run that was killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGTERM)


async def post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Answer:
    """One request; what is no HTTP answer becomes status 0."""
    began = time.monotonic()
    try:
        async with session.post(url, json=body) as answer:
            read = await answer.read()
            return Answer(answer.status, read, time.monotonic() - began)
    except (aiohttp.ClientError, TimeoutError) as error:
        return Answer(0, repr(error).encode(), time.monotonic() - began)
