"""Each check of the vLLM guard, alone: the fault it is for is caught by it, and goes through
without it. One guarded pair; checks are taken out by `stand_ins/engine_faults_vllm.py`."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from faulty_vllm import BLOCK, FaultyPair, Outcome, ask, ask_decode, ask_now, body
from vllm_prompts import OTHER, STORY, tokens

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
_PATIENCE = 3000  # tenths of a second; decode gives up after 15 s


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyPair]:
    folder = tmp_path_factory.mktemp("checks")
    more: dict[str, Any] = {"prefill_tokens": 4096, "decode_tokens": 1024, "context": 1024}
    more |= {"abort_s": 60, "give_up_s": 15}
    with FaultyPair(guard=True, folder=folder, **more) as pair:
        yield pair


@pytest.fixture(autouse=True)
def _switched_off(pair: FaultyPair) -> Iterator[None]:
    pair.switch()
    yield
    pair.switch()


def _one(pair: FaultyPair, asked: Any, prefilled: Any = None, **more: Any) -> Outcome:
    return asyncio.run(ask(pair, asked, prefilled, **more))


def _kinds(pair: FaultyPair, since: int) -> list[tuple[str, str]]:
    """Kind and place of what decode's guard wrote since then."""
    found = pair.evidence(pair.decode)[since:]
    return [(one["pages"][0]["kind"], one["at"]) for one in found]


def test_another_prompt_is_refused_at_admission_and_else_on_arrival(pair: FaultyPair) -> None:
    asked, other = tokens(STORY, 8 * BLOCK), tokens(OTHER, 8 * BLOCK)
    right = _one(pair, body(asked, salt="a0")).text
    before = len(pair.evidence(pair.decode))
    found = _one(pair, body(asked, salt="a1"), body(other, salt="a1"))
    assert found.status == 500
    assert not _kinds(pair, before), "it was not refused before its transfer"
    pair.switch(off=["admission"])
    found = _one(pair, body(asked, salt="a2"), body(other, salt="a2"))
    assert found.status == 500
    assert _kinds(pair, before) == [("wrong_text", "arrival")]
    pair.switch(off=["admission", "arrival"])
    found = _one(pair, body(asked, salt="a3"), body(other, salt="a3"))
    assert found.status == 200
    assert found.text != right


def test_one_block_written_of_many_is_found_on_arrival(pair: FaultyPair) -> None:
    asked = tokens(STORY, 8 * BLOCK)
    before = len(pair.evidence(pair.decode))
    pair.switch({"one_block": {}})
    assert _one(pair, body(asked, salt="b1")).status == 500
    assert _kinds(pair, before) == [("unwritten", "arrival")]
    pair.switch({"one_block": {}}, off=["arrival"])
    assert _one(pair, body(asked, salt="b2")).status == 200


def test_blocks_of_another_request_are_found_on_arrival(pair: FaultyPair) -> None:
    asked, other = tokens(STORY, 4 * BLOCK + 5), tokens(OTHER, 5 * BLOCK + 7)
    before = len(pair.evidence(pair.decode))
    pair.switch({"alien": {"length": len(other)}})
    assert _one(pair, body(other, salt="tenant-b")).status == 200
    assert _one(pair, body(asked, salt="tenant-a")).status == 500
    assert pair.traced("alien")
    [(kind, at)] = _kinds(pair, before)
    assert (kind, at) in {("wrong_text", "arrival"), ("short", "arrival")}


def test_a_row_that_leads_to_a_neighbour_fails_alone(pair: FaultyPair) -> None:
    victim = tokens(STORY, 4 * BLOCK) + tokens(OTHER, BLOCK + 3)
    other = tokens(STORY, 6 * BLOCK + 5)
    alone = [ask_now(pair, body(t, 96, salt="c0"))[0].text for t in (victim, other)]
    fault = {"row": {"victim": len(victim), "other": len(other), "page": 4}}
    before = len(pair.evidence(pair.decode))
    pair.switch(fault)
    found = ask_now(pair, body(victim, 96, salt="c1"), body(other, 96, salt="c2"))
    assert found[0].status == 500
    assert (found[1].status, found[1].text) == (200, alone[1])
    assert _kinds(pair, before) == [("row", "step")]
    pair.switch(fault, off=["rows"])
    found = ask_now(pair, body(victim, 96, salt="c3"), body(other, 96, salt="c4"))
    assert found[0].status == 200
    assert found[0].text != alone[0], "the neighbour's block was attended to, and told nothing"


def test_a_prefix_of_another_salt_is_found_before_it_is_used(pair: FaultyPair) -> None:
    """On prefill, whose cache ignores the salt for as long as the fault is in."""
    asked = tokens(OTHER, 7 * BLOCK + 9)
    pair.switch({"scopeless": {"role": "prefill"}})
    assert _one(pair, body(asked, salt="tenant-a")).status == 200
    before = len(pair.evidence(pair.prefill))
    assert _one(pair, body(asked, salt="tenant-b")).status == 500
    found = pair.evidence(pair.prefill)[before:]
    assert {one["pages"][0]["kind"] for one in found} <= {"prefix", "shared"}
    assert found
    # What was distrusted is in the cache no more: somebody has to fill it again.
    assert _one(pair, body(asked, salt="tenant-a2")).status == 200
    pair.switch({"scopeless": {"role": "prefill"}}, off=["prefix"])
    assert _one(pair, body(asked, salt="tenant-c")).status == 500, "arrival does not trust it"
    pair.switch({"scopeless": {"role": "prefill"}}, off=["prefix", "arrival"])
    assert _one(pair, body(asked, salt="tenant-d")).status == 200


