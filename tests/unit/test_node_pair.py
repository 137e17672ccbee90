"""Prefill and decode node joined in one process: hand-off, prefix, aborts, deaths, limits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from node_kit import Pair, prompt
from sekisho.core.errors import RemoteOwnershipError
from sekisho.core.handoff import Complete, Drained, Offer, Reject
from sekisho.core.lease import Lease
from sekisho.node.messages import Abort, Join
from sekisho.transport import Transport
from sekisho.transport.faulty import Fault, FaultPlan, FaultyTransport
from stand_in import LAYOUT, answer


@contextmanager
def pair(**options: Any) -> Iterator[Pair]:
    made = Pair(**options)
    try:
        yield made
    finally:
        made.close()


def faulty(plan: FaultPlan, made: list[FaultyTransport]) -> Any:
    def wrap(inner: Transport) -> Transport:
        made.append(FaultyTransport(inner, plan))
        return made[0]

    return wrap


def nothing_is_held(nodes: Pair) -> bool:
    counts = [pages.pool.counts() for pages in (nodes.decode_pages, nodes.prefill_pages)]
    return all(count["leased"] == count["quarantined"] == 0 for count in counts)


@pytest.mark.parametrize("isolation", ["strict", "standard", "off"])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 33, 200])
def test_a_handed_over_request_answers_as_alone(isolation: str, length: int) -> None:
    with pair(isolation=isolation) as nodes:
        nodes.ask(1, prompt(length, length), 20)
        nodes.run()
        assert nodes.texts[1] == answer(prompt(length, length), 20)
        assert nodes.ends[1].code == "length"
        assert nothing_is_held(nodes)
        assert nodes.decode.idle and nodes.prefill.idle


def test_many_requests_over_small_pools_all_answer_as_alone() -> None:
    with pair(decode_pages=20, prefill_pages=16, batch_max=6) as nodes:
        for request in range(20):
            nodes.ask(request, prompt(request, 10 + 7 * request), 30, scope=f"t{request % 3}")
        nodes.run()
        for request in range(20):
            assert nodes.texts[request] == answer(prompt(request, 10 + 7 * request), 30)
        assert nothing_is_held(nodes)


def test_only_pages_that_decode_lacks_are_sent() -> None:
    with pair() as nodes:
        text = prompt(1, 100)
        nodes.ask(1, text, 5)
        nodes.run()
        computed = nodes.prefill._runner.rows  # type: ignore[attr-defined]
        nodes.ask(2, text + prompt(2, 50), 5)
        nodes.run()
        assert nodes.texts[2] == answer(text + prompt(2, 50), 5)
        assert nodes.ends[2].cached_tokens == 96
        assert nodes.prefill._runner.rows - computed == 149 - 96  # type: ignore[attr-defined]
        # wholly cached: decode answers without prefill
        nodes.ask(3, text[:97], 5)
        nodes.run()
        assert nodes.ends[3].cached_tokens == 96
        assert nodes.texts[3] == answer(text[:97], 5)


def test_prefill_evicted_what_decode_kept_and_computes_it_again() -> None:
    with pair(prefill_pages=8) as nodes:
        text = prompt(1, 100)
        nodes.ask(1, text, 5)
        nodes.run()
        nodes.ask(2, prompt(9, 120), 5)  # fills prefill's pool
        nodes.run()
        nodes.ask(3, text + prompt(2, 20), 5)
        nodes.run()
        assert nodes.texts[3] == answer(text + prompt(2, 20), 5)


def test_another_tenant_gets_no_cached_page() -> None:
    with pair() as nodes:
        text = prompt(1, 100)
        for request, scope in enumerate(["a", "b"]):
            nodes.ask(request, text, 5, scope=scope)
            nodes.run()
            assert nodes.ends[request].cached_tokens == 0
            assert nodes.texts[request] == answer(text, 5)


@pytest.mark.parametrize("steps", range(12))
def test_an_abort_at_every_step_leaves_nothing_held(steps: int) -> None:
    with pair(chunk_tokens=16) as nodes:
        nodes.ask(1, prompt(1, 90), 10)
        nodes.ask(2, prompt(2, 90), 10)
        for _ in range(steps):
            nodes.step()
        nodes.decode.abort(Abort(1))
        nodes.run()
        assert nodes.ends[1].code in ("client_gone", "length")
        assert nodes.texts[2] == answer(prompt(2, 90), 10)
        assert nothing_is_held(nodes)


def test_an_aborted_requests_pages_wait_for_the_writer_and_not_for_a_clock() -> None:
    made: list[FaultyTransport] = []
    plan = FaultPlan(at={0: Fault.UNKNOWN})  # in doubt until the test releases it
    with pair(wrap=faulty(plan, made), decode_pages=16) as nodes:
        nodes.ask(1, prompt(1, 90), 10)
        nodes.run(lambda: 1 in nodes.ends)
        assert nodes.ends[1].code == "transfer_failed"
        for _ in range(200):
            nodes.now += 3600.0
            nodes.step()
        assert nodes.decode_pages.pool.counts()["quarantined"] == 6
        nodes.ask(2, prompt(2, 90), 10)  # lives beside it, in other pages
        nodes.run(lambda: 2 in nodes.ends)
        assert nodes.texts[2] == answer(prompt(2, 90), 10)
        made[0].release()
        nodes.run()
        assert nothing_is_held(nodes)


@pytest.mark.parametrize(
    ("fault", "code", "held"),
    [
        (Fault.FAIL, "transfer_failed", False),
        (Fault.SHORT, "ownership_violation", True),
        (Fault.LIE, "ownership_violation", True),
        (Fault.LATE, "ownership_violation", True),
        (Fault.FOREIGN, "ownership_violation", True),
        (Fault.MISDIRECTED, "ownership_violation", True),
        (Fault.UNKNOWN, "transfer_failed", True),
    ],
)
@pytest.mark.parametrize("isolation", ["strict", "standard"])
def test_a_faulty_transfer_fails_its_request_alone(
    fault: Fault, code: str, held: bool, isolation: str
) -> None:
    made: list[FaultyTransport] = []
    wrap = faulty(FaultPlan(at={1: fault}), made)
    with pair(wrap=wrap, isolation=isolation, chunk_tokens=1000) as nodes:
        for request in range(3):
            nodes.ask(request, prompt(request, 90), 10)
            nodes.run(lambda request=request: request in nodes.ends)  # type: ignore[misc]
        assert made[0].fired
        assert [nodes.ends[r].code for r in range(3)] == ["length", code, "length"]
        assert 1 not in nodes.texts
        for request in (0, 2):
            assert nodes.texts[request] == answer(prompt(request, 90), 10)
        # A writer that lied is not believed when it says that it has ended.
        quarantined = nodes.decode_pages.pool.counts()["quarantined"]
        assert (quarantined > 0) == held
        assert nodes.distrusted == (["p"] if code == "ownership_violation" else [])
        if code == "ownership_violation":
            assert nodes.decode.violations and all(e.request == 1 for e in nodes.decode.violations)
        nodes.decode.prefill_dead("p")
        assert nodes.decode_pages.pool.counts()["quarantined"] == 0


def test_a_late_write_finds_its_pages_still_in_quarantine() -> None:
    made: list[FaultyTransport] = []
    wrap = faulty(FaultPlan(at={0: Fault.LATE}), made)
    with pair(wrap=wrap, decode_pages=16, chunk_tokens=1000) as nodes:
        nodes.ask(1, prompt(1, 90), 10)
        nodes.run(lambda: 1 in nodes.ends)
        assert nodes.ends[1].code == "ownership_violation"
        for request in range(2, 6):
            nodes.ask(request, prompt(request, 90), 10, scope=f"t{request}")
            nodes.run(lambda request=request: request in nodes.ends)  # type: ignore[misc]
            made[0].release()
            assert nodes.texts[request] == answer(prompt(request, 90), 10)


def test_a_duplicate_that_lands_in_a_new_owners_pages_is_seen_by_the_step_check() -> None:
    made: list[FaultyTransport] = []
    wrap = faulty(FaultPlan(at={0: Fault.DUPLICATE}), made)
    with pair(wrap=wrap, decode_pages=8, isolation="strict", chunk_tokens=1000) as nodes:
        nodes.ask(1, prompt(1, 90), 5)
        nodes.run(lambda: 1 in nodes.ends)
        nodes.ask(2, prompt(2, 90), 30, scope="other")
        nodes.run(lambda: len(nodes.texts.get(2, [])) >= 3)
        headers = nodes.decode_pages.memory.words
        before = headers.copy()
        made[0].release()
        for _ in range(10_000):
            if (headers != before).any():
                break
            time.sleep(0.001)  # it lands in a thread of the transport
        nodes.run(lambda: 2 in nodes.ends)
        assert nodes.ends[2].code == "ownership_violation"
        assert nodes.texts[2] == answer(prompt(2, 90), 30)[: len(nodes.texts[2])]
        assert nodes.condemned == ["d"], "told once, so that the node is replaced"


@pytest.mark.parametrize("change", [{"token_count": 88}, {"page_count": 1}])
def test_a_complete_that_counts_wrong_is_not_committed(change: dict[str, int]) -> None:
    def tamper(message: Complete) -> Complete:
        fields = {"token_count": message.token_count, "page_count": message.page_count, **change}
        return Complete(message.lease, **fields)

    with pair(tamper=tamper) as nodes:
        nodes.ask(1, prompt(1, 90), 10)
        nodes.run(lambda: 1 in nodes.ends)
        assert nodes.ends[1].code == "ownership_violation"
        assert nodes.decode.violations[0].kind == "count"


def test_a_dead_writer_ends_its_requests_and_frees_their_pages() -> None:
    with pair(chunk_tokens=16) as nodes:
        nodes.ask(1, prompt(1, 200), 10)
        for _ in range(4):
            nodes.step()
        nodes.decode.prefill_dead("p")
        nodes.decode.step(0.0)
        ends = [event for event in nodes.decode.to_gateway() if hasattr(event, "code")]
        assert [end.code for end in ends] == ["node_lost"]
        assert nodes.decode_pages.pool.counts()["free"] == 64
        nodes.ask(2, prompt(2, 50), 10)
        nodes.decode.step(0.0)
        assert [e.code for e in nodes.decode.to_gateway() if hasattr(e, "code")] == ["node_lost"]


def test_a_dead_decode_node_is_written_to_no_more() -> None:
    with pair(chunk_tokens=16) as nodes:
        nodes.ask(1, prompt(1, 200), 10)
        for _ in range(4):
            nodes.step()
        nodes.prefill.peer_dead("d")
        for _ in range(10_000):
            nodes.prefill.step(0.0)
            if nodes.prefill.idle:
                break
            time.sleep(0.001)  # its writes land in a thread of the transport
        assert nodes.prefill.idle
        counts = nodes.prefill_pages.pool.counts()
        assert counts["leased"] == counts["quarantined"] == 0


def test_overdue_requests_end_whatever_holds_them_up() -> None:
    with pair(decode_pages=4) as nodes:
        nodes.ask(1, prompt(1, 50), 14)
        nodes.ask(2, prompt(2, 50), 14)
        nodes.step()
        nodes.now = 61.0
        nodes.run()
        assert nodes.texts[1] == answer(prompt(1, 50), 14)
        assert nodes.ends[2].code == "capacity_exceeded"


def test_offers_that_get_no_pages_are_refused_in_time_and_nothing_was_touched() -> None:
    with pair(prefill_pages=8) as nodes:
        pages = nodes.prefill_pages
        assert pages.reserve(99, "t", pages.text("t", prompt(9, 100)), remote=False) is not None
        nodes.ask(1, prompt(1, 90), 5)
        nodes.step()
        nodes.now = 61.0
        nodes.run(lambda: 1 in nodes.ends)
        assert nodes.ends[1].code == "capacity_exceeded"
        assert nodes.decode_pages.pool.counts()["free"] == 64
        assert nodes.prefill.idle


def test_a_prefill_node_that_never_answers_is_not_waited_for_for_ever() -> None:
    with pair() as nodes:
        nodes.ask(1, prompt(1, 90), 5)
        nodes.decode.step(0.0)
        nodes.decode.step(601.0)
        (end,) = nodes.decode.to_gateway()
        assert getattr(end, "code", "") == "capacity_exceeded"
        # The request has ended; its pages wait for the writer.
        assert nodes.decode_pages.pool.counts()["quarantined"] == 6


def test_a_prompt_that_no_gateway_lets_through_ends_its_request_and_not_the_node() -> None:
    with pair() as nodes:
        for request, tokens in enumerate([[], [97], [-1, 5]]):
            nodes.ask(request, tokens, 5)
        nodes.run()
        assert [end.code for end in nodes.ends.values()] == ["internal_error"] * 3


def offer(**change: Any) -> Offer:
    """An offer that fits, but for ``change``."""
    from sekisho.core.page import chain, chain_root

    tokens = change.pop("tokens", prompt(1, 40))
    digest = chain(chain_root("t", LAYOUT.model), tokens, 16)[-1]
    fields: dict[str, Any] = {
        "lease": Lease(11, 1),
        "request": 1,
        "scope": "t",
        "tokens": tokens,
        "token_digest": digest,
        "first_ordinal": 0,
        "pages": [0, 1, 2],
        "layout": LAYOUT.fingerprint,
    }
    return Offer(**{**fields, **change})


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokens": prompt(1, 2000), "pages": list(range(125))}, "context_length_exceeded"),
        ({"layout": 1}, "ownership_violation"),
        ({"pages": [0, 1]}, "ownership_violation"),
        ({"pages": [], "first_ordinal": 3}, "ownership_violation"),
        ({"token_digest": bytes(16)}, "ownership_violation"),
        ({"scope": "u"}, "ownership_violation"),
    ],
)
def test_prefill_refuses_and_touches_nothing(change: dict[str, Any], code: str) -> None:
    with pair() as nodes:
        nodes.prefill.receive("d", offer(**change), 0.0)
        ((peer, message),) = nodes.prefill.outbox
        assert peer == "d" and isinstance(message, Reject) and message.code == code
        assert nodes.prefill.idle
        assert nodes.prefill_pages.pool.counts()["free"] == 64


def test_prefill_refuses_strangers_other_layouts_and_a_full_queue() -> None:
    with pair(queue_max=1) as nodes:
        nodes.prefill.receive("stranger", offer(), 0.0)
        nodes.prefill.receive("other", Join(nodes.target.endpoint(), 1), 0.0)
        nodes.prefill.receive("other", offer(), 0.0)
        nodes.prefill.receive("gone", Join("{}", LAYOUT.fingerprint), 0.0)
        nodes.prefill.receive("gone", offer(), 0.0)
        nodes.prefill.receive("d", offer(), 0.0)
        nodes.prefill.receive("d", offer(lease=Lease(11, 2)), 0.0)
        codes = [(p, m.code) for p, m in nodes.prefill.outbox if isinstance(m, Reject)]
        assert codes == [
            ("stranger", "transfer_failed"),
            ("other", "transfer_failed"),
            ("gone", "transfer_failed"),
            ("d", "queue_full"),
        ]


def test_a_repeated_offer_is_an_error_and_changes_nothing() -> None:
    with pair() as nodes:
        nodes.prefill.receive("d", offer(), 0.0)
        with pytest.raises(RemoteOwnershipError, match="offered twice"):
            nodes.prefill.receive("d", offer(), 0.0)
        assert nodes.prefill.counts()["waiting"] == 1


def test_an_offer_that_comes_again_after_its_end_is_not_written_again() -> None:
    """By then its pages are somebody else's (sglang#26486, vllm PR#49796)."""
    with pair() as nodes:
        nodes.ask(1, prompt(1, 90), 1)
        nodes.decode.step(0.0)
        [(_, first)] = nodes.decode.to_prefill
        nodes.run()
        assert nodes.ends[1].code == "length" and nodes.prefill.idle
        with pytest.raises(RemoteOwnershipError, match="offered twice"):
            nodes.prefill.receive("d", first, 0.0)
        assert nodes.prefill.idle


