"""Starts node processes and replaces dead ones, each time as a new node of a new name.

Whoever waits for a process with wait(2) knows that it has ended: that is the one proof of a
writer's end that needs no word of the writer.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from sekisho.node.build import NodeConfig

log = logging.getLogger("sekisho.supervisor")

_CANNOT_RUN = 2
_BACKOFF_S = (0.2, 10.0)
_STABLE_S = 30.0
_TERMINATE_S = 5.0


class Supervisor:
    """One slot for each node of the plan; a slot restarts its process until `stop`.

    Args:
        command: program and arguments before the JSON of a `NodeConfig`.
        configure: the configuration for (role, name); names are ``role-slot.generation``.
        exited: called with (name, exit code) after a process has ended, before its successor
            starts.
    """

    def __init__(
        self,
        command: Sequence[str],
        configure: Callable[[str, str], NodeConfig],
        exited: Callable[[str, int], None],
    ) -> None:
        self._command = list(command)
        self._configure = configure
        self._exited = exited
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self, roles: Sequence[str]) -> None:
        """Open a slot for each role named (a role may be named several times)."""
        counts: dict[str, int] = {}
        for role in roles:
            slot = counts.get(role, 0)
            counts[role] = slot + 1
            self._slots.append(asyncio.create_task(self._keep(role, slot)))

    def pids(self) -> dict[str, int]:
        """Process ids of the living, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    def end(self, name: str) -> None:
        """End one process; its slot starts the next."""
        process = self._processes.get(name)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def stop(self) -> None:
        """End every process and wait until all have ended."""
        self._stopping = True
        for name in list(self._processes):
            self.end(name)
        _, alive = await asyncio.wait(self._slots, timeout=_TERMINATE_S) if self._slots else (0, 0)
        for process in list(self._processes.values()) if alive else []:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)

    async def _keep(self, role: str, slot: int) -> None:
        clock = asyncio.get_running_loop().time
        generation, pause = 0, _BACKOFF_S[0]
        while not self._stopping:
            generation += 1
            name = f"{role}-{slot}.{generation}"
            config = msgspec.json.encode(self._configure(role, name)).decode()
            started = clock()
            process = await asyncio.create_subprocess_exec(*self._command, config)
            self._processes[name] = process
            try:
                code = await process.wait()
            finally:
                self._processes.pop(name, None)
            if not self._stopping:
                log.error("%s (process %d) ended with %d", name, process.pid, code)
            self._exited(name, code)
            if code == _CANNOT_RUN and generation == 1:
                return  # as configured, a second one would fail too
            pause = _BACKOFF_S[0] if clock() - started > _STABLE_S else pause
            await asyncio.sleep(0 if self._stopping else pause)
            pause = min(2 * pause, _BACKOFF_S[1])
