"""The hand-off of a long prompt over Mooncake TCP, against the bare engine moving the same bytes.

Ours is the prefill node's own path, from the offer to `Complete`, with a model that computes
nothing: reserve, digests, verify, headers, `MooncakeTransport`, completions. The peer process has
reserved the pages and proves them afterwards. The bare engine writes whole pages, header and
payload in one piece, to the same memory of the same process, in runs of the same size: by one
batch call a run, as SGLang and vLLM do (the target), and by single writes, many at once, as ours.
"""

import json
import multiprocessing
import secrets
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.demo import load_demo, setting
from bench.report import SEED, BenchError, Row, rate_row
from sekisho.core.handoff import Complete, Offer
from sekisho.core.memory import PageMemory
from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.core.pool import Pool
from sekisho.engine.batch import Batch
from sekisho.engine.pages import PageManager
from sekisho.engine.policy import POLICIES
from sekisho.node.messages import Join
from sekisho.node.prefill import PrefillNode
from sekisho.transport import MooncakeTransport, PageWrite, Status
from sekisho.transport.mooncake import WINDOW
from sekisho.transport.mooncake_engine import LANDED, LOST, load_engine, start_engine

ROUNDS = 9
TARGET = 0.8
PROMPT_TOKENS = 4096
_ANSWER_S = 60.0
_POLL_S = 0.001  # as the prefill node's loop polls
_NAP_S = 0.0002  # as our transport's thread does: spinning would take a core from the engine's


class _NoModel:
    """A `Runner` that computes nothing: the payload's bytes are whatever they are."""

    name = "none"

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        return np.zeros((len(batch.logit_rows), 1), np.float32)


def run(rounds: int | None) -> list[Row]:
    """Gigabytes per second of the pages of one prompt, headers included."""
    load_engine("tcp")  # names a missing library before anything starts
    layout = load_demo().layout
    pages = layout.pages_for(PROMPT_TOKENS)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_decode, args=(theirs, layout, pages), daemon=True)
    process.start()
    try:
        prefill = _Prefill(layout, pages, pipe)
        bare = _Bare(layout, pages, prefill.endpoint)
        seconds: dict[str, list[float]] = {}
        for _ in range((rounds or ROUNDS) + 1):
            for side in (prefill.handoff, prefill.submit, bare.batches, bare.single):
                seconds.setdefault(side.__name__, []).append(side())
        prefill.transport.close()
    finally:
        process.kill()
        process.join()
    rates = {
        name: [pages * layout.page_bytes / t / 1e9 for t in times[1:]]
        for name, times in seconds.items()
    }
    return [
        rate_row("handoff", "offer to Complete", "GB/s", rates["handoff"], rates["batches"], TARGET,
                 f"Mooncake alone, {_MEANING['batches']}"),
        rate_row("handoff", "offer to Complete", "GB/s", rates["handoff"], rates["single"], None,
                 f"Mooncake alone, {_MEANING['single']}"),
        rate_row("handoff", "transport alone", "GB/s", rates["submit"], rates["single"], None,
                 f"Mooncake alone, {_MEANING['single']}"),
    ]  # fmt: skip


_MEANING = {
    "batches": "one batch call a chunk",
    "single": f"one write a page, {WINDOW} at once",
}


class _Prefill:
    """Our side: a prefill node over its transport, stepped as `node.loop` does."""

    def __init__(self, layout: PageLayout, pages: int, pipe: Connection) -> None:
        # twice the room, so that pages cached from one round are evicted in a later one
        self.transport = MooncakeTransport(layout.page_bytes, 2 * pages)
        self._generator = np.random.default_rng(SEED)
        self.transport.region[:] = self._generator.integers(0, 256, self.transport.region.size)
        self._pipe = pipe
        memory = PageMemory(self.transport.region, layout, 2 * pages)
        manager = PageManager(
            memory, Pool(2 * pages, secrets.randbits(63) + 1), POLICIES["standard"]
        )
        self._node = PrefillNode(
            _NoModel(),
            manager,
            self.transport,
            tokens_max=PROMPT_TOKENS,
            chunk_tokens=setting("chunk_tokens"),
            queue_max=1,
            wait_max=_ANSWER_S,
        )
        self.endpoint = str(_receive(pipe))
        self._peer = self.transport.connect(self.endpoint)
        self._layout = layout
        self._page_count = pages
        self._node.receive("decode", Join(self.endpoint, layout.fingerprint), 0.0)

    def handoff(self) -> float:
        """Seconds from the offer to `Complete`; the peer has proved every page since."""
        self._pipe.send(self._generator.integers(0, 2**15, PROMPT_TOKENS).tolist())
        offer: Offer = _receive(self._pipe)
        start = time.perf_counter()
        self._node.receive("decode", offer, 0.0)
        while not self._node.outbox:
            if not self._node.step(0.0):
                time.sleep(_POLL_S)
        seconds = time.perf_counter() - start
        ((_, answer),) = self._node.outbox
        self._node.outbox.clear()
        if not isinstance(answer, Complete):
            raise BenchError(f"the hand-off ended with {answer}")
        self._pipe.send(None)
        if not _receive(self._pipe):
            raise BenchError("the pages are not the ones that were offered")
        return seconds

    def submit(self) -> float:
        """Seconds of the same runs of pages, submitted at once, until the last is done."""
        run = setting("chunk_tokens") // self._layout.page_size
        header = bytes(HEADER_SIZE)
        writes = [PageWrite(page, page, header) for page in range(self._page_count)]
        start = time.perf_counter()
        tickets = {
            self.transport.submit(self._peer, writes[first : first + run])
            for first in range(0, self._page_count, run)
        }
        while tickets:
            for completion in self.transport.poll():
                if completion.status is not Status.DONE:
                    raise BenchError(f"a transfer ended with {completion}")
                tickets.remove(completion.ticket)
            time.sleep(_POLL_S)
        return time.perf_counter() - start


