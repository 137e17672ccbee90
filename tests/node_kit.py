"""A prefill and a decode node in one process, joined by lists instead of sockets."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from sekisho.core.handoff import Complete
from sekisho.core.memory import PageMemory
from sekisho.core.pool import Pool
from sekisho.engine.output import Delta, Ended
from sekisho.engine.pages import PageManager
from sekisho.engine.params import SamplingParams
from sekisho.engine.policy import POLICIES
from sekisho.engine.scheduler import Scheduler
from sekisho.engine.sequence import Sequence
from sekisho.engine.tokenizer import Tokenizer
from sekisho.node.decode import DecodeNode
from sekisho.node.messages import Condemned, Distrust, Generate, Join
from sekisho.node.prefill import PrefillNode
from sekisho.transport import MemoryTransport, Transport
from stand_in import LAYOUT, VOCABULARY, StandInRunner, StandInTokenizer

TOKENIZER = cast(Tokenizer, StandInTokenizer())


def page_manager(pages: int, isolation: str = "standard", incarnation: int = 7) -> PageManager:
    """A pool of ``pages`` pages in private memory."""
    buffer = np.zeros(pages * LAYOUT.page_bytes, np.uint8)
    memory = PageMemory(buffer, LAYOUT, pages)
    return PageManager(memory, Pool(pages, incarnation), POLICIES[isolation])


def scheduler(pages: PageManager, *, local: bool = True, **limits: int) -> Scheduler:
    """A scheduler over the stand-in model."""
    return Scheduler(
        StandInRunner(pages.memory),
        pages,
        tokens_max=limits.get("tokens_max", pages.tokens_max),
        batch_max=limits.get("batch_max", 8),
        chunk_tokens=limits.get("chunk_tokens", 24),
        queue_max=limits.get("queue_max", 100),
        local_prefill=local,
    )


def sequence(request: int, prompt: list[int], count: int, **more: Any) -> Sequence:
    """A greedy request of tenant ``scope`` (default: t)."""
    scope, since = more.pop("scope", "t"), more.pop("since", 0.0)
    params = SamplingParams(max_tokens=count, temperature=0.0, **more)
    return Sequence(request, scope, prompt, params, TOKENIZER, VOCABULARY, since)


def prompt(seed: int, length: int) -> list[int]:
    """``length`` token ids drawn from ``seed``."""
    return cast(list[int], np.random.default_rng(seed).integers(0, 97, length).tolist())


class Pair:
    """One decode and one prefill node over the memory transport, stepped by hand.

    ``wrap`` may put a faulty transport under prefill; ``tamper`` sees every Complete on its way.
    """

    def __init__(
        self,
        decode_pages: int = 64,
        prefill_pages: int = 64,
        isolation: str = "standard",
        wrap: Callable[[Transport], Transport] = lambda inner: inner,
        tamper: Callable[[Complete], Complete] = lambda message: message,
        **limits: int,
    ) -> None:
        self.target = MemoryTransport(LAYOUT.page_bytes, decode_pages)
        self.source = wrap(MemoryTransport(LAYOUT.page_bytes, prefill_pages))
        policy = POLICIES[isolation]
        self.decode_pages = PageManager(
            PageMemory(self.target.region, LAYOUT, decode_pages), Pool(decode_pages, 11), policy
        )
        self.prefill_pages = PageManager(
            PageMemory(self.source.region, LAYOUT, prefill_pages), Pool(prefill_pages, 12), policy
        )
        self.scheduler = scheduler(self.decode_pages, local=False, **limits)
        self.decode = DecodeNode(
            self.scheduler, self.decode_pages, TOKENIZER, vocab_size=VOCABULARY, wait_max=60.0
        )
        self.prefill = PrefillNode(
            StandInRunner(self.prefill_pages.memory),
            self.prefill_pages,
            self.source,
            tokens_max=self.prefill_pages.tokens_max,
            chunk_tokens=limits.get("chunk_tokens", 24),
            queue_max=limits.get("queue_max", 100),
            wait_max=60.0,
        )
        self.decode.prefill_up("p")
        self.prefill.receive("d", Join(self.target.endpoint(), LAYOUT.fingerprint), 0.0)
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, Ended] = {}
        self.distrusted: list[str] = []
        self.condemned: list[str] = []
        self.now = 0.0
        self._tamper = tamper

    def ask(self, request: int, tokens: list[int], count: int, scope: str = "t") -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0)
        self.decode.generate(Generate(request, scope, tokens, params, "p"), self.now)

    def step(self) -> bool:
        """One step of each node and of the wire between them; False if nothing moved."""
        moved = self.decode.step(self.now)
        for _, offer in self.decode.to_prefill:
            self.prefill.receive("d", offer, self.now)
            moved = True
        self.decode.to_prefill.clear()
        moved |= self.prefill.step(self.now)
        for _, message in self.prefill.outbox:
            told = self._tamper(message) if isinstance(message, Complete) else message
            self.decode.answer("p", told)
            moved = True
        self.prefill.outbox.clear()
        for event in self.decode.to_gateway():
            moved = True
            match event:
                case Delta():
                    self.texts.setdefault(event.request, []).extend(event.tokens)
                case Ended():
                    assert event.request not in self.ends
                    self.ends[event.request] = event
                case Distrust():
                    self.distrusted.append(event.name)
                case Condemned():
                    self.condemned.append("d")
        self.condemned.extend("p" for _ in self.prefill.to_gateway())
        self.decode_pages.pool.check_integrity()
        self.prefill_pages.pool.check_integrity()
        return moved or self.prefill.transferring

    def run(self, until: Callable[[], bool] | None = None, steps: int = 100_000) -> None:
        """Step until nothing moves any more, or until the condition holds."""
        for _ in range(steps):
            if until is not None and until():
                return
            if not self.step():
                assert until is None or until(), "nothing moves, and the condition does not hold"
                return
        raise AssertionError(f"still moving after {steps} steps")

    def close(self) -> None:
        self.source.close()
        self.target.close()
