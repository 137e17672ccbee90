"""Engines that compute prompts themselves, with one defect each, and a safe one beside them.

The engine is the production one: scheduler, pages, prefix cache, model, sampler. What a defect
replaces is here; an engine with tenants in one cache refuses a policy that serves tenants.
"""

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sekisho.core.memory import PageMemory
from sekisho.core.outcome import Kind, Outcome
from sekisho.core.pool import Pool
from sekisho.core.table import BlockTable
from sekisho.engine.batch import Batch, Runner
from sekisho.engine.output import Delta, Ended
from sekisho.engine.pages import PageManager, Text
from sekisho.engine.params import SamplingParams
from sekisho.engine.policy import POLICIES, Policy
from sekisho.engine.scheduler import Scheduler
from sekisho.engine.sequence import Sequence
from sekisho.lab.machine import LabModel
from sekisho.lab.unsafe import LabError
from sekisho.node.decode import DecodeNode
from sekisho.node.messages import Abort, Generate
from sekisho.transport import MemoryTransport

WINDOW = 1024
POOL_PAGES = 512
BATCH_MAX = 8
_CHUNK_TOKENS = 256
_QUEUE_MAX = 256
_WAIT_S = 600.0
_SNAPSHOTS_MAX = 16
_SHARED_PAGES_MIN = 3  # the page or two of a system prompt are everybody's
_UNSHARED_PAGES_MAX = 2
_EVERYBODY = "everybody"


class SharedPages(PageManager):
    """Defect ``shared-prefixes``: one scope for all tenants.

    Raises:
        LabError: the policy serves tenants.
    """

    def __init__(self, memory: PageMemory, pool: Pool, policy: Policy) -> None:
        if policy.tenants:
            raise LabError("an engine with one cache for all is unsafe and never serves tenants")
        super().__init__(memory, pool, policy)

    def text(self, scope: str, tokens: Any) -> Text:
        return super().text(_EVERYBODY, tokens)

    def reserve(self, request: int, scope: str, text: Text, remote: bool) -> BlockTable | None:
        return super().reserve(request, _EVERYBODY, text, remote)


class _Attaching(Scheduler):
    """Keeps the tokens of finished conversations; their pages stay in the prefix cache, from
    which `reserve` takes them when a request is put behind one."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._kept: list[list[int]] = []
        self._attached: set[int] = set()

    def add(self, sequence: Sequence) -> None:
        before, own = self._found(sequence.tokens)
        wanted = len(before) + len(own) + sequence.params.max_tokens
        if before and wanted <= self.tokens_max:
            sequence.tokens = [*before, *own]
            sequence.prompt_count = len(sequence.tokens)
            self._attached.add(sequence.request)
        super().add(sequence)

    def finish(self, sequence: Sequence, outcome: Outcome) -> None:
        is_first = sequence.outcome.value is None
        if is_first and sequence.request not in self._attached and outcome.kind is Kind.FINISHED:
            self._kept.append(list(sequence.tokens))
            del self._kept[:-_SNAPSHOTS_MAX]
        self._attached.discard(sequence.request)
        super().finish(sequence, outcome)

    def _found(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """The conversation to attach, empty where none is, and what of ``tokens`` follows it."""
        return [], tokens


class WrongSnapshot(_Attaching):
    """Defect ``wrong-snapshot``: the longest one is restored, once, if it is longer than the
    prompt; whose it is and what it says is not looked at."""

    def _found(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        longest = max(self._kept, key=len, default=[])
        if len(longest) <= len(tokens):
            return [], tokens
        self._kept.remove(longest)
        return longest, tokens


class WholeEntry(_Attaching):
    """Defect ``whole-entry``: the length of the entry is used where that of the match belongs."""

    def _found(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        size = self._pages.layout.page_size
        shared, entry = 0, list[int]()
        for kept in self._kept:  # the oldest of those that match as far
            pages = _shared(kept, tokens) // size
            if pages > shared:
                shared, entry = pages, kept
        rest = tokens[shared * size :]
        enough = shared >= _SHARED_PAGES_MIN and 0 < len(rest) <= _UNSHARED_PAGES_MAX * size
        return (entry, rest) if enough else ([], tokens)


class StaleRows:
    """Defect ``stale-rows``: a runner whose rows are read one off after a request came or went."""

    def __init__(self, runner: Runner) -> None:
        self.name = runner.name
        self._runner = runner
        self._rows = 0

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """See `Runner.forward`."""
        logits = self._runner.forward(batch)
        stale, self._rows = len(logits) != self._rows, len(logits)
        return np.roll(logits, 1, axis=0) if stale else logits


_SCHEDULERS: dict[str, type[Scheduler]] = {"residue": WrongSnapshot, "prefix": WholeEntry}
_SHARED = {"residue", "prefix", "timing"}


class Colocated:
    """One node that computes prompts and answers, to be stepped by one thread.

    Args:
        technique: whose defect is in it; of a technique that has none in the engine, none is.
    """

    def __init__(self, model: LabModel, technique: str = "") -> None:
        self._memory = MemoryTransport(model.layout.page_bytes, POOL_PAGES)
        region = self._memory.region
        runner = model.runner(region, POOL_PAGES)
        if technique == "interference":
            runner = StaleRows(runner)
        pool = Pool(POOL_PAGES, secrets.randbits(63) + 1)
        memory = PageMemory(region, model.layout, POOL_PAGES)
        if technique in _SHARED:
            pages: PageManager = SharedPages(memory, pool, POLICIES["off"])
        else:
            pages = PageManager(memory, pool, POLICIES["standard"])
        scheduler = _SCHEDULERS.get(technique, Scheduler)(
            runner,
            pages,
            tokens_max=WINDOW,
            batch_max=BATCH_MAX,
            chunk_tokens=_CHUNK_TOKENS,
            queue_max=_QUEUE_MAX,
            local_prefill=True,
        )
        vocab_size = model.spec.vocab_size
        self._node = DecodeNode(
            scheduler, pages, model.tokenizer, vocab_size=vocab_size, wait_max=_WAIT_S
        )

    def generate(self, request: int, scope: str, tokens: list[int], params: SamplingParams) -> None:
        """Give it a request; its answer comes with `outputs`."""
        self._node.generate(Generate(request, scope, tokens, params, ""), 0.0)

    def abort(self, request: int) -> None:
        """The client of that request has left."""
        self._node.abort(Abort(request))

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        return self._node.step(0.0)

    def outputs(self) -> list[Delta | Ended]:
        """What it has said since it was asked last."""
        return [e for e in self._node.to_gateway() if isinstance(e, Delta | Ended)]

    @property
    def idle(self) -> bool:
        """Every request has ended."""
        return self._node.idle

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


def _shared(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
