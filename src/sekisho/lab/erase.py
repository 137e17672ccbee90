"""What safety costs: five ways to run the same two production nodes, side by side.

Tokens per second are those of the demo model; bytes per second are of hand-offs alone, with a
runner that computes nothing, so that what a way adds to a page is not hidden behind the model. All
five run in every round, over the same memory, in another order each time; a ratio is the median
over the rounds of that round's own ratio to "nothing".
"""

import secrets
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout
from sekisho.core.pool import Pool
from sekisho.engine.batch import Batch, Runner
from sekisho.engine.output import Ended
from sekisho.engine.pages import PageManager
from sekisho.engine.params import SamplingParams
from sekisho.engine.policy import POLICIES, Policy
from sekisho.engine.scheduler import Scheduler
from sekisho.lab.erasing import ErasingPages
from sekisho.lab.machine import LabModel
from sekisho.lab.pair import NodePair
from sekisho.lab.results import ErasePrice
from sekisho.lab.unsafe import LabError
from sekisho.node.decode import DecodeNode
from sekisho.node.prefill import PrefillNode
from sekisho.transport import MemoryTransport

PROMPT_TOKENS, ANSWER_TOKENS, CONCURRENT = 256, 32, 4
_MOVED_TOKENS, _MOVED_REQUESTS = 1024, 8
_OFF = POLICIES["off"]._replace(reuse=False)


class _Way(NamedTuple):
    policy: Policy
    erases: bool
    note: str


WAYS: dict[str, _Way] = {
    "nothing": _Way(_OFF, False, "isolation off, no reuse across requests"),
    "headers": _Way(
        POLICIES["standard"]._replace(reuse=False, tenants=False),
        False,
        "counts and headers at the hand-off, headers after each step",
    ),
    "checksum": _Way(
        POLICIES["strict"]._replace(scrub=False, tenants=False),
        False,
        "the same, and a BLAKE2b of every payload on both sides of the hand-off",
    ),
    "scrub-on-free": _Way(
        _OFF._replace(scrub=True), False, "every page is zeroed when its request ends"
    ),
    "erase-on-reuse": _Way(_OFF, True, "every page is zeroed when it is granted"),
}


class _NothingComputed:
    """A runner that leaves the pages alone and always says token 1."""

    name = "nothing computed"

    def __init__(self, vocab_size: int) -> None:
        self._logits = np.zeros((CONCURRENT, vocab_size), np.float32)
        self._logits[:, 1] = 1.0

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        return self._logits[: len(batch.logit_rows)]


class _Bench:
    """Two regions with room for ``CONCURRENT`` requests of ``tokens``, and runners over them."""

    def __init__(
        self,
        model: LabModel,
        tokens: int,
        runner: Callable[[NDArray[np.uint8], int], Runner],
    ) -> None:
        self._model = model
        self._page_count = model.layout.pages_for(tokens) * CONCURRENT
        size = model.layout.page_bytes
        self._transports = [MemoryTransport(size, self._page_count) for _ in range(2)]
        self._runners = [runner(t.region, self._page_count) for t in self._transports]

    def run(self, way: _Way, prompts: list[list[int]], answer: int) -> tuple[float, int]:
        """Seconds from the first request to the last end, and tokens generated.

        Raises:
            LabError: a request ended otherwise than by its length.
        """
        pair = self._pair(way)
        params = SamplingParams(max_tokens=answer, temperature=0.0)
        start = time.perf_counter()
        for request, prompt in enumerate(prompts):
            pair.generate(request, "bench", prompt, params)
        ends = [event for event in pair.events() if isinstance(event, Ended)]
        seconds = time.perf_counter() - start
        pair.part()
        if [end.code for end in ends] != ["length"] * len(prompts):
            raise LabError(f"a request of the measurement ended: {[end.code for end in ends]}")
        return seconds, sum(end.output_tokens for end in ends)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    def _pair(self, way: _Way) -> NodePair:
        model, layout = self._model, self._model.layout
        kind = ErasingPages if way.erases else PageManager
        decode_pages, prefill_pages = (
            kind(
                PageMemory(transport.region, layout, self._page_count),
                Pool(self._page_count, secrets.randbits(63) + 1),
                way.policy,
            )
            for transport in self._transports
        )
        scheduler = Scheduler(
            self._runners[0],
            decode_pages,
            tokens_max=decode_pages.tokens_max,
            batch_max=CONCURRENT,
            chunk_tokens=1024,
            queue_max=_MOVED_REQUESTS,
            local_prefill=False,
        )
        decode = DecodeNode(
            scheduler,
            decode_pages,
            model.tokenizer,
            vocab_size=model.spec.vocab_size,
            wait_max=600.0,
        )
        prefill = PrefillNode(
            self._runners[1],
            prefill_pages,
            self._transports[1],
            tokens_max=prefill_pages.tokens_max,
            chunk_tokens=1024,
            queue_max=_MOVED_REQUESTS,
            wait_max=600.0,
        )
        return NodePair(decode, prefill, self._transports[0], layout)


def run_erase(
    model: LabModel, rounds: int, seed: int, progress: Callable[[str], None]
) -> list[ErasePrice]:
    """``rounds`` of all ways; the first of its kind, which warms up, is not counted."""
    rng = np.random.default_rng(seed)
    vocabulary = model.tokenizer.vocab_size

    def prompts(count: int, length: int) -> list[list[int]]:
        drawn: list[list[int]] = rng.integers(0, vocabulary, (count, length)).tolist()
        return drawn

    computed = _Bench(model, PROMPT_TOKENS + ANSWER_TOKENS, model.runner)
    moved = _Bench(model, _MOVED_TOKENS + 1, lambda *_: _NothingComputed(model.spec.vocab_size))
    asked, long = prompts(CONCURRENT, PROMPT_TOKENS), prompts(_MOVED_REQUESTS, _MOVED_TOKENS)
    size = _moved_bytes(model.layout)
    tokens: dict[str, list[float]] = {name: [] for name in WAYS}
    bytes_: dict[str, list[float]] = {name: [] for name in WAYS}
    order = list(WAYS)
    try:
        for turn in range(rounds + 1):
            for name in order:
                progress(f"round {turn} of {rounds}, {name}")
                seconds, count = computed.run(WAYS[name], asked, ANSWER_TOKENS)
                moving, _ = moved.run(WAYS[name], long, 1)
                if turn:
                    tokens[name].append(count / seconds)
                    bytes_[name].append(size / moving)
            order = order[1:] + order[:1]
    finally:
        computed.close()
        moved.close()
    return [
        ErasePrice(
            name,
            median(tokens[name]),
            _ratio(tokens[name], tokens["nothing"]),
            median(bytes_[name]),
            f"{way.note}; {_ratio(bytes_[name], bytes_['nothing']):.2f} of the bytes per second",
        )
        for name, way in WAYS.items()
    ]


def _moved_bytes(layout: PageLayout) -> int:
    return _MOVED_REQUESTS * layout.pages_for(_MOVED_TOKENS - 1) * layout.page_bytes


def _ratio(rates: list[float], others: list[float]) -> float:
    return median(rate / other for rate, other in zip(rates, others, strict=True))