def test_decode_ignores_words_about_leases_it_did_not_offer_to_that_node() -> None:
    with pair(chunk_tokens=16) as nodes:
        nodes.ask(1, prompt(1, 90), 10)
        nodes.decode.step(0.0)
        ((_, message),) = nodes.decode.to_prefill
        for peer, lease in (("q", message.lease), ("p", Lease(11, 99))):
            with pytest.raises(RemoteOwnershipError, match="no open offer"):
                nodes.decode.answer(peer, Drained(lease))
        nodes.run()
        assert nodes.texts[1] == answer(prompt(1, 90), 10)


def test_a_source_page_that_changed_hands_is_not_sent() -> None:
    with pair(chunk_tokens=32) as nodes:
        nodes.ask(1, prompt(1, 90), 10)
        nodes.decode.step(0.0)
        nodes.prefill.receive("d", nodes.decode.to_prefill.pop()[1], 0.0)
        nodes.prefill.step(0.0)
        nodes.prefill_pages.memory.words[0, 1] = 5
        nodes.run(lambda: 1 in nodes.ends)
        assert nodes.ends[1].code == "transfer_failed"
        assert nodes.prefill.violations[0].kind == "foreign"
        assert nodes.prefill_pages.pool.counts()["quarantined"] == 1
        nodes.ask(2, prompt(2, 40), 5)
        nodes.run(lambda: 2 in nodes.ends)
        assert nodes.condemned == ["p"], "told once, so that the node is replaced"
