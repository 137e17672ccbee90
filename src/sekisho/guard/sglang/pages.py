"""Around SGLang's allocator: every page that it hands out or takes back goes through the ledger.

allocator    |-- out ------|free_…                      |-- out again
ledger       |-- leased ---|-- quarantined, if pinned --|
                           `- only `_release_page_ids` puts a page on the allocator's list
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sekisho.core.ledger import Pages
from sekisho.guard.seams import Seam, original_of
from sekisho.guard.sglang.state import State, active

Original = Callable[..., Any]
_ALLOCATOR = "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator"
RELEASE = f"{_ALLOCATOR}._release_page_ids"
_BATCH = "sglang.srt.managers.schedule_batch:ScheduleBatch"


def put_back(state: State, pages: Pages) -> None:
    """Pages whose last writer has ended: the allocator may have them at last."""
    if pages.size:
        tensor = torch.as_tensor(pages, dtype=torch.int64, device=state.allocator.device)
        original_of(RELEASE)(state.allocator, tensor)
        state.report.quarantined(state.keeper.quarantined())


def _guarded(allocator: Any) -> State | None:
    state = active()
    return state if state is not None and allocator is state.allocator else None


def _alloc(original: Original, allocator: Any, need_size: int) -> Any:
    out = original(allocator, need_size)
    state = _guarded(allocator)
    if state is not None and out is not None:
        state.handed(out, [])
    return out


def _alloc_extend(original: Original, allocator: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(allocator, *args, **kwargs)
    state = _guarded(allocator)
    if state is not None and out is not None:
        given = (
            dict(
                zip(
                    ("prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu"),
                    args,
                    strict=False,
                )
            )
            | kwargs
        )
        counts = (given["seq_lens_cpu"] - given["prefix_lens_cpu"]).tolist()
        state.handed(out, counts)
    return out


def _alloc_decode(original: Original, allocator: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(allocator, *args, **kwargs)
    state = _guarded(allocator)
    if state is not None and out is not None:
        state.handed(out, [1] * len(out))
    return out


def _release_page_ids(original: Original, allocator: Any, *page_ids: torch.Tensor) -> None:
    state = _guarded(allocator)
    if state is None:
        original(allocator, *page_ids)
        return
    pages = torch.cat(page_ids).cpu().numpy().astype(np.intp)
    free = state.given_back(pages)
    if free.size == pages.size:
        original(allocator, *page_ids)
    elif free.size:
        original(allocator, torch.as_tensor(free, dtype=torch.int64, device=allocator.device))


def _clear(original: Original, allocator: Any) -> None:
    """A flush of the cache, while nothing runs: what a writer may still reach is kept back."""
    original(allocator)
    state = _guarded(allocator)
    if state is not None:
        waiting = torch.as_tensor(state.keeper.reset(), device=allocator.device)
        allocator.free_pages = allocator.free_pages[~torch.isin(allocator.free_pages, waiting)]


def _prepare(original: Original, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The batch is built: pages are handed out for its requests, in their order."""
    state = active()
    if state is None:
        return original(batch, *args, **kwargs)
    with state.handing(batch.reqs):
        return original(batch, *args, **kwargs)


def _check_all_pools(original: Original, checker: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's own count of idle pages does not know of quarantined ones."""
    state = active()
    if state is not None and state.keeper.quarantined():
        return False, []
    return original(checker, *args, **kwargs)


SEAMS = (
    Seam(f"{_ALLOCATOR}.alloc", ("self", "need_size"), _alloc),
    Seam(
        f"{_ALLOCATOR}.alloc_extend",
        ("self", "prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc"),
        _alloc_extend,
    ),
    Seam(f"{_ALLOCATOR}.alloc_decode", ("self", "seq_lens", "seq_lens_cpu"), _alloc_decode),
    Seam(RELEASE, ("self", "page_ids"), _release_page_ids),
    Seam(f"{_ALLOCATOR}.clear", ("self",), _clear),
    Seam(f"{_BATCH}.prepare_for_extend", ("self",), _prepare),
    Seam(
        "sglang.srt.managers.scheduler_components.invariant_checker:"
        "SchedulerInvariantChecker._check_all_pools",
        ("self", "ps"),
        _check_all_pools,
    ),
)
