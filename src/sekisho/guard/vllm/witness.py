"""Decode asks prefill, once a read is over, whether what it has read was held all that time.

    read over -> through: asked, kept back | … | answered: used, or the request fails

Threads ask; the worker's own never waits for another machine.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from sekisho.guard.vllm.drain import held

_THREADS = 8
_TRIES = 3


class Witness:
    """Of one decode worker. One thread calls it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sekisho-witness")
        self._asked: dict[str, Future[bool]] = {}

    def ask(self, name: str, source: str, workers: Iterable[str]) -> None:
        """Did each of ``workers`` hold the blocks of its request ``source``, for our ``name``?"""
        self._asked[name] = self._pool.submit(self._all, source, tuple(workers))

    def take(self) -> dict[str, bool]:
        """What was answered since the last call; what nobody answers is False."""
        over = {name: one for name, one in self._asked.items() if one.done()}
        for name in over:
            del self._asked[name]
        return {name: one.exception() is None and one.result() for name, one in over.items()}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _all(self, source: str, workers: tuple[str, ...]) -> bool:
        return bool(workers) and all(self._one(source, worker) for worker in workers)

    def _one(self, source: str, worker: str) -> bool:
        host, _, port = worker.rpartition(":")
        for _ in range(_TRIES):
            answer = held(self._key, host, int(port), source)
            if answer is not None:
                return answer
        return False
