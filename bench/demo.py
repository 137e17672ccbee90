"""The demo model and its colocated engine, as `sekisho serve` would run them."""

import functools
import mmap
import secrets
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.report import BenchError
from sekisho.config import Settings
from sekisho.core.errors import Evidence
from sekisho.core.ledger import Pages
from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout
from sekisho.core.pool import Pool
from sekisho.core.table import BlockTable
from sekisho.engine.demo import ensure_demo_model
from sekisho.engine.kernels.build import KernelUnavailable
from sekisho.engine.native import NativeRunner
from sekisho.engine.output import Delta, Ended
from sekisho.engine.pages import PageManager
from sekisho.engine.params import SamplingParams
from sekisho.engine.policy import POLICIES
from sekisho.engine.scheduler import Scheduler
from sekisho.engine.sequence import Sequence
from sekisho.engine.spec import ModelSpec, load_spec
from sekisho.engine.tokenizer import Tokenizer, load_tokenizer
from sekisho.engine.weights import ModelWeights, load_weights
from sekisho.node.build import model_fingerprint

THREADS = 2
PROMPT_TOKENS = 128
ANSWER_TOKENS = 128
CONCURRENCIES = (1, 16, 32)
_TEXT = Path(__file__).parents[1] / "LICENSE"  # English that does not change


@dataclass(frozen=True)
class Demo:
    """The model in bf16, and distinct prompts of natural text, `PROMPT_TOKENS` ids each."""

    folder: Path
    spec: ModelSpec
    weights: ModelWeights
    layout: PageLayout
    tokenizer: Tokenizer
    prompts: list[list[int]]


@functools.cache
def load_demo() -> Demo:
    """Convert it first if nobody has yet."""
    folder = ensure_demo_model(progress=print)
    spec = load_spec(folder)
    layout = PageLayout(
        page_size=setting("page_size"),
        layer_count=spec.layer_count,
        kv_head_count=spec.kv_head_count,
        head_size=spec.head_size,
        element_size=2,
        model=model_fingerprint(folder),
    )
    tokenizer = load_tokenizer(folder)
    prompts = _prompts(tokenizer.encode(_TEXT.read_text()), max(CONCURRENCIES))
    weights = load_weights(folder, spec, torch.bfloat16)
    return Demo(folder, spec, weights, layout, tokenizer, prompts)


def setting(name: str) -> int:
    """The default of a whole-number setting of `sekisho serve`."""
    return int(Settings.model_fields[name].default)


def _prompts(text: list[int], count: int) -> list[list[int]]:
    step = (len(text) - PROMPT_TOKENS) // (count - 1)
    if step < 1:
        raise BenchError(f"{_TEXT.name} is too short for {count} prompts")
    return [text[i * step : i * step + PROMPT_TOKENS] for i in range(count)]


class TimedPages(PageManager):
    """Counts the seconds that `verify` takes."""

    seconds = 0.0

    def verify(
        self, tables: Many[BlockTable], read: Many[Pages] | None = None
    ) -> dict[int, tuple[Evidence, ...]]:
        start = time.perf_counter()
        found = super().verify(tables, read)
        self.seconds += time.perf_counter() - start
        return found


class Engine:
    """A runner over a region with room for ``count`` requests; `scheduler` starts it afresh."""

    def __init__(self, demo: Demo, count: int) -> None:
        self.demo = demo
        tokens = PROMPT_TOKENS + ANSWER_TOKENS
        self._page_count = demo.layout.pages_for(tokens) * count
        size = self._page_count * demo.layout.page_bytes
        region = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        region[:] = 0  # page faults are nobody's cost below
        try:
            self._runner = NativeRunner(
                demo.spec, demo.weights, region, demo.layout, self._page_count, THREADS
            )
        except KernelUnavailable as error:
            raise BenchError(f"no native kernels: {error}") from error
        self._memory = PageMemory(region, demo.layout, self._page_count)

    def scheduler(self, isolation: str) -> tuple[Scheduler, TimedPages]:
        """A pool and a scheduler that know of no earlier request."""
        pool = Pool(self._page_count, secrets.randbits(63) + 1)
        pages = TimedPages(self._memory, pool, POLICIES[isolation])
        return Scheduler(
            self._runner,
            pages,
            tokens_max=pages.tokens_max,
            batch_max=setting("max_batch"),
            chunk_tokens=setting("chunk_tokens"),
            queue_max=setting("queue_max"),
            local_prefill=True,
        ), pages


def add_requests(scheduler: Scheduler, demo: Demo, count: int, answer: int) -> None:
    """Greedy requests 0 to ``count`` - 1 of ``answer`` tokens, which no token ends earlier."""
    params = SamplingParams(max_tokens=answer, temperature=0.0)
    for request in range(count):
        prompt = demo.prompts[request]
        scheduler.add(
            Sequence(request, "bench", prompt, params, demo.tokenizer, demo.spec.vocab_size, 0.0)
        )


def collect(scheduler: Scheduler, count: int, answer: int) -> list[list[int]]:
    """The tokens by request, of a scheduler that is idle.

    Raises:
        BenchError: a request did not end with all of its tokens.
    """
    tokens: list[list[int]] = [[] for _ in range(count)]
    for event in scheduler.outputs:
        match event:
            case Delta(request=request, tokens=new):
                tokens[request] += new
            case Ended(code=code) if code != "length":
                raise BenchError(f"a request ended with {code}: {event.message}")
    if any(len(part) != answer for part in tokens):
        raise BenchError("a request ended without all of its tokens")
    return tokens
