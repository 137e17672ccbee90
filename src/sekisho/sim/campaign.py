"""Many seeds on all cores, until one fails, the seeds are through, or the time is."""

import logging
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sekisho.sim.generate import generate
from sekisho.sim.run import run
from sekisho.sim.scenario import Failure

_CHUNK = 20


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
    are finished."""
    with multiprocessing.get_context("spawn").Pool(cores, _quiet) as pool:
        for part in pool.imap_unordered(_chunk, _chunks(plan, seeds, until, total)):
            total.add(part)
            progress()
            if total.failed is not None:
                pool.terminate()
                break


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


def _chunks(
    plan: Plan, seeds: Iterator[int], until: float | None, total: Tally
) -> Iterator[tuple[Plan, list[int]]]:
    while total.failed is None and (until is None or time.monotonic() < until):
        chunk = [seed for _, seed in zip(range(_CHUNK), seeds, strict=False)]
        if not chunk:
            return
        yield plan, chunk


def _quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends its workers
    logging.disable(logging.CRITICAL)  # the roster logs each injected death


def _chunk(task: tuple[Plan, list[int]]) -> Tally:
    plan, seeds = task
    return run_seeds(plan, seeds)
