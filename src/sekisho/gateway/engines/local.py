"""A guarded vLLM pair of our own on this machine, started before the gateway serves.

start     both ── both answer ────────────── gateway serves
one ends  its last words ── the other is ended ── pause ── both are started, with a new key
stop      SIGTERM ── SIGKILL
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
from pathlib import Path
from typing import Any

from sekisho.gate.fetch import Key
from sekisho.gateway.engines.local_server import HOST, LocalServer
from sekisho.gateway.engines.replica import EngineError, Replica

log = logging.getLogger("sekisho.engines")

START_S = 600.0
STOP_S = 10.0
BACKOFF_S = (1.0, 60.0)
"""Pause before the pair is started again, which doubles up to the second value."""
_STABLE_S = 60.0
_POOL_SHARE = 0.25  # of the free memory, for the blocks of one server


class LocalPair:
    """``vllm`` of ``PATH``, twice, with the model in ``folder``; logs go to ``logs``.

    Environment variables of vLLM and Mooncake reach it; what would make them listen elsewhere than
    on loopback does not.

    Attributes:
        key: what its servers ask for; who has an account here but not the key cannot use them.

    Raises:
        EngineError: there is no ``vllm``.
    """

    def __init__(self, folder: Path, logs: Path, window: int | None) -> None:
        vllm = shutil.which("vllm")
        if vllm is None:
            raise EngineError("local: no command vllm on PATH (pip install vllm, in any venv)")
        command = [vllm, "serve", str(folder)]
        if window is not None:
            command += ["--max-model-len", str(window)]
        prefill, decode, bootstrap = _free_ports(3)
        self._api_key = secrets.token_hex(32)
        self.key = Key(self._api_key)
        self._logs = logs
        self._servers = (
            LocalServer("prefill", prefill, bootstrap, command, logs / "vllm-prefill.log"),
            LocalServer("decode", decode, bootstrap, command, logs / "vllm-decode.log"),
        )
        self._keeping: asyncio.Task[None] | None = None

    def replicas(self) -> list[Replica]:
        """The two servers, where they are or will be."""
        return [server.replica() for server in self._servers]

    async def start(self) -> None:
        """Both, until both answer; from then on, again when one has ended.

        Raises:
            EngineError: one has ended, or is late; both are ended then.
        """
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for server in self._servers:
            server.log.unlink(missing_ok=True)
        await self._begin()
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End both, with everything that they have started."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._end()

    async def _begin(self) -> None:
        keys = {"SEKISHO_GUARD_KEY": secrets.token_hex(32), "VLLM_API_KEY": self._api_key}
        cores = sorted(os.sched_getaffinity(0))
        halves = cores[: (len(cores) + 1) // 2], cores[len(cores) // 2 :]
        pool_gib = _pool_gib()
        try:
            for server, half in zip(self._servers, halves, strict=True):
                await server.start(keys, half, pool_gib)
            await self._ready()
        except BaseException:
            await self._end()
            raise

    async def _ready(self) -> None:
        """Both answer, before one ends and before the time is over."""
        ended = asyncio.create_task(self._ended())
        both = asyncio.create_task(self._both_answer())
        tasks: list[asyncio.Task[Any]] = [ended, both]
        try:
            await asyncio.wait(tasks, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise EngineError(ended.result())
            if not both.done():
                raise EngineError(f"local: vLLM was not ready in {START_S:.0f} s")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _both_answer(self) -> None:
        for server in self._servers:
            await server.ready()

    async def _keep(self) -> None:
        """Both again, whichever ends: neither is of use to a new one of the other."""
        clock = asyncio.get_running_loop().time
        pause = BACKOFF_S[0]
        while True:
            began = clock()
            log.error("%s", await self._ended())
            await self._end()
            pause = BACKOFF_S[0] if clock() - began > _STABLE_S else pause
            while True:
                log.warning("local: the pair is started again in %g s", pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, BACKOFF_S[1])
                try:
                    await self._begin()
                    break
                except (EngineError, OSError) as error:
                    log.error("%s", error)

    async def _ended(self) -> str:
        """Why the first one has ended that does."""
        waits = [asyncio.create_task(server.ended()) for server in self._servers]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return next(wait.result() for wait in waits if wait in done)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _end(self) -> None:
        await asyncio.gather(*(server.stop(STOP_S) for server in self._servers))


def _free_ports(count: int) -> list[int]:
    """Free now; nobody else takes one before vLLM does, unless he is quick."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in held]


def _pool_gib() -> int:
    """What vLLM would take for itself on a CPU is nearly all memory, for one of two."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, int(free * _POOL_SHARE) >> 30)
