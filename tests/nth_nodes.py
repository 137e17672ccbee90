"""Scenarios over a prefill and a decode node whose n-th point fails, and what must hold after it.

Points are struck from outside, at the seams that production has: what the pool grants, what the
transport says, what reaches a header. A node that an exception leaves has died, as its process
would have, and is replaced as the supervisor would.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from node_kit import TOKENIZER, Pair, prompt, scheduler
from nth_kit import Nth
from sekisho.core.ledger import State
from sekisho.core.memory import PageMemory
from sekisho.core.pool import Pool
from sekisho.engine.output import Delta, Ended
from sekisho.engine.pages import PageManager
from sekisho.engine.sequence import Phase
from sekisho.node.decode import DecodeNode
from sekisho.node.messages import Abort, Join
from sekisho.node.prefill import PrefillNode
from sekisho.transport import Completion, MemoryTransport, PageWrite, Status, Transport
from sekisho.transport.faulty import Fault, FaultPlan
from stand_in import LAYOUT, VOCABULARY, StandInRunner, answer

DECODE_PAGES, PREFILL_PAGES = 13, 12
QUIET_STEPS = 6  # a refused request tries again at the next step, so one quiet step is no end


class Ask(NamedTuple):
    """A request: when it comes, of whom, and when its client goes away (-1: never)."""

    at: int
    request: int
    scope: str
    prompt: list[int]
    tokens_max: int
    gone_at: int = -1


SHARED = prompt(1, 70)
# Two tenants with the same text, one that continues its own, one that goes away while it is
# transferred, and a long answer: together more pages than either pool has.
MIXED = [
    Ask(0, 1, "a", SHARED, 12),
    Ask(0, 4, "a", prompt(4, 50), 12, gone_at=4),
    Ask(0, 2, "b", SHARED, 30),
    Ask(0, 3, "b", prompt(3, 40), 40),
    Ask(20, 5, "a", SHARED + prompt(5, 20), 12),
]


class StruckError(MemoryError):
    """The n-th point, where it kills the node of that name."""

    def __init__(self, node: str) -> None:
        super().__init__(f"{node}: refused at this point")
        self.node = node


class Settled:
    """A transport over ``inner`` that tells of a write at the first poll after it, so that every
    run takes the same steps."""

    def __init__(self, inner: Transport) -> None:
        self.name, self.region = inner.name, inner.region
        self.endpoint, self.connect, self.disconnect = (
            inner.endpoint,
            inner.connect,
            inner.disconnect,
        )
        self._inner = inner
        self._open: set[int] = set()

    def submit(self, peer: int, pages: Sequence[PageWrite]) -> int:
        ticket = self._inner.submit(peer, pages)
        self._open.add(ticket)
        return ticket

    def poll(self) -> list[Completion]:
        told: list[Completion] = []
        while self._open:
            for done in self._inner.poll():
                told.append(done)
                if done.status is not Status.UNKNOWN:
                    self._open.discard(done.ticket)
            time.sleep(0)
        return told

    def close(self) -> None:
        self._inner.close()


class Cluster(Pair):
    """A `Pair` that plays a list of `Ask`s, survives the death of a node, and is then judged."""

    def __init__(
        self,
        wrap: Callable[[Transport], Transport] = lambda inner: inner,
        isolation: str = "standard",
        decode_pages: int = DECODE_PAGES,
        colocated: bool = False,
    ) -> None:
        super().__init__(
            decode_pages=decode_pages,
            prefill_pages=PREFILL_PAGES,
            isolation=isolation,
            wrap=lambda inner: wrap(Settled(inner)),
            batch_max=4,
        )
        if colocated:  # it computes prompts itself; the prefill node beside it stays idle
            self.scheduler = scheduler(self.decode_pages, batch_max=4)
            self.decode = DecodeNode(
                self.scheduler, self.decode_pages, TOKENIZER, vocab_size=VOCABULARY, wait_max=60.0
            )
        self.asked: dict[int, Ask] = {}
        self.dead: list[str] = []
        self.preempted = 0
        self.gone_in: list[Phase] = []
        self._listen()

    def settle(self) -> None:
        """Until nothing moves any more."""
        self.play([])

    def play(self, asks: Sequence[Ask]) -> None:
        """All of ``asks``, until nothing moves any more or decode is dead."""
        last = max((max(ask.at, ask.gone_at) for ask in asks), default=0)
        step = quiet = 0
        while (quiet < QUIET_STEPS or step <= last) and "d" not in self.dead:
            for ask in asks:
                if ask.at == step:
                    self.asked[ask.request] = ask
                    self.ask(ask.request, ask.prompt, ask.tokens_max, ask.scope)
                if ask.gone_at == step:
                    sequence = self.scheduler.get(ask.request)
                    self.gone_in += [sequence.phase] if sequence is not None else []
                    self.decode.abort(Abort(ask.request))
            before = self._progress()
            moved = self.step_or_die() and self._progress() != before
            quiet = 0 if moved else quiet + 1
            step += 1
            assert step < 2000, "still moving"

    def step_or_die(self) -> bool:
        """A step; a node that an exception leaves is dead, and prefill is replaced at once."""
        try:
            return self.step()
        except StruckError as struck:
            self.decode_pages.pool.check_integrity()
            self.prefill_pages.pool.check_integrity()
            self.dead.append(struck.node)
            if struck.node == "d":
                self.prefill.peer_dead("d")
                self._drain_prefill()
            else:
                self.replace_prefill()
            return True

    def replace_prefill(self) -> None:
        """Prefill's process is ended, as for one that is distrusted, and a new one comes up."""
        self.source.close()
        self.decode.prefill_dead("p")
        self.source = Settled(MemoryTransport(LAYOUT.page_bytes, PREFILL_PAGES))
        self.prefill_pages = PageManager(
            PageMemory(self.source.region, LAYOUT, PREFILL_PAGES),
            Pool(PREFILL_PAGES, 13),
            self.prefill_pages.policy,
        )
        self.prefill = PrefillNode(
            StandInRunner(self.prefill_pages.memory),
            self.prefill_pages,
            self.source,
            tokens_max=self.prefill_pages.tokens_max,
            chunk_tokens=24,
            queue_max=100,
            wait_max=60.0,
        )
        self.decode.prefill_up("p")
        self.prefill.receive("d", Join(self.target.endpoint(), LAYOUT.fingerprint), self.now)

    # -- what must hold

    def judge(self, *codes: str) -> set[str]:
        """Check everything that holds after any single failure; returns the scopes that failed.

        ``codes`` are how a request may end beside rightly, or given up by its client.
        """
        failed = set()
        for ask in self.asked.values():
            whole = expected(tuple(ask.prompt), ask.tokens_max)
            text = self.texts.get(ask.request, [])
            assert text == whole[: len(text)], f"request {ask.request} got another's tokens"
            end = self.ends.get(ask.request)
            if end is None:
                assert "d" in self.dead, f"request {ask.request} has no end"
                continue
            assert end.output_tokens == len(text)
            if end.code == "length":
                assert text == whole
            elif end.code != "client_gone" or ask.gone_at < 0:
                assert end.code in codes, f"request {ask.request}: {end.code} {end.message}"
                failed.add(ask.scope)
        self._judge_pages()
        return failed

    def _judge_pages(self) -> None:
        """Free or cached, or in quarantine for a reason that can be named."""
        offers = [taking.take.offer for taking in self.decode._takings.values()]
        unfinished = {page for offer in offers for page in offer.pages}
        grants = {grant for _, grant in self.prefill._tickets.values()}
        reading = {page for g in grants for page in self.prefill_pages.pool._grants[g].tolist()}
        if "d" not in self.dead:
            held_for(self.decode_pages, unfinished)
        held_for(self.prefill_pages, reading)

    def judge_recovery(self) -> None:
        """Writers end, then every page is back but those that somebody unknown wrote; and a new
        request of each tenant is answered rightly."""
        if "d" in self.dead:
            return
        if self.prefill.idle and not self.distrusted:
            assert self.decode.idle, "a writer has ended, and decode was not told"
        else:
            self.replace_prefill()
        self.play([Ask(0, 90 + i, scope, prompt(90 + i, 50), 20) for i, scope in enumerate("ab")])
        for request in (90, 91):
            assert self.ends[request].code == "length", self.ends[request]
        self.judge("ownership_violation", "transfer_failed", "node_lost")
        assert self.decode.idle
        assert self.prefill.idle
        held_for(self.decode_pages, set())
        held_for(self.prefill_pages, set())

    # -- private

    def _progress(self) -> tuple[object, ...]:
        """What a step changes unless all that is left is a write in doubt."""
        rows = [node._runner.rows for node in (self.scheduler, self.prefill)]  # type: ignore[attr-defined]
        told = [len(text) for text in self.texts.values()]
        return rows, told, len(self.ends), self.decode.counts(), self.prefill.counts()

    def _drain_prefill(self) -> None:
        for _ in range(QUIET_STEPS):
            self.prefill.step(self.now)
        self.prefill.outbox.clear()
        assert self.prefill.idle

    def _listen(self) -> None:
        """Nothing may follow a request's end; and preemptions are counted."""
        told, preempt = self.decode.to_gateway, self.scheduler._preempt

        def to_gateway() -> Any:
            events = told()
            over = set(self.ends)
            for event in events:
                if isinstance(event, Delta | Ended):
                    assert event.request not in over, "something follows an end"
                    over |= {event.request} if isinstance(event, Ended) else set()
            return events

        def count(sequence: Any) -> None:
            self.preempted += 1
            preempt(sequence)

        setattr(self.decode, "to_gateway", to_gateway)  # noqa: B010
        setattr(self.scheduler, "_preempt", count)  # noqa: B010


