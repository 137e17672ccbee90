"""Many seeds on all cores, until one fails, the seeds are through, or the time is."""

import itertools
import logging
import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult

from sekisho.sim.generate import generate
from sekisho.sim.run import run
from sekisho.sim.scenario import Failure

_CHUNK = 20
_AHEAD = 2  # chunks a core


@dataclass
class Tally:
    """Sums over runs. ``failed`` is the first failure in the order of seeds that were done."""

    seeds: int = 0
    handoffs: int = 0
    requests: int = 0
    core_seconds: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    caught: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: tuple[int, Failure] | None = None

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.handoffs += other.handoffs
        self.requests += other.requests
        self.core_seconds += other.core_seconds
        self.fired.update(other.fired)
        self.caught.update(other.caught)
        if other.failed is not None and (self.failed is None or other.failed < self.failed):
            self.failed = other.failed


@dataclass(frozen=True)
class Plan:
    """What to run: ``faults`` to draw from, defences to leave out, and the share of runs (one in
    ``alone_every``) in which each tenant is also run alone."""

    faults: tuple[str, ...]
    without: tuple[str, ...] = ()
    alone_every: int = 16


def campaign(
    plan: Plan,
    seeds: Iterator[int],
    total: Tally,
    *,
    until: float | None,
    cores: int,
    progress: Callable[[], None],
) -> None:
    """Run ``seeds`` in chunks and add them to ``total``, which an interrupt leaves as it is then;
    stop at the first failure or, if given, at ``until`` (of `time.monotonic`). Chunks under way
    are finished, and only a few are: a pool's own ``imap`` would take seeds far ahead of the clock.
    """
    pending: deque[AsyncResult[Tally]] = deque()

    def take() -> None:
        total.add(pending.popleft().get())
        progress()

    with multiprocessing.get_context("spawn").Pool(cores, _quiet) as pool:
        while total.failed is None and (until is None or time.monotonic() < until):
            chunk = list(itertools.islice(seeds, _CHUNK))
            if not chunk:
                break
            pending.append(pool.apply_async(run_seeds, (plan, chunk)))
            if len(pending) > _AHEAD * cores:
                take()
        while pending and total.failed is None:
            take()


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_seeds(plan: Plan, seeds: Sequence[int]) -> Tally:
    """Run the seeds in this process, to the first failure."""
    tally, began = Tally(), time.process_time()
    for seed in seeds:
        result = run(generate(seed, plan.faults, plan.without), alone=seed % plan.alone_every == 0)
        tally.seeds += 1
        tally.handoffs += result.handoffs
        tally.requests += result.requests
        tally.fired.update(result.fired)
        tally.caught.update(result.caught)
        if result.failure is not None:
            tally.failed = seed, result.failure
            break
    tally.core_seconds = time.process_time() - began
    return tally


def _quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends its workers
    logging.disable(logging.CRITICAL)  # the roster logs each injected death