class _Bare:
    """An engine of its own in this process, and nothing above it."""

    def __init__(self, layout: PageLayout, pages: int, endpoint: str) -> None:
        peer = json.loads(endpoint)
        self._segment: str = peer["segment"]
        self._memory = np.random.default_rng(SEED).integers(
            0, 256, pages * layout.page_bytes, np.uint8
        )
        base = int(self._memory.ctypes.data)
        engine_class, _ = load_engine("tcp")
        self._engine: Any = start_engine(
            engine_class, "127.0.0.1", "tcp", "", base, self._memory.nbytes
        )
        self._page_bytes = layout.page_bytes
        offsets = range(0, self._memory.nbytes, layout.page_bytes)
        self._writes = [(base + at, int(peer["base"]) + at) for at in offsets]
        self._run = setting("chunk_tokens") // layout.page_size

    def batches(self) -> float:
        """Seconds with one synchronous batch call a run of pages."""
        start = time.perf_counter()
        for first in range(0, len(self._writes), self._run):
            part = self._writes[first : first + self._run]
            sources, targets = ([write[side] for write in part] for side in (0, 1))
            lengths = [self._page_bytes] * len(part)
            if self._engine.batch_transfer_sync_write(self._segment, sources, targets, lengths):
                raise BenchError("Mooncake's batch write failed")
        return time.perf_counter() - start

    def single(self) -> float:
        """Seconds with one write a page, as many under way as our transport allows."""
        waiting = list(reversed(self._writes))
        flying: list[int] = []
        start = time.perf_counter()
        while waiting or flying:
            while waiting and len(flying) < WINDOW:
                source, target = waiting.pop()
                handle = self._engine.transfer_submit_write(
                    self._segment, source, target, self._page_bytes
                )
                if not handle:
                    raise BenchError("Mooncake refused a write")
                flying.append(handle)
            states = [self._engine.transfer_check_status(handle) for handle in flying]
            if LOST in states:
                raise BenchError("Mooncake lost a write")
            flying = [h for h, state in zip(flying, states, strict=True) if state != LANDED]
            time.sleep(_NAP_S)
        return time.perf_counter() - start


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(_ANSWER_S):
        raise BenchError("the decode process does not answer")
    return pipe.recv()


def _decode(pipe: Connection, layout: PageLayout, pages: int) -> None:
    """The other process: for each list of tokens an offer, and then whether the pages prove it."""
    transport = MooncakeTransport(layout.page_bytes, pages)
    memory = PageMemory(transport.region, layout, pages)
    pool = Pool(pages, secrets.randbits(63) + 1)
    manager = PageManager(memory, pool, POLICIES["standard"])
    pipe.send(transport.endpoint())
    request = 0
    while True:
        tokens: list[int] = pipe.recv()
        request += 1
        table = manager.reserve(request, "bench", manager.text("bench", tokens), remote=True)
        if table is None:
            raise BenchError("the decode process has too few pages")
        digest = table.digest_at(pages - 1)
        pipe.send(
            Offer(
                table.lease,
                request,
                "bench",
                tokens,
                digest,
                0,
                table.pages.tolist(),
                layout.fingerprint,
            )
        )
        pipe.recv()
        pipe.send(not manager.prove(table))
        manager.release(table)