@functools.cache
def expected(text: tuple[int, ...], count: int) -> list[int]:
    """The stand-in's answer, computed once for all runs."""
    return answer(list(text), count)


def held_for(pages: PageManager, reason: set[int]) -> None:
    """No page is leased; those in quarantine are condemned, or among those of ``reason``."""
    pool = pages.pool
    pool.check_integrity()
    assert pool.counts()["leased"] == 0
    held = {page for page in range(pool.page_count) if pool.state_of(page) is State.QUARANTINED}
    assert held <= reason | pages._suspect, "a page is held for no reason"
    assert not pool._lease_scope, "a lease is open that no request has"


# ---- where it strikes


def refuse_room(pages: PageManager, nth: Nth) -> None:
    """The n-th time that there would be room for a request's pages, there is none."""
    real = pages._make_room

    def make_room(count: int) -> bool:
        return real(count) and not (count > 0 and nth.strikes())

    setattr(pages, "_make_room", make_room)  # noqa: B010


def kill_at(owner: Any, method: str, node: str, nth: Nth) -> None:
    """The n-th call of ``owner.method`` raises before it does anything, which ends the node."""
    real = getattr(owner, method)

    def call(*arguments: Any) -> Any:
        if nth.strikes():
            raise StruckError(node)
        return real(*arguments)

    setattr(owner, method, call)


