"""vLLM's side of the guard's halves, for tests without vLLM: requests, blocks, a block pool.

The pool is a model of vLLM 0.32's `BlockPool`, as far as the guard sees it: references, blocks
that stay findable by their hash when nobody holds them, reuse of what was freed last first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sekisho.core.page import PageLayout
from sekisho.guard.vllm import start
from sekisho.guard.vllm.admission import scope_of
from sekisho.guard.vllm.messages import StepMeta
from sekisho.guard.vllm.mooncake import Mooncake
from sekisho.guard.vllm.scheduler import Scheduling
from sekisho.guard.vllm.worker import Worker

LAYOUT = PageLayout(32, 2, 1, 4, 2, "model")
KEY = b"k" * 32
BLOCKS = 64


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


@dataclass(eq=False)
class Request:
    """``tokens``: prompt and answer so far."""

    request_id: str
    tokens: list[int]
    cache_salt: str | None = "salt"
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    resumable: bool = False
    lora_request: Any = None
    finished: bool = False
    prompt_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def is_finished(self) -> bool:
        return self.finished


class Engine:
    """Both halves of one role's guard, and the pool they watch."""

    def __init__(self, role: str) -> None:
        keeper = start.make_keeper(LAYOUT, BLOCKS)
        self.guard = Scheduling(keeper, role, "engine", KEY, 1, Mooncake())
        self.worker = Worker(LAYOUT, BLOCKS)
        self.guard.put_in_pool = self.really_put
        self.blocks = [Block(i) for i in range(BLOCKS)]
        self.free = self.blocks[1:]
        self.live: dict[str, Request] = {}

    def allocate(self, request: Request, count: int, found: Sequence[Block] = ()) -> list[int]:
        """``found`` by hash, and ``count`` new ones."""
        self.guard.put_back()
        with self.guard.rows.handing(request, scope_of(request)):
            self.guard.rows.touched(found)
            for block in found:
                if block.ref_cnt == 0:
                    self.free.remove(block)
                block.ref_cnt += 1
            new, self.free = self.free[:count], self.free[count:]
            for block in new:
                block.ref_cnt = 1
            self.guard.rows.handed(new)
        return [block.block_id for block in [*found, *new]]

    def release(self, request: Request, pages: Sequence[int]) -> None:
        """The request's blocks come back."""
        self.guard.rows.forget(request.request_id)
        self.put([self.blocks[page] for page in pages])

    def put(self, blocks: Sequence[Block]) -> None:
        self.really_put(self.guard.rows.given_back(blocks))

    def really_put(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.insert(0, block)

    def step(self, **counts: int) -> StepMeta:
        """One batch, from the scheduler to what it hears of the worker."""
        meta = self.guard.step(SimpleNamespace(num_scheduled_tokens=counts), None)
        self.worker.bind(meta)
        self.worker.after_forward()
        self.hear()
        return meta

    def hear(self) -> None:
        self.guard.heard(self.worker.report())
