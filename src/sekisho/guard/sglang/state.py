"""What one guarded scheduler process knows; made once, before SGLang makes its queues."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sekisho.core.errors import Evidence, LocalOwnershipError
from sekisho.core.ledger import Pages
from sekisho.guard.keeper import NO_PAGES, Holding, Keeper
from sekisho.guard.sglang.report import Report

FAILED = 500
"""Status of a request that a check failed: SGLang turns others than 400, 500 and 503 into 200."""


class State:
    """Rows of SGLang's request-to-token table and who holds the pages in them.

    Args:
        scheduler: SGLang's; every method here is called on its thread.
        role: ``prefill`` or ``decode``.
        limit: longest prompt, in tokens, that this role can take.
    """

    def __init__(self, scheduler: Any, keeper: Keeper, role: str, limit: int) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.rows = scheduler.req_to_token_pool.req_to_token
        self.keeper = keeper
        self.role = role
        self.limit = limit
        self.report = Report(role)
        self.lock = threading.Lock()
        self.page_size = keeper.layout.page_size
        self._held: dict[int, Holding] = {}
        self._handing: list[Any] = []
        self._nobody = keeper.open("engine", "")

    # -- requests

    def holding(self, req: Any) -> Holding:
        """What ``req``, which has a row, holds; begins it where the row is new."""
        row = req.kv.req_pool_idx
        if row not in self._held:
            self._held[row] = self.keeper.open(str(req.rid), scope_of(req))
        return self._held[row]

    def row_freed(self, row: int) -> Holding | None:
        """The request of this row has ended."""
        holding = self._held.pop(row, None)
        if holding is not None:
            self.keeper.close(holding)
        return holding

    def row(self, req: Any, token_count: int) -> Pages:
        """The pages that SGLang will attend to for the first ``token_count`` tokens."""
        cells = self.rows[req.kv.req_pool_idx, 0 : token_count : self.page_size]
        return np.asarray((cells // self.page_size).cpu(), np.intp)

    def rows_of(self, batch: Any) -> list[Pages]:
        """The same for every request of a batch that has its lengths, in one read."""
        counts = -(-batch.seq_lens_cpu.numpy() // self.page_size)
        end = int(counts.max()) * self.page_size
        cells = self.rows[:, 0 : end : self.page_size][batch.req_pool_indices]
        pages = cells.cpu().numpy().astype(np.intp) // self.page_size
        return [pages[i, :count] for i, count in enumerate(counts.tolist())]

    def doom(self, req: Any, evidence: Sequence[Evidence], at: str) -> None:
        """Fail ``req`` alone: no token of it leaves from here on."""
        holding = self.holding(req)
        if not holding.doomed:
            self.report.violation(holding.name, evidence, at)
            holding.doomed = f"ownership_violation: {evidence[0].kind} page, {at}"

    def repair(self, req: Any, pages: Pages, first: int = 0) -> None:
        """Write what the request really holds into its row, so that its end frees nobody else's."""
        size = self.page_size
        cells = torch.as_tensor(pages).reshape(-1, 1) * size + torch.arange(size)
        end = min(self.rows.shape[1], (first + len(pages)) * size)
        flat = cells.reshape(-1)[: end - first * size]
        self.rows[req.kv.req_pool_idx, first * size : end] = flat.to(self.rows)

    # -- pages

    @contextmanager
    def handing(self, reqs: Sequence[Any]) -> Iterator[None]:
        """What the allocator hands out meanwhile is for ``reqs``, in this order."""
        before, self._handing = self._handing, list(reqs)
        try:
            yield
        finally:
            self._handing = before

    def handed(self, cells: torch.Tensor, counts: Sequence[int]) -> None:
        """The allocator handed out ``cells``, so many of them for each request in turn.

        A page that has an owner already stays that owner's; whoever got it fails by its row.
        """
        given = cells.cpu().numpy()
        at = np.flatnonzero(given % self.page_size == 0)
        if not at.size:  # in most steps of decode no page is new
            return
        pages = (given[at] // self.page_size).astype(np.intp)
        if not self._handing or len(counts) != len(self._handing):
            self._claim(self._nobody, pages)
            self._nobody.fresh.clear()
            return
        whose = np.searchsorted(np.cumsum(counts), at, side="right")
        for i in np.unique(whose).tolist():
            self._claim(self.holding(self._handing[i]), pages[whose == i])

    def _claim(self, holding: Holding, pages: Pages) -> None:
        try:
            self.keeper.claim(holding, pages)
        except LocalOwnershipError as error:
            evidence = [
                Evidence("handed_twice", 0, page, str(error), self.keeper.owner(page))
                for page in pages.tolist()
            ]
            self.report.violation(holding.name, evidence, "allocation")

    def given_back(self, pages: Pages) -> Pages:
        """SGLang frees ``pages``; returns those that its allocator may have now."""
        try:
            free = self.keeper.release(pages)
        except LocalOwnershipError as error:
            free = self._one_by_one(pages, error)
        self.report.quarantined(self.keeper.quarantined())
        return free

    def _one_by_one(self, pages: Pages, error: LocalOwnershipError) -> Pages:
        """Free what is held; a page that is free already stays out of the allocator's list."""
        kept = [NO_PAGES]
        for page in pages.tolist():
            try:
                kept.append(self.keeper.release(np.array([page], np.intp)))
            except LocalOwnershipError:
                found = self.keeper.owner(page)
                evidence = Evidence("double_free", 0, page, str(error), found)
                self.report.violation("engine", [evidence], "free")
        return np.concatenate(kept)


def scope_of(req: Any) -> str:
    """Whose prefixes ``req`` may use: what SGLang keeps its prefix cache apart by, framed; empty
    for requests that name nothing, which share."""
    named = (req.extra_key or "", getattr(req, "cache_salt", None) or "")
    return repr(named) if any(named) else ""


_state: State | None = None


def active() -> State | None:
    """The guard of this process, once it has begun."""
    return _state


def begin(state: State) -> None:
    """From here on `active` is ``state``, in this process."""
    global _state  # noqa: PLW0603  # one scheduler a process, and SGLang's functions are global
    _state = state