def test_manifests_are_needed_genuine_and_used_once(pair: FaultyPair) -> None:
    asked = body(tokens(STORY, 3 * BLOCK), salt="d")
    for change in (
        {"sekisho_manifest": None},
        {"sekisho_manifest": {"tokens": 96}},
        {"transfer_id": "another"},
        {"remote_engine_id": "another"},
        {"remote_bootstrap_addr": None},
    ):
        found = _one(pair, asked, change=change)
        assert found.status == 500, (change, found)
        assert found.seconds < 30, change
    assert _one(pair, asked).status == 200


def _late(pair: FaultyPair, salt: str) -> tuple[list[int], list[int], Outcome, Outcome]:
    """A transfer stalls beyond decode's patience; another tenant's request then fills what the
    pool has, and is still running when it lands: blocks of both, and what both clients saw."""
    asked, filler = tokens(STORY, 8 * BLOCK), tokens(OTHER, 13 * BLOCK + 1)
    seen: dict[str, Outcome] = {}
    marks = [len(pair.traced(event)) for event in ("handed", "landed", "stalled")]

    def client(name: str, request: dict[str, Any]) -> threading.Thread:
        def ask() -> None:
            seen[name] = _one(pair, request, timeout_s=400)

        thread = threading.Thread(target=ask)
        thread.start()
        return thread

    def wait_for(event: str, count: int) -> None:
        for _ in range(_PATIENCE):
            if len(pair.traced(event)) >= count:
                return
            time.sleep(0.1)
        raise AssertionError(f"there was no {event!r}")

    pair.switch({"late": {"seconds": 600}}, off=pair.off)
    first = client("first", body(asked, salt=f"{salt} late"))
    wait_for("stalled", marks[2] + 1)
    pair.switch({"held": {"until": "switched"}}, off=pair.off)
    first.join()
    second = client("second", body(filler, 300, salt=f"{salt} other"))
    wait_for("landed", marks[1] + 1)  # its own transfer; from here on it runs
    time.sleep(2)
    pair.switch(off=pair.off)
    wait_for("landed", marks[1] + 2)
    assert second.is_alive(), "the write came too late to show anything"
    second.join()
    landed = pair.traced("landed")[marks[1] :]
    handed = [
        one
        for one in pair.traced("handed")[marks[0] :]
        if one["role"] == "decode" and one["at"] < landed[-1]["at"]
    ]
    late = [b for one in handed if one["tokens"] == len(asked) for b in one["blocks"]]
    reused = [b for one in handed if one["tokens"] == len(filler) for b in one["blocks"]]
    return late, reused, seen["first"], seen["second"]


def test_a_late_write_lands_in_blocks_that_nobody_was_given(pair: FaultyPair) -> None:
    """The pool hands out what was freed last first: without the quarantine that is these."""
    expected = _one(pair, body(tokens(OTHER, 13 * BLOCK + 1), 300, salt="e"), timeout_s=200).text
    late, reused, first, second = _late(pair, "e1")
    print(f"\nguarded: late write into {late}, given to another meanwhile: {reused}")
    assert first.status == 500
    assert late
    assert not set(late) & set(reused)
    assert (second.status, second.text) == (200, expected)
    pair.off = ["quarantine"]
    late, reused, first, second = _late(pair, "e2")
    print(f"no quarantine: late write into {late}, given to another meanwhile: {reused}")
    assert first.status == 500
    assert set(late) & set(reused), "the test does not show what it claims"
    assert second.status == 500, "headers tell of the write even so"
    pair.off = ["quarantine", "release"]
    late, reused, _, second = _late(pair, "e3")
    assert set(late) & set(reused)
    # A text that repeats itself may survive the write, so that it is not looked at.
    assert second.status == 200, "it was the headers that told"


def _quarantined(pair: FaultyPair) -> float:
    """As decode's own /metrics say; they are written at a step."""
    assert _alone(pair).status == 200
    name, lines = "sekisho_guard_quarantined_blocks{", pair.decode.get("/metrics").decode()
    return float(next(x for x in lines.splitlines() if x.startswith(name)).rpartition(" ")[2])


def _alone(pair: FaultyPair) -> Outcome:
    """Decode computes a prompt by itself, which needs no prefill."""
    return asyncio.run(ask_decode(pair, body(tokens(STORY, 40), 2, salt="alone")))


def test_prefill_that_is_killed_in_a_transfer_holds_nothing_for_ever(pair: FaultyPair) -> None:
    """The last test of this pair: its prefill does not come back."""
    seen: list[Outcome] = []
    asked = body(tokens(STORY, 8 * BLOCK), salt="killed")
    stalled = len(pair.traced("stalled"))
    pair.switch({"late": {"seconds": 60}})
    client = threading.Thread(target=lambda: seen.append(_one(pair, asked)))
    client.start()
    while len(pair.traced("stalled")) == stalled:
        time.sleep(0.1)
    pair.prefill.kill()
    client.join()
    assert seen[0].status == 500
    for _ in range(60):
        if _quarantined(pair) == 0:
            break
        time.sleep(0.5)
    assert _quarantined(pair) == 0
