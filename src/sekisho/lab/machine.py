"""A prefill and a decode node of the unsafe engine in one process, and a gateway in front.

Sizes keep the proportion of the incident, 1,048,576 tokens advertised to 681,280 in the prefill
pool: 640 to 416. The gateway is the production code for one request (template, token count, limit,
HTTP status), without a listener, keys or tenants: nobody outside this process can reach it.
"""

import copy
import json
import secrets
import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sekisho.core.outcome import Outcome
from sekisho.core.page import PageLayout
from sekisho.core.pool import Pool
from sekisho.engine.batch import Runner
from sekisho.engine.demo import NAME, ensure_demo_model
from sekisho.engine.output import Delta, Ended
from sekisho.engine.spec import ModelSpec, load_spec
from sekisho.engine.tokenizer import Tokenizer, load_tokenizer
from sekisho.engine.weights import ModelWeights, load_weights
from sekisho.gateway.errors import ApiError
from sekisho.gateway.model import ServedModel
from sekisho.gateway.prompts import Call, chat_calls
from sekisho.gateway.schemas import ChatRequest, parse
from sekisho.lab.pair import NodePair
from sekisho.lab.results import PageView, Side
from sekisho.lab.switches import Switches
from sekisho.lab.unsafe import (
    LabError,
    LabMemory,
    LabPages,
    UnsafeDecode,
    UnsafePrefill,
    lab_policy,
)
from sekisho.node.build import make_runner, model_fingerprint
from sekisho.node.messages import Ready
from sekisho.transport import MemoryTransport

PAGE_SIZE = 16
WINDOW = 640
PREFILL_PAGES = 26
DECODE_PAGES = WINDOW // PAGE_SIZE
PREFILL_TOKENS = PREFILL_PAGES * PAGE_SIZE
ANSWER_TOKENS = 32
_THREADS = 2


class LabModel(NamedTuple):
    """The demo model in bf16, as `sekisho serve` loads it."""

    spec: ModelSpec
    weights: ModelWeights
    tokenizer: Tokenizer
    layout: PageLayout

    def runner(self, region: NDArray[np.uint8], page_count: int) -> Runner:
        """The native kernels, or plain torch where they cannot run."""
        parts = (self.spec, self.weights, region, self.layout, page_count)
        runner, _ = make_runner(*parts, device="cpu", threads=_THREADS)
        return runner


def load_lab_model() -> LabModel:
    """Converts the demo model first if nobody has yet.

    Raises:
        ModelError: it is not installed.
    """
    folder = ensure_demo_model()
    spec = load_spec(folder)
    layout = PageLayout(
        page_size=PAGE_SIZE,
        layer_count=spec.layer_count,
        kv_head_count=spec.kv_head_count,
        head_size=spec.head_size,
        element_size=2,
        model=model_fingerprint(folder),
    )
    weights = load_weights(folder, spec, torch.bfloat16)
    return LabModel(spec, weights, load_tokenizer(folder), layout)


class Sizes(NamedTuple):
    """Of a machine: the window that it advertises where nothing ties it to a pool, in tokens, and
    both pools, in pages."""

    window: int = WINDOW
    decode_pages: int = DECODE_PAGES
    prefill_pages: int = PREFILL_PAGES


_SIZES = Sizes()


def served_model(model: LabModel) -> ServedModel:
    """What a gateway must know of it."""
    spec = model.spec
    return ServedModel(NAME, model.tokenizer, spec.vocab_size, spec.eos_token_ids, created=0)


class State(NamedTuple):
    """Both nodes between two requests: every byte of their regions, and their ledgers."""

    regions: list[NDArray[np.uint8]]
    pools: list[Pool]
    left: list[dict[int, tuple[str, bytes]]]


