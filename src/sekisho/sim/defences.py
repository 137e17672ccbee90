"""Each defence of the design, and how to take it away: for known answers, and nowhere else.

A defence whose removal no checker notices is either none or not tested. Looked for and found to be
none by themselves, because another one says the same: the counts of `Complete` (the headers say
it), blanking granted headers (it only tells *unwritten* from *foreign*), and pinning condemned
pages (the step check catches the next foreign write too).
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sekisho.core.errors import Evidence
from sekisho.core.handoff import (
    Answer,
    Drained,
    Effect,
    GiveHandoff,
    Offer,
    Send,
    Take,
    Writer,
)
from sekisho.core.lease import Lease
from sekisho.core.ledger import Pages
from sekisho.core.table import BlockTable
from sekisho.sim.process import Process
from sekisho.sim.scenario import Scenario

Found = dict[int, tuple[Evidence, ...]]
_NO_LIMIT = 10**9
_IMPATIENT_S = 0.2


@dataclass(frozen=True, slots=True)
class Defence:
    """``does`` in one sentence. ``faults`` are those whose runs show its absence, and ``checker``
    is who must notice. ``take_away`` changes one new process."""

    name: str
    does: str
    faults: tuple[str, ...]
    checker: tuple[str, ...]
    take_away: Callable[[Process], None]


def remove(names: Sequence[str], process: Process) -> None:
    """Take the named defences away from a process that was just built."""
    for name in names:
        DEFENCES[name].take_away(process)


def incarnation(scenario: Scenario, slot: str, generation: int) -> int:
    """A new pool's incarnation: never one that was used before, unless that defence is gone."""
    number = zlib.crc32(slot.encode()) * 1000
    return number if "incarnation" in scenario.without else number + generation


def _admission(process: Process) -> None:
    node: Any = process.node
    if process.role == "decode":
        node._scheduler.tokens_max = _NO_LIMIT
    else:
        node.tokens_max = _NO_LIMIT


def _queue_limit(process: Process) -> None:
    node: Any = process.node
    owner = node._scheduler if process.role == "decode" else node
    owner._queue_max = _NO_LIMIT


def _commit_check(process: Process) -> None:
    if process.role == "decode":
        pages: Any = process.pages
        pages.prove = lambda table: ()


def _verify_without(process: Process, drop: Callable[[bool, Evidence], bool]) -> None:
    """Evidence for which ``drop(before release, evidence)`` holds is not seen."""
    pages: Any = process.pages
    verify = pages.verify

    def weaker(tables: Sequence[BlockTable], read: Sequence[Pages] | None = None) -> Found:
        found = verify(tables, read)
        kept = {
            request: tuple(item for item in items if not drop(read is not None, item))
            for request, items in found.items()
        }
        return {request: items for request, items in kept.items() if items}

    pages.verify = weaker


def _step_check(process: Process) -> None:
    _verify_without(process, lambda step, _: step)


def _source_check(process: Process) -> None:
    if process.role == "prefill":
        _verify_without(process, lambda step, _: True)


def _token_digest(process: Process) -> None:
    _verify_without(process, lambda _, item: item.kind == "wrong_text")
    node: Any = process.node
    if process.role == "prefill":
        offered = node._offer

        def trusting(peer: str, offer: Offer, now: float) -> None:
            text = process.pages.text(offer.scope, offer.tokens)
            offered(peer, replace(offer, token_digest=text.digests[-1]), now)

        node._offer = trusting


def _payload_digest(process: Process) -> None:
    _verify_without(process, lambda _, item: item.kind == "corrupt")


def _unpinned(process: Process) -> None:
    pool: Any = process.pool
    pages: Any = process.pages
    pool.pin = lambda _: 0
    pages.settle = lambda _: None


def _quarantine(process: Process) -> None:
    if process.role == "decode":
        _unpinned(process)


def _source_pin(process: Process) -> None:
    if process.role == "prefill":
        _unpinned(process)


class _HastyGive(GiveHandoff):
    """Says `Drained` as soon as it hears of an abort: an acknowledgement, and no quiescence."""

    def abort(self) -> list[Effect]:
        told = Send(Drained(self.offer.lease))
        effects = super().abort()
        return effects if told in effects else [*effects, told]


def _drain(process: Process) -> None:
    node: Any = process.node
    if process.role == "prefill":
        offered = node._offer

        def hasty(peer: str, offer: Offer, now: float) -> None:
            offered(peer, offer, now)
            if offer.lease in node._jobs:
                node._jobs[offer.lease].give.__class__ = _HastyGive

        node._offer = hasty


def _settle_once(process: Process) -> Callable[[int], None]:
    """Make a second settling of the same grant do nothing."""
    pages: Any = process.pages
    settle, done = pages.settle, set()

    def once(grant: int) -> None:
        if grant not in done:
            done.add(grant)
            settle(grant)

    pages.settle = once
    return once


