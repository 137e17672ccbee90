"""Which block is whose in a vLLM scheduler, from what its block pool hands out and takes back.

vLLM counts references and keeps freed blocks findable by their hash; here is what that means:

    block pool   get_new_blocks |-- ref 1 --|touch: ref 2 |-- ref 1 --|free: ref 0, cached  |touch
    ledger       claim: LEASED  |           |SEALED, two holders      |FREE, header kept    |claim

* a second holder is of the same scope, or the ledger refuses, and the request fails;
* a block that vLLM frees while a transfer may write it is QUARANTINED: the pool gets it later.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sekisho.core.errors import Evidence, LocalOwnershipError
from sekisho.core.lease import Lease
from sekisho.core.ledger import Pages, State
from sekisho.core.memory import Words
from sekisho.core.page import chain_next
from sekisho.guard.keeper import Holding, Keeper
from sekisho.guard.vllm.headers import differences, headers_at
from sekisho.guard.vllm.messages import Row
from sekisho.guard.vllm.report import Report


@dataclass(eq=False)
class Holder:
    """One request: ``blocks`` by ordinal, the first ``shared`` of them found in the prefix cache;
    ``written`` tokens have a header; ``fresh_prefix``: the shared ones are still to be checked."""

    request: Any
    holding: Holding
    scope: str
    blocks: list[int] = field(default_factory=list)
    shared: int = 0
    written: int = 0
    fresh_prefix: bool = False
    row: Row | None = None

    def array(self) -> Row:
        if self.row is None or len(self.row) != len(self.blocks):
            self.row = np.array(self.blocks, np.int32)
        return self.row


class Rows:
    """All requests that hold blocks. One thread calls it: vLLM's scheduler."""

    def __init__(self, keeper: Keeper, report: Report) -> None:
        self.keeper = keeper
        self.report = report
        self.holders: dict[str, Holder] = {}
        self.fresh: list[int] = []
        self._for: Holder | None = None
        self._nobody = keeper.open("engine", "")
        self._waiting: dict[int, Any] = {}

    # -- what vLLM's block pool does

    @contextmanager
    def handing(self, request: Any, scope: str) -> Iterator[None]:
        """What the pool hands out meanwhile is for ``request``."""
        name = request.request_id
        if name not in self.holders:
            self.holders[name] = Holder(request, self.keeper.open(name, scope), scope)
        self._for = self.holders[name]
        try:
            yield
        finally:
            self._for = None
            if not self.holders[name].blocks:  # there was no room
                self.forget(name)

    def handed(self, blocks: Sequence[Any]) -> None:
        """``blocks`` are new for somebody, and what they hold is nobody's."""
        pages = [block.block_id for block in blocks]
        self._claim(pages)
        self.fresh.extend(pages)
        if self._for is not None:
            self._for.blocks.extend(pages)

    def touched(self, blocks: Sequence[Any]) -> None:
        """``blocks`` were found by their hash; called before vLLM counts the new reference."""
        holder = self._for
        known = [block for block in blocks if not block.is_null]
        for block in known:
            page = np.array([block.block_id], np.intp)
            try:
                if block.ref_cnt == 0:
                    self._claim([block.block_id])
                else:
                    self._share(page, "" if holder is None else holder.scope)
            except LocalOwnershipError as error:
                found = self.keeper.owner(block.block_id)
                self._doom([Evidence("shared", 0, block.block_id, str(error), found)])
        if holder is not None and known:
            holder.blocks.extend(block.block_id for block in known)
            holder.shared = len(holder.blocks)
            holder.written = holder.shared * self.keeper.layout.page_size
            holder.fresh_prefix = True

    def given_back(self, blocks: Sequence[Any]) -> list[Any]:
        """vLLM drops a reference of each; returns those that its pool may be told of now."""
        blocks = list(blocks)
        pages = np.array([b.block_id for b in blocks if not b.is_null], np.intp)
        try:
            self.keeper.release(pages)
        except LocalOwnershipError:
            return [b for b in blocks if b.is_null or self._drop(b)]
        if not self.keeper.quarantined():
            return blocks
        return [b for b in blocks if b.is_null or self._may_go(b)]

    def forget(self, name: str) -> None:
        """The request holds no block any more, or will not for long."""
        holder = self.holders.pop(name, None)
        if holder is not None:
            self.keeper.close(holder.holding)

    # -- transfers

    def pin(self, pages: Pages) -> int:
        return self.keeper.ledger.pin(pages)

    def settle(self, pin: int) -> list[Any]:
        """The writer is over; returns blocks that the pool may have at last."""
        freed = self.keeper.ledger.settle(pin)
        return [self._waiting.pop(page) for page in freed.tolist() if page in self._waiting]

    # -- what blocks must carry

    def words(self, holder: Holder, first: int, end: int) -> Words:
        """Headers [n, 8] of the blocks from ordinal ``first`` up to token ``end``."""
        serials, ordinals, filled, digests = self.parts(holder, first, end)
        layout, incarnation = self.keeper.layout, self.keeper.ledger.incarnation
        return headers_at(layout, incarnation, serials, ordinals, filled, digests)

    def parts(
        self, holder: Holder, first: int, end: int
    ) -> tuple[list[int], list[int], list[int], list[bytes]]:
        """Serials, ordinals, filled and digests of the same."""
        size, holding = self.keeper.layout.page_size, holder.holding
        tokens, full = holder.request.all_token_ids, end // size
        known = self.keeper.digests(holding, tokens)
        digests = known[first:full]
        ordinals = list(range(first, -(-end // size)))
        filled = [size] * len(ordinals)
        if end % size:
            filled[-1] = end % size
            before = known[full - 1] if full else holding.root
            digests = [*digests, chain_next(before, tokens[full * size : end])]
        return [holding.lease.serial] * len(ordinals), ordinals, filled, digests

    def wrong_prefix(self, holder: Holder) -> tuple[Evidence, ...]:
        """Evidence where a block of the prefix cache is of other text or of another scope."""
        pages = np.array(holder.blocks[: holder.shared], np.intp)
        size = self.keeper.layout.page_size
        want = self.words(holder, 0, holder.shared * size)
        evidence = differences(pages, want, self.keeper.headers.gather(pages), any_serial=True)
        return tuple(
            Evidence("prefix", 0, e.page, e.expected, f"{e.kind}: {self.keeper.owner(e.page)}")
            for e in evidence
        )

    # -- private

    def _claim(self, pages: list[int]) -> None:
        holding = self._nobody if self._for is None else self._for.holding
        try:
            self.keeper.claim(holding, np.array(pages, np.intp))
        except LocalOwnershipError as error:
            # Those that have an owner stay that owner's; whoever got them fails.
            self._doom(
                [
                    Evidence("handed_twice", 0, page, str(error), self.keeper.owner(page))
                    for page in pages
                ]
            )
        holding.fresh.clear()

    def _share(self, page: Pages, scope: str) -> None:
        ledger = self.keeper.ledger
        serial = int(ledger.serials_of(page)[0])
        if ledger.state_of(int(page[0])) is State.LEASED:
            ledger.seal(page, Lease(ledger.incarnation, serial))
        ledger.hold(page, ledger.serials_of(page), f"scope:{scope}")

    def _drop(self, block: Any) -> bool:
        page = block.block_id
        try:
            self.keeper.release(np.array([page], np.intp))
        except LocalOwnershipError as error:
            evidence = Evidence("double_free", 0, page, str(error), self.keeper.owner(page))
            self.report.violation("engine", [evidence], "free")
            return False
        return self._may_go(block)

    def _may_go(self, block: Any) -> bool:
        if self.keeper.ledger.state_of(block.block_id) is not State.QUARANTINED:
            return True
        self._waiting[block.block_id] = block
        return False

    def _doom(self, evidence: list[Evidence]) -> None:
        if self._for is None:
            self.report.violation("engine", evidence, "allocation")
        elif not self._for.holding.doomed:
            self._for.holding.doomed = evidence[0].kind
            self.report.violation(self._for.holding.name, evidence, "allocation")