class Machine:
    """Runs one engine after another over the same two regions.

    Args:
        model: shared by both nodes.

    Attributes:
        pair: the nodes, once started.
        advertised: the window, in tokens, that the gateway holds requests to.
    """

    pair: NodePair
    advertised: int

    def __init__(self, model: LabModel, sizes: Sizes = _SIZES) -> None:
        size, counts = model.layout.page_bytes, (sizes.decode_pages, sizes.prefill_pages)
        self._model = model
        self._sizes = sizes
        self._transports = [MemoryTransport(size, count) for count in counts]
        self._runners = [
            model.runner(transport.region, count)
            for transport, count in zip(self._transports, counts, strict=True)
        ]
        self._served = served_model(model)
        self._requests = 0
        self._pages: list[LabPages] = []

    def start(self, switches: Switches, state: State | None = None) -> None:
        """New nodes, over empty pools or over ``state``."""
        self.stop()
        counts = (self._sizes.decode_pages, self._sizes.prefill_pages)
        pools = [Pool(count, secrets.randbits(63) + 1) for count in counts]
        if state is not None:
            pools = copy.deepcopy(state.pools)
        self._pages = []
        for at, (transport, pool) in enumerate(zip(self._transports, pools, strict=True)):
            region = transport.region
            region[:] = 0 if state is None else state.regions[at]
            memory = LabMemory(region, self._model.layout, pool.page_count, switches)
            pages = LabPages(memory, pool, lab_policy(switches), switches)
            pages.left = {} if state is None else dict(state.left[at])
            self._pages.append(pages)
        decode_pages, prefill_pages = self._pages
        roles_max = min(pages.tokens_max for pages in self._pages)
        # Admission is decode's: it knows what both roles hold, or it looks at itself alone.
        admitted = roles_max if switches.guards("admission") else decode_pages.tokens_max
        # The window is the gateway's: what is advertised is what the roles hold, or a setting.
        self.advertised = self._sizes.window if switches.has("window") else roles_max
        self._decode = UnsafeDecode(
            self._runners[0],
            decode_pages,
            self._model.tokenizer,
            vocab_size=self._model.spec.vocab_size,
            tokens_max=admitted,
        )
        self._prefill = UnsafePrefill(self._runners[1], prefill_pages, self._transports[1])
        self.pair = NodePair(self._decode, self._prefill, self._transports[0], self._model.layout)

    def state(self) -> State:
        """A copy, to start from again."""
        return State(
            [transport.region.copy() for transport in self._transports],
            copy.deepcopy([pages.pool for pages in self._pages]),
            [dict(pages.left) for pages in self._pages],
        )

    def stop(self) -> None:
        """End the nodes; the regions stay. Idempotent."""
        if self._pages:
            self.pair.part()
            self._pages = []

    def close(self) -> None:
        """Give the memory back."""
        self.stop()
        for transport in self._transports:
            transport.close()

    def ready(self) -> Ready:
        """What this engine's nodes say to a gateway: that they are not for tenants."""
        [tenants] = {pages.policy.tenants for pages in self._pages}
        runner, pages = self._runners[0].name, self._pages[0]
        return Ready(
            self.advertised,
            "",
            self._transports[0].name,
            runner,
            tenants,
            [],
            pages.pool.page_count,
            pages.layout.page_size,
        )

    def count(self, content: str) -> int:
        """Tokens of a chat with this one user message."""
        return len(self._model.tokenizer.encode_chat([{"role": "user", "content": content}]))

    def ask(self, tenant: str, content: str, answer_tokens: int = ANSWER_TOKENS) -> Side:
        """One chat request through gateway and nodes, greedy, of one user message."""
        self._requests += 1
        start = time.perf_counter()
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": answer_tokens,
            "temperature": 0,
        }
        try:
            request = parse(ChatRequest, json.dumps(body).encode())
            [call] = chat_calls(request, self._served, self.advertised)
        except ApiError as error:
            spent = 1000 * (time.perf_counter() - start)
            counted = self.count(content)
            return Side(tenant, error.status, error.code, "", [], counted, 0, spent, [])
        text, end, evidence = self._run(tenant, call)
        outcome = Outcome(end.code, end.message)
        return Side(
            tenant,
            outcome.http_status,
            outcome.code,
            text,
            [],
            len(call.tokens),
            end.output_tokens,
            1000 * (time.perf_counter() - start),
            evidence,
        )

    def pages_of_last(self) -> tuple[list[PageView], list[PageView]]:
        """The table of the last request, as reserved and as handed to its first decode step."""
        pages = self._pages[0]
        return pages.before.get(self._requests, []), pages.after.get(self._requests, [])

    def _run(self, tenant: str, call: Call) -> tuple[str, Ended, list[str]]:
        self.pair.generate(self._requests, tenant, call.tokens, call.params)
        text, end = "", None
        for event in self.pair.events():
            if isinstance(event, Delta):
                text += event.text
            else:
                end = event
        for pages in self._pages:
            pages.pool.check_integrity()
        if end is None:
            raise LabError(f"a request of {tenant} has no end")
        return text, end, [str(item) for item in self.pair.evidence]
