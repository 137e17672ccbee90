"""Hand-offs over one pool, with every fault of a transport and of a peer.

Each offer is a `TakeHandoff` and a `GiveHandoff` joined by two FIFO channels. Writes land in parts
and in any order, are lost, stay in doubt and land late, or are reported as landed and are not. The
model knows who really wrote each page last, and which writes can still land.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sekisho.core.errors import RemoteOwnershipError
from sekisho.core.handoff import (
    AbortOffer,
    Answer,
    Commit,
    Complete,
    Drained,
    Effect,
    End,
    Failed,
    GiveHandoff,
    Offer,
    Reject,
    Send,
    Settle,
    Take,
    TakeHandoff,
    Writer,
)
from sekisho.core.ledger import State
from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout, chain, chain_root
from sekisho.core.pool import Pool
from sekisho.core.table import BlockTable, verify

SIZE = 16
LAYOUT = PageLayout(SIZE, 1, 1, 1, 1, "m")
PAGES = 6
RARELY = st.sampled_from([False] * 9 + [True])
FATES = st.sampled_from(["landed", "landed", "landed", "lie", "lost"])


@dataclass(eq=False)
class Write:
    """One write of prefill's transport: ordinals not yet landed, and whether it was reported."""

    ordinals: list[int]
    reported: bool = False


@dataclass(eq=False)
class Link:
    """One offer, both its sides and what is between them."""

    request: int
    table: BlockTable
    grant: int
    take: TakeHandoff
    to_prefill: deque[Offer | AbortOffer]
    to_decode: deque[Answer] = field(default_factory=deque)
    give: GiveHandoff | None = None
    alive: bool = True
    to_submit: list[int] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    delivered: list[Answer] = field(default_factory=list)
    decided: list[Effect] = field(default_factory=list)
    settled: bool = False
    holding: bool = True


