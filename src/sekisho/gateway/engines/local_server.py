"""One guarded vLLM server of a local pair: its command, its environment, its log.

It has a session of its own, so that its workers can be ended with it; the kernel tells it to end
when the gateway is gone (prctl(2), PR_SET_PDEATHSIG).
"""

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from sekisho.gate.fetch import clip
from sekisho.gateway.engines.replica import Replica, Role

HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_LIBC, _SIGTERM = ctypes.CDLL(None), int(signal.SIGTERM)
_KINDS: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_GUARD_LINE = "sekisho guard: "
_RAISED = re.compile(
    r"(?:\([^)]*\) )?(?:ERROR \S+ \S+ \[\S+\] )?((?:\w+\.)*\w*(?:Error|Exception): .*)"
)
"""The last line of a traceback, printed or logged."""
_WORDS_MAX = 4 * 1024 * 1024  # bytes of a log in which it is looked for
_KEPT = 300  # characters


class LocalServer:
    """One role. ``port`` is its HTTP port, ``bootstrap`` prefill's bootstrap port."""

    def __init__(
        self, role: Role, port: int, bootstrap: int, command: Sequence[str], log: Path
    ) -> None:
        transfer = {
            "kv_connector": "SekishoConnector",
            "kv_connector_module_path": "sekisho.guard.vllm.connector",
            "kv_role": _KINDS[role],
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"inner": "MooncakeConnector", "mooncake_protocol": "tcp"},
        }
        self.role = role
        self.log = log
        self.url = f"http://{HOST}:{port}"
        self._bootstrap = bootstrap
        self._command = [
            *(*command, "--host", HOST, "--port", str(port)),
            *("--kv-transfer-config", json.dumps(transfer)),
            # Compiling for a CPU takes minutes, and a pair of one machine is for trying.
            *("--enforce-eager", "--enable-prompt-tokens-details"),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._said_before = 0
        self._was_ready = False

    def replica(self) -> Replica:
        """It, for the fleet."""
        port = self._bootstrap if self.role == "prefill" else 0
        return Replica(self.role, self.url, f"{self.role}-1", port)

    async def start(self, keys: Mapping[str, str], cores: Sequence[int], pool_gib: int) -> None:
        """Begin to start. ``keys``: secrets, by variable; ``cores``: where it may compute."""
        own = {
            "SEKISHO_GUARD": "on",
            "VLLM_HOST_IP": HOST,
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self._bootstrap),
            "MC_TCP_BIND_ADDRESS": HOST,
            "MC_FORCE_TCP": "1",
            "HF_HUB_OFFLINE": "1",
        }
        unless_given = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(pool_gib),
        }
        with self.log.open("ab") as log:
            self._said_before, self._was_ready = log.tell(), False
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=unless_given | _without_ours(os.environ) | own | {**keys},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    async def ready(self) -> None:
        """Wait until it answers."""
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            self._was_ready = True
                            return
                await asyncio.sleep(0.5)

    async def ended(self) -> str:
        """Wait until it has ended by itself; returns why."""
        if self._process is None:
            return f"local: vLLM {self.role} was not started"
        code = await self._process.wait()
        why = self._last_words() or f"see {self.log}"
        return f"local: vLLM {self.role} ended with {code}: {why}"

    def signal(self, number: signal.Signals) -> None:
        """To it and all that it has started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def stop(self, patience: float) -> None:
        """End it, and kill what is left of it after ``patience`` seconds."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._process.wait()
        self.signal(signal.SIGKILL)
        await self._process.wait()
        self._process = None  # another process may have its number from now on

    def _last_words(self) -> str:
        """What the guard said before it was ready, or vLLM's first error: others follow from it."""
        if self._was_ready:
            return ""
        with self.log.open("rb") as file:
            file.seek(self._said_before)
            lines = file.read(_WORDS_MAX).decode(errors="replace").splitlines()
        for line in lines:
            if _GUARD_LINE in line:
                return clip(line[line.index(_GUARD_LINE) :])
        for number, line in enumerate(lines):
            if match := _RAISED.match(line):
                return clip(" ".join([match[1], *lines[number + 1 : number + 3]]), _KEPT)
        return ""


def _without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("SEKISHO_")}


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGTERM)