def _settle_by_proof(process: Process) -> None:
    """Some time after its request has ended, a writer is taken for dead."""
    node: Any = process.node
    if process.role != "decode":
        return
    settle, step = _settle_once(process), node.step
    since: dict[Lease, float] = {}

    def impatient(now: float) -> bool:
        for lease, taking in node._takings.items():
            over = taking.take.state in (Take.ABORTED, Take.FAILED)
            if over and now - since.setdefault(lease, now) > _IMPATIENT_S:
                settle(taking.grant)
        return bool(step(now))

    node.step = impatient


def _distrust(process: Process) -> None:
    node: Any = process.node
    if process.role != "decode":
        return
    answer = node.answer

    def gullible(peer: str, message: Answer) -> None:
        taking = node._takings.get(message.lease)
        answer(peer, message)
        if taking is not None and taking.take.writer is Writer.DISTRUSTED:
            process.pages.settle(taking.grant)
            del node._takings[message.lease]
            node._notices.clear()

    node.answer = gullible


def _writer_death(process: Process) -> None:
    node: Any = process.node
    if process.role == "decode":
        node.prefill_dead = node._prefills.discard


def _tenant_key(process: Process) -> None:
    pages: Any = process.pages
    text = pages.text
    pages.text = lambda scope, tokens: text("", tokens)


def _scope_check(process: Process) -> None:
    pool: Any = process.pool

    def hold(pages: Pages, serials: Any, scope: str) -> None:
        pool._holders[pages] = pool._check_held(pages, serials) + 1

    pool.hold = hold


def _protocol(process: Process) -> None:
    """A word about a lease that is not open is taken for the oldest one that is."""
    node: Any = process.node
    if process.role == "prefill":
        offered = node._offer

        def again(peer: str, offer: Offer, now: float) -> None:
            node._jobs.pop(offer.lease, None)
            node._peers[peer].offered = 0
            offered(peer, offer, now)

        node._offer = again
        return
    answer = node.answer

    def anything(peer: str, message: Answer) -> None:
        if message.lease not in node._takings:
            taking = next((t for t in node._takings.values() if t.peer == peer), None)
            if taking is not None:
                message = replace(message, lease=taking.take.offer.lease)
        answer(peer, message)

    node.answer = anything


def _nothing(process: Process) -> None:
    """It is taken away elsewhere: see `incarnation`."""


_ALL = [
    Defence("admission", "refuses, on its original length, what a role cannot hold",
            ("short-handoff", "two-limits"), ("truth",), _admission),
    Defence("queue-limit", "bounds what may wait on a node",
            ("exhausted-ids",), ("truth",), _queue_limit),
    Defence("commit-check", "compares every header before a hand-off is committed",
            ("claimed-unwritten", "lost-notice"), ("ownership",), _commit_check),
    Defence("step-check", "compares every header before a token leaves",
            ("several-writers", "index-out-of-range", "padded-tail"),
            ("ownership",), _step_check),
    Defence("quarantine", "keeps pages of an ended request from everybody while a writer lives",
            ("slow-link-abort", "abort-reuse"), ("conservation",), _quarantine),
    Defence("drain", "says Drained only when no write is under way",
            ("ack-before-drain", "abort-reuse"), ("conservation",), _drain),
    Defence("settle-by-proof", "frees a writer's pages on its word or its death, never by time",
            ("running-call", "hold-defeated"), ("conservation",), _settle_by_proof),
    Defence("distrust", "does not believe a writer that was caught to have ended",
            ("read-first", "swap-in-early"), ("conservation",), _distrust),
    Defence("writer-death", "takes the death of a process for the end of its writes",
            ("rebound",), ("liveness",), _writer_death),
    Defence("source-pin", "keeps a page from reuse while it is sent from",
            ("wrong-object", "late-pull"), ("conservation",), _source_pin),
    Defence("source-check", "compares the headers of a page before it is sent",
            ("source-changed",), ("ownership", "interference"), _source_check),
    Defence("tenant-key", "starts every cache key with the tenant",
            ("wrong-boundary", "collision"), ("halt",), _tenant_key),
    Defence("scope-check", "lets a page be held only by its own tenant",
            ("forged-key", "weak-tier-key"), ("ownership",), _scope_check),
    Defence("token-digest", "binds a page to the text that it encodes",
            ("hit-no-proof",), ("interference",), _token_digest),
    Defence("payload-digest", "binds a page to its bytes (strict)",
            ("torn-page", "offload-race"), ("ownership",), _payload_digest),
    Defence("incarnation", "gives every new pool leases that no other pool ever had",
            ("restart-in-place",), ("conservation",), _nothing),
    Defence("protocol", "takes a word only about an open lease, and each step only once",
            ("shared-room", "released-twice", "owner-overwritten"),
            ("conservation", "ownership", "liveness"), _protocol),
]  # fmt: skip

DEFENCES: dict[str, Defence] = {defence.name: defence for defence in _ALL}
