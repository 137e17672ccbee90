"""A vLLM pair of our own on this machine: started before the gateway, guarded, ended with it.

start     both processes ── both answer ──────────────── gateway serves
ended     one line of its log ── EngineError
stop                                                     ── SIGTERM ── SIGKILL
the gateway is killed                                    ── SIGTERM by the kernel (prctl(2))
"""

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
from pathlib import Path
from typing import IO

import aiohttp

from sekisho.gateway.engines.replica import EngineError, Replica, Role

START_S = 600.0
_STOP_S = 10.0
_ASK_EVERY_S = 0.5
_PR_SET_PDEATHSIG = 1
_LIBC, _SIGTERM = ctypes.CDLL(None), int(signal.SIGTERM)
_HOST = "127.0.0.1"
_ROLES: tuple[tuple[Role, str], ...] = (("prefill", "kv_producer"), ("decode", "kv_consumer"))
_GUARD_LINE = "sekisho guard: "
_KEPT = 300  # characters of a line of a log


class LocalPair:
    """``vllm`` of ``PATH``, twice, with the model in ``folder``; logs go to ``logs``.

    Environment variables of vLLM and Mooncake reach it; what would make them listen elsewhere than
    on loopback does not.

    Raises:
        EngineError: there is no ``vllm``.
    """

    def __init__(self, folder: Path, logs: Path, window: int | None) -> None:
        command = shutil.which("vllm")
        if command is None:
            raise EngineError("local: no command vllm on PATH (pip install vllm, in any venv)")
        self._command = command
        self._folder = folder
        self._logs = logs
        self._window = window
        ports = _free_ports(3)
        self._ports = dict(zip(("prefill", "decode"), ports, strict=False))
        self._bootstrap = ports[2]
        self._processes: dict[Role, asyncio.subprocess.Process] = {}

    def replicas(self) -> list[Replica]:
        """The two servers, where they are or will be."""
        return [
            Replica(
                role,
                f"http://{_HOST}:{self._ports[role]}",
                f"{role}-1",
                self._bootstrap if role == "prefill" else 0,
            )
            for role, _ in _ROLES
        ]

    async def start(self) -> None:
        """Both, until both answer.

        Raises:
            EngineError: one has ended, or is late; both are ended then.
        """
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = secrets.token_hex(32)
        cores = sorted(os.sched_getaffinity(0))
        halves = cores[: (len(cores) + 1) // 2], cores[len(cores) // 2 :]
        try:
            for (role, kind), half in zip(_ROLES, halves, strict=True):
                env = self._environment(key, half)
                with self._log(role).open("wb") as log:
                    self._processes[role] = await self._spawn(role, kind, env, log)
            async with asyncio.timeout(START_S):
                await self._wait()
        except TimeoutError:
            await self.stop()
            raise EngineError(f"local: vLLM was not ready in {START_S:.0f} s") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End what still runs, with everything that it has started."""
        running = [p for p in self._processes.values() if p.returncode is None]
        for process in running:
            _signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await asyncio.gather(*(process.wait() for process in running))
        for process in self._processes.values():
            _signal(process, signal.SIGKILL)
            await process.wait()
        self._processes.clear()

    def _environment(self, key: str, cores: list[int]) -> dict[str, str]:
        own = {
            "SEKISHO_GUARD": "on",
            "SEKISHO_GUARD_KEY": key,
            "VLLM_HOST_IP": _HOST,
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self._bootstrap),
            "MC_TCP_BIND_ADDRESS": _HOST,
            "MC_FORCE_TCP": "1",
            "HF_HUB_OFFLINE": "1",
        }
        given = {k: v for k, v in os.environ.items() if not k.startswith("SEKISHO_")}
        shared = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": _ranges(cores)}
        return shared | given | own

    async def _spawn(
        self, role: Role, kind: str, env: dict[str, str], log: IO[bytes]
    ) -> asyncio.subprocess.Process:
        transfer = {
            "kv_connector": "SekishoConnector",
            "kv_connector_module_path": "sekisho.guard.vllm.connector",
            "kv_role": kind,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"inner": "MooncakeConnector", "mooncake_protocol": "tcp"},
        }
        window = [] if self._window is None else ["--max-model-len", str(self._window)]
        return await asyncio.create_subprocess_exec(
            *(self._command, "serve", str(self._folder), *window),
            *("--host", _HOST, "--port", str(self._ports[role])),
            *("--kv-transfer-config", json.dumps(transfer)),
            # Compiling for a CPU takes minutes, and a pair of one machine is for trying.
            *("--enforce-eager", "--enable-prompt-tokens-details"),
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    async def _wait(self) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            for role, _ in _ROLES:
                while not await _answers(session, self._ports[role]):
                    self._still_run()
                    await asyncio.sleep(_ASK_EVERY_S)

    def _still_run(self) -> None:
        for role, process in self._processes.items():
            if process.returncode is not None:
                why = self._last_words(role) or f"see {self._log(role)}"
                raise EngineError(f"local: vLLM {role} ended with {process.returncode}: {why}")

    def _last_words(self, role: Role) -> str:
        """What the guard said there, or vLLM's own last error."""
        lines = self._log(role).read_text(errors="replace").splitlines()
        for mark in (_GUARD_LINE, "Error: "):
            for line in reversed(lines):
                if mark in line:
                    text = line[line.index(mark) :] if mark == _GUARD_LINE else line
                    return "".join(c if c.isprintable() else " " for c in text)[-_KEPT:]
        return ""

    def _log(self, role: Role) -> Path:
        return self._logs / f"vllm-{role}.log"


def _free_ports(count: int) -> list[int]:
    """Free now; nobody else takes one before vLLM does, unless he is quick."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((_HOST, 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in held]


async def _answers(session: aiohttp.ClientSession, port: int) -> bool:
    timeout = aiohttp.ClientTimeout(total=2.0)
    try:
        async with session.get(f"http://{_HOST}:{port}/health", timeout=timeout) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """To all of its session, whose leader has not been reaped or whose number is not free yet."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _ranges(cores: list[int]) -> str:
    return ",".join(map(str, cores))


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGTERM)
