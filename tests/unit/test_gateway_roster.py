"""The gateway's own view of its nodes, without sockets: who gets a request, and who must go."""

from collections.abc import Mapping, Sequence

import pytest

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.gate.model import Rank
from sekisho.gateway.roster import Roster
from sekisho.node.messages import (
    Abort,
    Condemned,
    Distrust,
    Generate,
    PeerDead,
    PeerUp,
    Ready,
    ToNode,
)

PARAMS = SamplingParams(max_tokens=4)


def ready(tokens_max: int = 100, tenants: bool = True) -> Ready:
    return Ready(tokens_max, "ipc://p", "memory", "stand-in", tenants, [], -(-tokens_max // 16), 16)


class World:
    """A roster whose messages are kept."""

    def __init__(self, *names: str) -> None:
        self.sent: list[tuple[str, ToNode]] = []
        self.ended: list[str] = []
        self.events: list[Delta | Ended] = []
        roles = {name.partition("-")[0] for name in names}
        self.roster = Roster(sorted(roles), self._send, self.ended.append)
        for name in names:
            self.roster.joined(name, ready())
        self.introductions, self.sent = self.sent, []

    def open(self) -> int:
        return self.roster.open("t", [1, 2, 3], PARAMS, self.events.append)

    def _send(self, name: str, messages: Sequence[ToNode]) -> None:
        self.sent.extend((name, message) for message in messages)


@pytest.fixture
def world() -> World:
    return World("decode-0.1", "decode-1.1", "prefill-0.1")


def test_every_decode_node_is_told_of_every_prefill_node(world: World) -> None:
    up = PeerUp("prefill-0.1", "ipc://p")
    assert world.introductions == [("decode-0.1", up), ("decode-1.1", up)]


def test_a_request_goes_to_the_least_busy(world: World) -> None:
    numbers = [world.open() for _ in range(3)]
    assert len(set(numbers)) == 3
    assert [name for name, _ in world.sent] == ["decode-0.1", "decode-1.1", "decode-0.1"]
    [first, *_] = [message for _, message in world.sent]
    assert first == Generate(numbers[0], "t", [1, 2, 3], PARAMS, "prefill-0.1")


def test_a_node_with_condemned_pages_gets_no_work_and_is_ended_after_its_last_request(
    world: World,
) -> None:
    number = world.open()
    world.roster.hear("decode-0.1", Condemned())
    assert world.ended == []
    world.sent.clear()
    world.open()
    assert [name for name, _ in world.sent] == ["decode-1.1"]
    world.roster.hear("decode-0.1", Ended(number, "stop", "", 1, 0))
    assert world.ended == ["decode-0.1"]


def test_an_idle_node_with_condemned_pages_is_ended_at_once(world: World) -> None:
    world.roster.hear("prefill-0.1", Condemned())
    assert world.ended == ["prefill-0.1"]
    assert not world.roster.ready(), "no other prefill node is there"


def test_a_distrusted_node_is_ended_when_its_requests_are(world: World) -> None:
    number = world.open()
    world.roster.hear("decode-0.1", Distrust("prefill-0.1"))
    world.roster.hear("decode-0.1", Distrust("prefill-0.1"))
    assert world.ended == []
    world.roster.close(number)
    assert world.sent[-1] == ("decode-0.1", Abort(number))
    assert world.ended == ["prefill-0.1"]


def test_a_word_about_anothers_request_is_never_delivered(world: World) -> None:
    number = world.open()
    world.roster.hear("decode-1.1", Delta(number, 0, [7], "x", []))
    assert world.events == []
    world.roster.hear("decode-0.1", Delta(number, 0, [7], "x", []))
    assert len(world.events) == 1


def test_the_death_of_a_node_ends_its_requests_and_is_told_to_the_others(world: World) -> None:
    number = world.open()
    world.sent.clear()
    world.roster.exited("decode-0.1")
    assert [(e.request, e.code) for e in world.events if isinstance(e, Ended)] == [
        (number, "node_lost")
    ]
    told = [name for name, message in world.sent if message == PeerDead("decode-0.1")]
    assert told == ["decode-1.1", "prefill-0.1"]


def test_a_node_that_may_not_serve_tenants_makes_the_fleet_unready() -> None:
    world = World("colocated-0.1")
    assert world.roster.ready()
    world.roster.joined("colocated-1.1", ready(tenants=False))
    assert not world.roster.ready()
    world.open()
    assert [e.code for e in world.events if isinstance(e, Ended)] == ["not_ready"]


def test_a_draining_fleet_takes_nothing_new(world: World) -> None:
    number = world.open()
    world.roster.draining = True
    world.open()
    world.roster.end(number, "shutting_down", "")
    assert [e.code for e in world.events if isinstance(e, Ended)] == [
        "not_ready",
        "shutting_down",
    ]
    assert world.roster.requests() == []


def test_a_dead_nodes_last_word_does_not_bring_it_back(world: World) -> None:
    world.roster.exited("prefill-0.1")
    world.roster.joined("prefill-0.1", ready())
    assert not world.roster.ready()
    world.open()
    assert [e.code for e in world.events if isinstance(e, Ended)] == ["not_ready"]


def too_small(nodes: Mapping[str, Rank]) -> str:
    small = [name for name, rank in nodes.items() if (rank.sequence_max or 0) < 100]
    return f"too small: {small}" if small else ""


def test_a_replacement_below_the_window_makes_the_fleet_unready_until_a_larger_one_joins() -> None:
    world = World("decode-0.1", "prefill-0.1")
    world.roster = roster = Roster(
        ["decode", "prefill"], lambda *_: None, world.ended.append, 100, too_small
    )
    roster.joined("decode-0.1", ready(400))
    assert (roster.refusal, roster.ready()) == ("", False), "one role alone is not judged"
    roster.joined("prefill-0.1", ready(200))
    assert (roster.ready(), roster.tokens_max()) == (True, 100)
    number = world.open()
    roster.exited("prefill-0.1")
    roster.joined("prefill-0.2", ready(99))
    assert roster.refusal == "too small: ['prefill-0.2']"
    assert not roster.ready()
    world.open()
    assert [e.code for e in world.events if isinstance(e, Ended)] == ["not_ready"]
    assert roster.requests() == [number], "what runs goes on"
    roster.exited("prefill-0.2")
    roster.joined("prefill-0.3", ready(100))
    assert (roster.refusal, roster.ready(), roster.tokens_max()) == ("", True, 100)


def test_a_node_that_is_being_replaced_is_not_held_against_the_window() -> None:
    roster = Roster(["colocated"], lambda *_: None, lambda _: None, 100, too_small)
    roster.joined("colocated-0.1", ready(100))
    roster.joined("colocated-1.1", ready(99))
    assert not roster.ready()
    roster.hear("colocated-1.1", Condemned())
    assert (roster.ready(), list(roster.ranks())) == (True, ["colocated-0.1"])
