"""The guard in vLLM's scheduler: who may begin, what each step vouches for, what is proven.

prefill   request: a scope            step: headers       end: signed manifest with the blocks
decode    request: a scope, and a     allocation: load,   every step: rows    end: blocks back,
          manifest of this prompt     blocks pinned                           or quarantined

`failing` holds requests of which no token may leave; they end with vLLM's own error.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from sekisho.core.errors import Evidence, check
from sekisho.core.ledger import Pages
from sekisho.guard.keeper import Keeper
from sekisho.guard.vllm.admission import Admission, Refused
from sekisho.guard.vllm.drain import Asker
from sekisho.guard.vllm.headers import headers_at
from sekisho.guard.vllm.kind import Kind
from sekisho.guard.vllm.manifest import FIELD, Manifest, sign
from sekisho.guard.vllm.messages import Load, StepMeta, WorkerMeta
from sekisho.guard.vllm.report import Report
from sekisho.guard.vllm.rows import Holder, Rows

log = logging.getLogger("vllm.sekisho")


class Scheduling:
    """Of one scheduler process.

    Args:
        role: ``prefill`` or ``decode``.
        engine: vLLM's id of this engine.
        workers: how many workers report of each load.
        kind: what the inner connector goes by.
    """

    def __init__(
        self, keeper: Keeper, role: str, engine: str, key: bytes, workers: int, kind: Kind
    ) -> None:
        self.keeper = keeper
        self.role = role
        self.engine = engine
        self.report = Report(role)
        self.rows = Rows(keeper, self.report)
        self._admission = Admission(keeper, self.rows, role, key, kind)
        self.drains: tuple[str, ...] = ()
        self.failing: dict[str, str] = {}
        self.put_in_pool: Callable[[list[Any]], None] = _no_pool
        self._key = key
        self._workers = workers
        self._kind = kind
        self._asker = Asker(key) if role == "decode" else None
        self._requests: dict[str, Any] = {}
        self._manifests: dict[str, Manifest] = {}
        self._loads: dict[str, Load] = {}
        self._pins: dict[str, tuple[int, Manifest]] = {}
        self._landed: dict[str, tuple[int, int]] = {}
        self._settling: set[str] = set()
        self._unsound: set[str] = set()

    # -- a request begins

    def admit(self, request: Any) -> bool:
        """Whether the inner connector may see ``request`` at all; else it fails at once."""
        name = request.request_id
        self._requests[name] = request
        try:
            manifest = self._admission.check(request)
        except Refused as refusal:
            self.failing[name] = str(refusal)
            self.report.refused(name, refusal.kind, str(refusal))
            return False
        if manifest is not None:
            self._manifests[name] = manifest
        return True

    def refused(self, request: Any) -> bool:
        return request.request_id in self.failing

    # -- blocks are allocated, and a transfer into them begins

    def allocated(self, request: Any, external: int) -> None:
        """vLLM has allocated; ``external`` tokens will come from prefill."""
        name = request.request_id
        holder, manifest = self.rows.holders.get(name), self._manifests.get(name)
        if not external or holder is None:
            return
        if manifest is None:
            self._fail(name, "load", [Evidence("load", 0, -1, "a manifest", "none")])
            return
        size, length = self.keeper.layout.page_size, len(request.prompt_token_ids)
        count = self.keeper.layout.pages_for(length)
        if len(holder.blocks) < count or external != length - holder.shared * size:
            found = f"{external} tokens into {len(holder.blocks)} blocks"
            evidence = Evidence("load", 0, -1, f"{length} tokens in {count} blocks", found)
            self._fail(name, "load", [evidence])
            return
        blocks = np.array(holder.blocks[holder.shared : count], np.intp)
        self._loads[name] = self._load(holder, manifest, blocks, length)
        self._pins[name] = self.rows.pin(blocks), manifest
        if self._asker is not None:
            self._asker.watch(name, manifest.drain)
        holder.written = length

    def _load(self, holder: Holder, manifest: Manifest, blocks: Pages, length: int) -> Load:
        layout, first = self.keeper.layout, holder.shared
        own = self.rows.words(holder, first, length)
        _, ordinals, filled, digests = self.rows.parts(holder, first, length)
        anybody = [0] * len(ordinals)
        expected = headers_at(layout, manifest.incarnation, anybody, ordinals, filled, digests)
        source = self._kind.source(holder.request.kv_transfer_params)
        return Load(blocks, expected, own, source=source, workers=manifest.drain)

    # -- a step

    def step(self, output: Any, inner: Any) -> StepMeta:
        """What the workers must know of the step in vLLM's scheduler output."""
        meta = StepMeta(inner, loads=self._loads)
        if self.rows.fresh:
            meta.fresh = np.array(self.rows.fresh, np.int32)
            self.keeper.headers.blank(meta.fresh.astype(np.intp))
        for load in self._loads.values():
            self.keeper.headers.words[load.blocks] = load.own
        self.rows.fresh, self._loads = [], {}
        meta.settling = set(self._settling)
        if output.num_scheduled_tokens:
            self.report.step()
            holders = self._scheduled(output.num_scheduled_tokens, meta)
            self._write(holders, output.num_scheduled_tokens, meta)
            for holder in holders:
                if holder.fresh_prefix:
                    self._check_prefix(holder, meta)
        return meta

    def _scheduled(self, counts: dict[str, int], meta: StepMeta) -> list[Holder]:
        out = []
        for name in counts:
            holder = self.rows.holders.get(name)
            if holder is None:  # the worker has no row to vouch for, and dooms it
                continue
            meta.rows[name] = holder.array()
            if holder.holding.doomed or name in self.failing:
                self.failing.setdefault(name, holder.holding.doomed)
                meta.doomed.add(name)
            else:
                out.append(holder)
        return out

    def _write(self, holders: list[Holder], counts: dict[str, int], meta: StepMeta) -> None:
        """Headers of what this step computes, as far as its tokens are known by now: with vLLM's
        asynchronous scheduling the last one of each request is not, and follows a step later."""
        size = self.keeper.layout.page_size
        blocks: list[int] = []
        serials: list[int] = []
        ordinals: list[int] = []
        filled: list[int] = []
        digests: list[bytes] = []
        for holder in holders:
            request = holder.request
            end = request.num_computed_tokens + counts[holder.holding.name]
            end = min(end, request.num_tokens)
            if end <= holder.written:
                continue
            parts = self.rows.parts(holder, holder.written // size, end)
            blocks += [holder.blocks[ordinal] for ordinal in parts[1]]
            meta.names += [holder.holding.name] * len(parts[1])
            serials += parts[0]
            ordinals += parts[1]
            filled += parts[2]
            digests += parts[3]
            holder.written = end
        if blocks:
            incarnation = self.keeper.ledger.incarnation
            meta.blocks = np.array(blocks, np.int32)
            meta.words = headers_at(
                self.keeper.layout, incarnation, serials, ordinals, filled, digests
            )
            # One by one: to set rows by an array of indices NumPy lets go of the interpreter, and
            # vLLM's output thread, which waits for it, keeps it for a millisecond.
            for block, words in zip(blocks, meta.words, strict=True):
                self.keeper.headers.words[block] = words

    def _check_prefix(self, holder: Holder, meta: StepMeta) -> None:
        holder.fresh_prefix = False
        evidence = self.rows.wrong_prefix(holder)
        if evidence:
            holder.holding.doomed = "prefix"
            self._fail(holder.holding.name, "prefix", evidence)
            meta.doomed.add(holder.holding.name)

    # -- what the workers found

    def heard(self, said: WorkerMeta | None) -> None:
        """Before vLLM looks at the step's output."""
        if said is not None:
            for name, (at, evidence) in said.found.items():
                self._fail(name, at, [self._named(e) for e in evidence])
            self._unsound |= said.found.keys() & self._pins.keys()
            for name in said.landed.keys() | said.in_doubt.keys():
                landed, doubt = self._landed.get(name, (0, 0))
                landed += said.landed.get(name, 0)
                doubt += said.in_doubt.get(name, 0)
                self._landed[name] = landed, doubt
                if landed + doubt >= self._workers:
                    del self._landed[name]
                    if self._asker is not None:
                        self._asker.unwatch(name)
                    self._loaded(name, doubt > 0)
            self._count_quiet(said.quiet)
        self.put_back()

    def _count_quiet(self, said: dict[str, int]) -> None:
        """Every worker of a step has found its sockets empty: what was sent has been written."""
        for name in said.keys() & self._settling:
            if said[name] >= self._workers:
                self._settling.discard(name)
                self._settle(self._pins.pop(name)[0])

    def _loaded(self, name: str, in_doubt: bool) -> None:
        """Every worker's part of the transfer is over, for the inner connector at least."""
        if name not in self._pins:
            return
        pin, manifest = self._pins[name]
        if in_doubt and self._asker is not None:
            self._unsound.discard(name)
            self._asker.ask(manifest.transfer, name, manifest.drain)
            return
        unsound = name in self._unsound
        self._unsound.discard(name)
        if unsound and not self._kind.reads:  # prefill reported success; its bytes may be under way
            self._settling.add(name)
            return
        del self._pins[name]
        self._settle(pin)
        if not unsound:
            self.report.commit()

    def put_back(self) -> None:
        """Look what is known of writers: a request whose prefill is gone fails now, and its blocks
        come when the inner connector has given up on it."""
        if self._asker is None or not self._pins:
            return
        for name in self._asker.take_gone():
            if name in self._pins:
                found = ", ".join(self._pins[name][1].drain)
                self._fail(name, "load", [Evidence("gone", 0, -1, "prefill runs", found)])
        self._settling.update(self._asker.take_over())

    def _settle(self, pin: int) -> None:
        self.put_in_pool(self.rows.settle(pin))
        self.report.quarantined(self.keeper.quarantined())

    def fails_now(self, live: dict[str, Any]) -> set[str]:
        """Requests that vLLM is to end with an error; ``live``: by name, those that it knows."""
        return {n for n in self.failing if n in live and not live[n].is_finished()}

    def distrusted(self, names: set[str]) -> set[int]:
        """Blocks of failed requests that nobody may find by their hash any more."""
        out: set[int] = set()
        for name in names:
            holder = self.rows.holders.get(name)
            if holder is not None:
                out.update(holder.blocks)
        return out

    def _fail(self, name: str, at: str, evidence: Any) -> None:
        request = self._requests.get(name)
        if name not in self.failing:
            self.report.violation(name, evidence, at)
            if request is not None:
                self.failing[name] = evidence[0].kind

    def _named(self, e: Evidence) -> Evidence:
        if e.page < 0:
            return e
        return Evidence(
            e.kind, e.request, e.page, e.expected, f"{e.found}; {self.keeper.owner(e.page)}"
        )

    # -- a request ends

    def tells_inner(self, request: Any) -> bool:
        """Whether the inner connector may see the end of ``request``: where its parameters were
        never proven, it would trip over them, or go where they point."""
        params = request.kv_transfer_params or {}
        return request.request_id in self._manifests or not params.get("do_remote_prefill")

    def ended(
        self, request: Any, sends: bool, given: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """``request`` is over; for prefill that ``sends`` its blocks, what goes to the proxy beside
        what the inner connector has ``given``."""
        name = request.request_id
        self._requests.pop(name, None)
        self._manifests.pop(name, None)
        failed = self.failing.pop(name, None) is not None
        if self.role != "prefill" or not sends or failed:
            return None
        length = request.num_prompt_tokens
        manifest = Manifest(
            transfer=self._kind.stated(name, request.kv_transfer_params, given),
            engine=self.engine,
            incarnation=self.keeper.ledger.incarnation,
            layout=self.keeper.layout.fingerprint,
            tokens=length,
            blocks=self.keeper.layout.pages_for(length),
            digest=self._admission.digest(request, length),
            drain=self.drains,
        )
        return {FIELD: sign(self._key, manifest)}


def _no_pool(blocks: list[Any]) -> None:
    check(not blocks, "blocks came back before vLLM's pool was known")


_scheduling: Scheduling | None = None


def active() -> Scheduling | None:
    """The guard of this scheduler process, once it has begun."""
    return _scheduling


def begin(scheduling: Scheduling) -> None:
    """From here on vLLM's functions of this process lead through ``scheduling``."""
    global _scheduling  # noqa: PLW0603  # one scheduler a process, and vLLM's functions are global
    _scheduling = scheduling