def writing(link: Link) -> bool:
    return link.give is not None and link.give.writing


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(PAGES, 1)
        self.memory = PageMemory(np.zeros(PAGES * LAYOUT.page_bytes, np.uint8), LAYOUT, PAGES)
        self.links: list[Link] = []
        # page -> (request, ordinal) of what really lies in it
        self.content: dict[int, tuple[int, int]] = {}

    # -- decode

    @rule(tokens=st.integers(1, 40))
    def offer(self, tokens: int) -> None:
        count = LAYOUT.pages_for(tokens)
        if count > self.pool.free_count:
            return
        request = len(self.links)
        lease = self.pool.open_lease("a")
        root, ids = chain_root("a", "m"), [request * 100 + i for i in range(tokens)]
        digests = chain(root, ids, SIZE)
        table = BlockTable(LAYOUT, request, lease, root)
        pages = self.pool.grant(lease, count)
        table.expect(pages, tokens, ids[tokens - tokens % SIZE :], digests)
        self.memory.blank(pages)
        for page in pages.tolist():
            self.content.pop(page, None)
        offer = Offer(lease, request, "a", ids, digests[-1], 0, pages.tolist(), 1)
        take = TakeHandoff(offer, SIZE, lambda: verify(self.memory, [table]).get(request, ()))
        self.links.append(Link(request, table, self.pool.pin(pages), take, deque([offer])))

    def carry_out(self, link: Link, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Settle():
                    assert not link.settled
                    link.settled = True
                    self.pool.settle(link.grant)
                case Commit():
                    assert self.true(link), "committed what was not written"
                    link.decided.append(effect)
                case End():
                    link.decided.append(effect)
                    self.release(link)
                case Send(AbortOffer() as message) if link.alive:
                    link.to_prefill.append(message)

    def release(self, link: Link) -> None:
        self.pool.drop(link.table.pages, link.table.serials)
        self.pool.close_lease(link.table.lease)
        link.holding = False

    def true(self, link: Link) -> bool:
        """Whether every page of the table really holds what it is expected to."""
        pages = link.table.pages.tolist()
        return all(self.content.get(page) == (link.request, i) for i, page in enumerate(pages))

    def pick(self, data: st.DataObject, wanted: Callable[[Link], object]) -> Link | None:
        links = [link for link in self.links if wanted(link)]
        return data.draw(st.sampled_from(links)) if links else None

    @precondition(lambda self: any(link.to_decode for link in self.links))
    @rule(data=st.data(), one=st.booleans())
    def decode_receives(self, data: st.DataObject, one: bool) -> None:
        link = self.pick(data, lambda link: link.to_decode)
        while link is not None and link.to_decode:
            self.deliver(link, link.to_decode.popleft())
            if one:
                break

    def deliver(self, link: Link, message: Answer) -> None:
        before = link.take.state, link.take.writer
        again = message in link.delivered
        link.delivered.append(message)
        try:
            effects = link.take.receive(message)
        except RemoteOwnershipError:
            # Only a word said twice, or one of a writer that is known to be dead.
            assert again or not link.alive, f"{message} in {before}"
            assert (link.take.state, link.take.writer) == before
        else:
            assert not (again and effects), "a duplicate had an effect"
            self.carry_out(link, effects)

    @precondition(lambda self: any(link.delivered and not link.take.closed for link in self.links))
    @rule(data=st.data())
    def a_message_comes_twice(self, data: st.DataObject) -> None:
        if link := self.pick(data, lambda link: link.delivered):
            self.deliver(link, data.draw(st.sampled_from(link.delivered)))

    @precondition(lambda self: any(link.holding for link in self.links))
    @rule(data=st.data(), really=st.booleans())
    def a_request_ends(self, data: st.DataObject, really: bool) -> None:
        """A committed one finishes; one that still waits is aborted now and then."""
        link = self.pick(data, lambda link: link.holding)
        if link is not None and (really or link.take.state is Take.COMMITTED):
            self.carry_out(link, link.take.abort("client_gone", ""))
            if link.holding:
                self.release(link)

    # -- prefill

    def say(self, link: Link, effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, Send)
            assert isinstance(effect.message, Complete | Failed | Drained)
            link.to_decode.append(effect.message)
            link.answers.append(effect.message)

    @precondition(lambda self: any(link.to_prefill and link.alive for link in self.links))
    @rule(data=st.data(), refuse=RARELY)
    def prefill_receives(self, data: st.DataObject, refuse: bool) -> None:
        link = self.pick(data, lambda link: link.to_prefill and link.alive)
        if link is None:
            return
        message = link.to_prefill.popleft()
        if isinstance(message, AbortOffer):
            if link.give is not None:
                self.say(link, link.give.abort())
        elif refuse:
            reject = Reject(message.lease, "queue_full", "")
            link.to_decode.append(reject)
            link.answers.append(reject)
        else:
            link.give = GiveHandoff(message)
            link.to_submit = list(range(len(message.pages)))

    @precondition(lambda self: any(map(writing, self.links)))
    @rule(data=st.data(), count=st.integers(1, 4), early=RARELY)
    def prefill_writes(self, data: st.DataObject, count: int, early: bool) -> None:
        """The next pages; behind the last page, or now and then too early, the word that it is."""
        link = self.pick(data, writing)
        if link is None or link.give is None:
            return
        self.write(link, link.give, 0 if early else count)

    def write(self, link: Link, give: GiveHandoff, count: int) -> None:
        """Start a write of up to so many pages; of none, or where none is left, it was the last."""
        part, link.to_submit = link.to_submit[:count], link.to_submit[count:]
        if part:
            tokens = min((part[-1] + 1) * SIZE, link.table.length) - part[0] * SIZE
            self.say(link, give.submit(len(part), tokens))
            link.writes.append(Write(part))
        else:
            self.say(link, give.last(0))

    @precondition(lambda self: any(link.writes for link in self.links))
    @rule(
        data=st.data(),
        fate=st.sampled_from(["part", "landed", "landed", "lie", "lost", "doubt", "broken"]),
    )
    def transport_does(self, data: st.DataObject, fate: str) -> None:
        """Bytes move and completions are reported, not always the one with the other."""
        link = self.pick(data, lambda link: link.writes)
        if link is None:
            return
        write = data.draw(st.sampled_from(link.writes))
        if fate == "part" or write.reported:
            self.land(link, write, data.draw(st.integers(1, 4)))
        elif link.give is not None:
            self.report(link, link.give, write, fate)

    def report(self, link: Link, give: GiveHandoff, write: Write, fate: str) -> None:
        if fate == "doubt":
            self.say(link, give.in_doubt("timed out"))
        elif fate == "broken":
            self.say(link, give.broken("source page is foreign"))
        elif fate == "lost":
            link.writes.remove(write)
            self.say(link, give.lost("refused"))
        else:
            if fate == "landed":
                self.land(link, write, len(write.ordinals))
            elif write.ordinals:
                write.reported = True
            if not write.reported:
                link.writes.remove(write)
            self.say(link, give.landed())

    def land(self, link: Link, write: Write, count: int) -> None:
        for ordinal in write.ordinals[:count]:
            page = int(link.table.pages[ordinal])
            self.memory.words[page] = link.table.words[ordinal]
            self.content[page] = (link.request, ordinal)
        del write.ordinals[:count]
        if write.reported and not write.ordinals:
            link.writes.remove(write)

    @precondition(lambda self: any(map(writing, self.links)))
    @rule(data=st.data(), fates=st.one_of(st.just([]), st.lists(FATES, max_size=4)))
    def prefill_goes_through(self, data: st.DataObject, fates: list[str]) -> None:
        """One hand-off to its end, page by page, most often an honest one."""
        link = self.pick(data, writing)
        while link is not None and link.give is not None and link.give.writing:
            for write in [write for write in link.writes if not write.reported]:
                self.report(link, link.give, write, fates.pop() if fates else "landed")
            if link.give.writing:
                self.write(link, link.give, 1)

    @precondition(lambda self: sum(link.alive for link in self.links) >= 4)
    @rule(which=st.integers(0, 2), known=st.booleans(), lost=st.booleans())
    def a_prefill_dies(self, which: int, known: bool, lost: bool) -> None:
        """One of three: what it had under way ends with its process; what it said may still
        arrive, before or after decode knows."""
        for link in [link for link in self.links if link.request % 3 == which]:
            if link.alive:
                link.alive, link.give = False, None
                link.writes.clear()
                link.to_prefill.clear()
                if lost:
                    link.to_decode.clear()
            if known:
                self.carry_out(link, link.take.writer_dead())

    # -- what always holds

    @invariant()
    def the_pool_adds_up(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def a_page_that_may_still_be_written_is_not_free(self) -> None:
        """Except by a lie that no `Complete` repeats: against that stands `verify`."""
        for link in self.links:
            said = [type(answer) for answer in link.answers]
            for write in link.writes:
                if write.reported and Drained in said:
                    continue
                for page in link.table.pages.tolist():
                    assert self.pool.pins_of(page) > 0
                    assert self.pool.state_of(page) is not State.FREE
                    assert self.pool.serials_of(np.array([page])) == link.table.lease.serial

    @invariant()
    def one_outcome_and_one_answer(self) -> None:
        for link in self.links:
            assert len(link.decided) == (link.take.state is not Take.OFFERED)
            assert link.settled == (link.take.writer is Writer.TERMINAL)
            said = [type(answer) for answer in link.answers]
            assert said in ([], [Reject], [Complete], [Failed], [Failed, Drained], [Drained])
            if link.give is not None and link.give.closed:
                assert said[-1] in (Complete, Drained)

    @invariant()
    def verify_knows_the_truth(self) -> None:
        """Read safety: of what decode would release, exactly the true pages pass."""
        tables = [
            link.table for link in self.links if link.holding and link.take.state is Take.COMMITTED
        ]
        found = verify(self.memory, tables)
        for link in self.links:
            if link.table in tables:
                assert (link.request not in found) == self.true(link)

    def teardown(self) -> None:
        """Liveness: the faults stop, what is in doubt resolves, a liar dies; all ends."""
        for turn, link in enumerate(self.links):
            for message in list(link.to_prefill) if link.alive else []:
                if isinstance(message, Offer):
                    link.give = GiveHandoff(message)
                elif link.give is not None:
                    self.say(link, link.give.abort())
            if link.give is not None:
                for write in [write for write in link.writes if not write.reported]:
                    self.report(link, link.give, write, "landed" if turn % 2 else "lost")
                if link.give.writing:
                    self.say(link, link.give.last(0))
                assert link.give.closed
            for word in link.to_decode:
                self.deliver(link, word)
            if link.take.writer is Writer.DISTRUSTED or not link.alive:
                self.carry_out(link, link.take.writer_dead())
            assert link.take.closed, (link.take.state, link.take.writer)
            if link.holding:
                self.release(link)
        self.pool.check_integrity()
        assert self.pool.free_count == PAGES


TestHandoff = HandoffMachine.TestCase
TestHandoff.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_lie_that_no_table_can_see_is_seen_by_verify() -> None:
    """Landed, says the transport of a write that is still to come; another one is lost, so that
    no header is ever compared; the pages are free, are another's, and then the write lands."""
    machine = HandoffMachine()
    machine.offer(tokens=32)
    (liar,) = machine.links
    give = liar.give = GiveHandoff(liar.take.offer)
    liar.to_submit = [0, 1]
    for fate in ("lie", "lost"):
        machine.write(liar, give, 1)
        machine.report(liar, give, liar.writes[-1], fate)
    while liar.to_decode:
        machine.deliver(liar, liar.to_decode.popleft())
    assert liar.take.closed
    assert machine.pool.free_count == PAGES
    for _ in range(PAGES // 2):
        machine.offer(tokens=32)
        link = machine.links[-1]
        give = link.give = GiveHandoff(link.take.offer)
        link.to_submit = [0, 1]
        machine.write(link, give, 2)
        machine.report(link, give, link.writes[0], "landed")
        machine.write(link, give, 0)
        machine.deliver(link, link.to_decode.popleft())
    (late,) = liar.writes
    machine.land(liar, late, 1)
    victims = [link for link in machine.links[1:] if not machine.true(link)]
    assert len(victims) == 1
    machine.verify_knows_the_truth()
    (evidence,) = verify(machine.memory, [link.table for link in machine.links[1:]]).values()
    assert [item.kind for item in evidence] == ["foreign"]
