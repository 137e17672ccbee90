"""Decode asks prefill, once a read is over, whether what it has read was held all that time.

    read over -> through: asked, kept back | … | answered: used, or the request fails

Threads ask; the worker's own never waits for another machine. Prefill may be busy for seconds, so
it is asked again; that it is gone is found elsewhere (`drain.Asker`), which then fails the request.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from sekisho.guard.vllm.drain import held

_THREADS = 8
_PATIENCE_S = 30.0
"""A lease of NIXL's, by default: after it prefill has let go anyway."""


@dataclass(eq=False)
class _Question:
    source: str
    workers: tuple[str, ...]
    until: float
    answer: "Future[bool | None]"


class Witness:
    """Of one decode worker. One thread calls it."""

    def __init__(self, key: bytes, patience_s: float = _PATIENCE_S) -> None:
        self._key = key
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sekisho-witness")
        self._asked: dict[str, _Question] = {}

    def ask(self, name: str, source: str, workers: Iterable[str]) -> None:
        """Did each of ``workers`` hold the blocks of its request ``source``, for our ``name``?"""
        end, whom = time.monotonic() + self._patience_s, tuple(workers)
        answer = self._pool.submit(self._all, source, whom)
        self._asked[name] = _Question(source, whom, end, answer)

    def take(self) -> dict[str, bool]:
        """What was answered since the last call; what nobody answers in time is False."""
        out = {}
        for name, one in list(self._asked.items()):
            if not one.answer.done():
                continue
            said = one.answer.result() if one.answer.exception() is None else False
            if said is None and time.monotonic() < one.until:
                # At the end of the line again: who is silent keeps nobody else waiting for long.
                one.answer = self._pool.submit(self._all, one.source, one.workers)
                continue
            del self._asked[name]
            out[name] = said is True
        return out

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _all(self, source: str, workers: tuple[str, ...]) -> bool | None:
        """None: one of them did not answer."""
        for worker in workers:
            host, _, port = worker.rpartition(":")
            answer = held(self._key, host, int(port), source)
            if answer is not True:
                return answer
        return bool(workers)
