"""A simulated worker process: the production node over simulated memory, transport and clock."""

import random
from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np

from sekisho.core.memory import PageMemory
from sekisho.core.pool import Pool
from sekisho.core.table import BlockTable
from sekisho.engine.batch import Batch
from sekisho.engine.policy import POLICIES
from sekisho.engine.scheduler import Scheduler
from sekisho.engine.sequence import Sequence
from sekisho.node.decode import DecodeNode
from sekisho.node.prefill import PrefillNode
from sekisho.sim.books import WatchedPages
from sekisho.sim.clock import Clock
from sekisho.sim.model import LAYOUT, TOKENIZER, VOCABULARY, SimRunner
from sekisho.sim.scenario import Shape
from sekisho.sim.transport import Memory, SimTransport, Write, land_until


class Host(Protocol):
    """What a process needs of the world around it."""

    clock: Clock
    memories: dict[str, Memory]
    tenants: dict[str, int]

    def tamper(self, process: "Process", batch: Batch) -> None: ...
    def wrong(self, process: "Process", request: int, pages: list[int]) -> None: ...
    def granted(self, process: "Process", table: BlockTable, pages: Many[int]) -> None: ...
    def released(self, process: "Process", table: BlockTable) -> None: ...
    def preempted(self, request: int) -> None: ...
    def committed(self, process: "Process", table: BlockTable) -> None: ...
    def sealing(self, process: "Process", table: BlockTable) -> None: ...
    def key_scope(self, process: "Process", scope: str) -> str: ...
    def struck(self, process: "Process", write: Write, previous: Write | None) -> Write | None: ...
    def wake(self, process: "Process") -> None: ...


class Process:
    """One generation of a node. ``node`` is the production object of its role.

    Attributes:
        next_at: when its next step is due, simulated seconds, or None.
        busy_until: when the step under way ends. ahead: how far its own clock is ahead.
    """

    node: DecodeNode | PrefillNode
    pages: WatchedPages

    def __init__(self, host: Host, name: str, memory: Memory, seed: int, incarnation: int) -> None:
        self.host = host
        self.name = name
        self.slot = name.partition(".")[0]
        self.memory = memory
        self.pool = Pool(memory.page_count, incarnation)
        self.transport: SimTransport | None = None
        self.alive = True
        self.next_at: float | None = None
        self.busy_until = 0.0
        self.ahead = 0.0
        self._random = random.Random(f"{seed}:{name}")

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def now(self) -> float:
        """The time as this process sees it."""
        return self.host.clock.now + self.ahead

    def step_seconds(self) -> float:
        """How long the next step takes."""
        return 0.001 + 0.009 * self._random.random()


def new_memory(name: str, page_count: int) -> Memory:
    """A zeroed region."""
    return Memory(name, page_count, np.zeros(page_count * LAYOUT.page_bytes, np.uint8))


def build(
    host: Host, name: str, shape: Shape, memory: Memory, seed: int, incarnation: int
) -> Process:
    """A process with its node, as `sekisho.node.build` and ``process`` put one together."""
    process = Process(host, name, memory, seed, incarnation)
    pages = process.pages = WatchedPages(
        PageMemory(memory.region, LAYOUT, memory.page_count),
        POLICIES[shape.isolation],
        host,
        process,
    )
    runner = SimRunner(
        memory.region,
        memory.page_count,
        pages.writer_of,
        tamper=lambda batch: host.tamper(process, batch),
        wrong=lambda request, found: host.wrong(process, request, found),
        landing=lambda: land_until(memory, process.busy_until),
    )
    if process.role == "decode":
        process.node = _decode(host, process, runner, shape)
    else:
        process.transport = SimTransport(
            host.clock,
            host.memories,
            memory,
            f"{seed}:{name}:transfers",
            strike=lambda write, previous: host.struck(process, write, previous),
            wake=lambda: host.wake(process),
        )
        process.node = _prefill(runner, pages, process.transport, shape)
    return process


class _WatchedScheduler(Scheduler):
    """The production scheduler; every commit is told before it takes effect."""

    host: Host
    process: Process

    def committed(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            self.host.committed(self.process, sequence.table)
        super().committed(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.host.preempted(sequence.request)
        super()._preempt(sequence)


def _decode(host: Host, process: Process, runner: SimRunner, shape: Shape) -> DecodeNode:
    pages = process.pages
    scheduler = _WatchedScheduler(
        runner,
        pages,
        tokens_max=pages.tokens_max,
        batch_max=shape.batch_max,
        chunk_tokens=shape.chunk_tokens,
        queue_max=shape.queue_max,
        local_prefill=False,
    )
    scheduler.host, scheduler.process = host, process
    return DecodeNode(scheduler, pages, TOKENIZER, vocab_size=VOCABULARY, wait_max=shape.wait_max)


def _prefill(
    runner: SimRunner, pages: WatchedPages, transport: SimTransport, shape: Shape
) -> PrefillNode:
    return PrefillNode(
        runner,
        pages,
        transport,
        tokens_max=pages.tokens_max,
        chunk_tokens=shape.chunk_tokens,
        queue_max=shape.queue_max,
        wait_max=shape.wait_max,
    )