class WatchedWords(np.ndarray[Any, np.dtype[np.uint64]]):
    """Headers, whose n-th write does not happen or writes noise; views of it count too."""

    nth: Nth | None = None
    noise: bool = False

    def __array_finalize__(self, source: Any) -> None:
        self.nth = getattr(source, "nth", None)
        self.noise = getattr(source, "noise", False)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.nth is None or not self.nth.strikes():
            super().__setitem__(key, value)
        elif self.noise:
            shape = np.ndarray.__getitem__(self, key).shape
            bits = np.random.default_rng(self.nth.n).integers(0, 2**63, shape, np.uint64)
            super().__setitem__(key, bits)


def watch_headers(pages: PageManager, nth: Nth, noise: bool) -> None:
    """The n-th header write of this node itself is lost, or is noise."""
    words = pages.memory.words.view(WatchedWords)
    words.nth, words.noise = nth, noise
    pages.memory.words = words


@dataclass(frozen=True)
class NthPlan(FaultPlan):
    """The n-th submit suffers ``fault``."""

    nth: Nth = field(default_factory=lambda: Nth(0))
    fault: Fault = Fault.FAIL

    def pick(self, index: int) -> Fault | None:
        return self.fault if self.nth.strikes() else None


class HeaderFaults(Settled):
    """Every page lands, but the n-th header that is sent is zeros, or noise."""

    def __init__(self, inner: Transport, nth: Nth, noise: bool) -> None:
        super().__init__(inner)
        self._nth, self._noise = nth, noise

    def submit(self, peer: int, pages: Sequence[PageWrite]) -> int:
        return super().submit(peer, [self._sent(page) for page in pages])

    def _sent(self, page: PageWrite) -> PageWrite:
        if not self._nth.strikes():
            return page
        size = len(page.header)
        noise = np.random.default_rng(self._nth.n).bytes(size)
        return page._replace(header=noise if self._noise else bytes(size))
