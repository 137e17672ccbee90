"""The scheduler over the stand-in model: the answer is a function of the slots that were read."""

import numpy as np
import pytest
from numpy.typing import NDArray

from node_kit import page_manager, prompt, scheduler, sequence
from sekisho.core.outcome import Outcome
from sekisho.engine.batch import Batch
from sekisho.engine.output import Delta, Ended
from sekisho.engine.pages import Text
from sekisho.engine.scheduler import Scheduler
from sekisho.engine.sequence import Sequence
from stand_in import answer


def run(engine: Scheduler) -> tuple[dict[int, list[int]], dict[int, Ended]]:
    """Step until idle; tokens and ends by request."""
    texts: dict[int, list[int]] = {}
    ends: dict[int, Ended] = {}
    for _ in range(10_000):
        if engine.idle:
            break
        engine.step(0.0)
        engine._pages.pool.check_integrity()
        for output in engine.outputs:
            if isinstance(output, Delta):
                assert output.index == len(texts.get(output.request, []))
                texts.setdefault(output.request, []).extend(output.tokens)
            else:
                assert output.request not in ends
                ends[output.request] = output
        engine.outputs.clear()
    assert engine.idle, "requests are left although nothing moves"
    return texts, ends


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("isolation", ["strict", "standard", "off"])
def test_answers_do_not_depend_on_where_pages_begin(length: int, isolation: str) -> None:
    engine = scheduler(page_manager(16, isolation))
    engine.add(sequence(1, prompt(1, length), 40))
    texts, ends = run(engine)
    assert texts[1] == answer(prompt(1, length), 40)
    assert (ends[1].code, ends[1].output_tokens) == ("length", 40)


def test_a_full_pool_preempts_and_every_answer_stays_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = scheduler(page_manager(12), batch_max=6)
    for request in range(10):
        engine.add(sequence(request, prompt(request, 20 + 3 * request), 60, scope=f"t{request}"))
    preempted: list[int] = []
    original = engine._preempt

    def counted(victim: Sequence) -> None:
        preempted.append(victim.request)
        original(victim)

    monkeypatch.setattr(engine, "_preempt", counted)
    texts, ends = run(engine)
    assert preempted
    for request in range(10):
        assert texts[request] == answer(prompt(request, 20 + 3 * request), 60)
        assert ends[request].code == "length"


def test_a_request_as_long_as_the_whole_pool_is_served_and_one_token_more_is_refused() -> None:
    pages = page_manager(4)
    engine = scheduler(pages)
    engine.add(sequence(1, prompt(1, 50), 14))
    engine.add(sequence(2, prompt(2, 50), 15))
    assert [(o.request, o.code) for o in engine.outputs if isinstance(o, Ended)] == [
        (2, "context_length_exceeded")
    ]
    (refused,) = engine.outputs
    assert isinstance(refused, Ended)
    assert "65" in refused.message and "64" in refused.message
    texts, _ = run(engine)
    assert texts[1] == answer(prompt(1, 50), 14)


def test_a_full_queue_refuses() -> None:
    engine = scheduler(page_manager(8), queue_max=2)
    for request in range(3):
        engine.add(sequence(request, prompt(request, 20), 2))
    (end,) = engine.outputs
    assert isinstance(end, Ended) and (end.request, end.code) == (2, "queue_full")


def test_prefix_is_reused_within_a_scope_and_never_across() -> None:
    pages = page_manager(32)
    engine = scheduler(pages)
    text = prompt(5, 40)
    cached = []
    for request, scope in enumerate(["a", "a", "b", "b"]):
        engine.add(sequence(request, text, 3, scope=scope))
        texts, ends = run(engine)
        assert texts[request] == answer(text, 3)
        cached.append(ends[request].cached_tokens)
    assert cached == [0, 32, 0, 32]


def test_strict_reuses_nothing_and_scrubs_what_is_free() -> None:
    pages = page_manager(32, "strict")
    engine = scheduler(pages)
    for request in range(2):
        engine.add(sequence(request, prompt(5, 40), 3))
        _, ends = run(engine)
        assert ends[request].cached_tokens == 0
    assert pages.pool.counts()["free"] == 32
    assert not any(pages.memory.payload(page).any() for page in range(32))


def test_standard_leaves_payloads_and_still_nobody_reads_them() -> None:
    pages = page_manager(4)
    engine = scheduler(pages)
    engine.add(sequence(1, prompt(1, 40), 10))
    run(engine)
    assert any(pages.memory.payload(page).any() for page in range(4))
    engine.add(sequence(2, prompt(2, 40), 10, scope="other"))
    texts, _ = run(engine)
    assert texts[2] == answer(prompt(2, 40), 10)


def test_eviction_makes_room_and_keeps_what_is_referenced() -> None:
    pages = page_manager(6)
    engine = scheduler(pages)
    for request in range(12):
        engine.add(sequence(request, prompt(request % 3, 40), 8))
        texts, _ = run(engine)
        assert texts[request] == answer(prompt(request % 3, 40), 8)


@pytest.mark.parametrize("isolation", ["strict", "standard"])
def test_a_foreign_write_during_the_pass_drops_the_step_of_that_request_alone(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = page_manager(16, isolation)
    engine = scheduler(pages)
    engine.add(sequence(1, prompt(1, 20), 30))
    engine.add(sequence(2, prompt(2, 20), 30))
    while not engine.outputs:
        engine.step(0.0)
    victim = engine.get(1)
    assert victim is not None and victim.table is not None
    page = int(victim.table.pages[0])
    forward, done = engine._runner.forward, victim.output_count

    def foreign(batch: Batch) -> NDArray[np.float32]:
        logits = forward(batch)
        pages.memory.words[page, 1] = 999  # another incarnation's header lands after the pass
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", foreign)
        engine.step(0.0)
    texts, ends = run(engine)
    assert ends[1].code == "ownership_violation" and "foreign" in ends[1].message
    assert len(texts[1]) == done
    assert texts[2] == answer(prompt(2, 20), 30)
    assert [(e.kind, e.request, e.page) for e in engine.violations] == [("foreign", 1, page)]
    # Whoever wrote there is unknown and may do so again: the page is out of service.
    assert pages.pool.counts()["quarantined"] == 1
    assert pages.pool.pins_of(page) == 1


@pytest.mark.parametrize("later", [False, True], ids=["in the batch", "preempted meanwhile"])
def test_a_row_that_points_at_anothers_page_fails_both_before_a_token_leaves(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row's new slot is written into the neighbour's page, whose header does not show it
    (GHSA-fpch-3xrf-7q96, TRT-LLM PR#13278)."""
    pages = page_manager(16)
    engine = scheduler(pages)
    for request, length in ((1, 18), (2, 30), (3, 20)):
        engine.add(sequence(request, prompt(request, length), 20))
    while len(engine.outputs) < 3:
        engine.step(0.0)
    neighbour = engine.get(2)
    assert neighbour is not None and neighbour.table is not None
    forward, page = engine._runner.forward, int(neighbour.table.pages[-1])

    def aliased(batch: Batch) -> NDArray[np.float32]:
        batch.tables[0, batch.positions[0] // 16] = page
        return forward(batch)

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", aliased)
        if later:
            engine._running.remove(neighbour)
        engine.step(0.0)
        if later:
            engine._running.append(neighbour)
    texts, ends = run(engine)
    for request, length in ((1, 18), (2, 30)):
        assert ends[request].code == "ownership_violation"
        assert texts[request] == answer(prompt(request, length), 20)[: len(texts[request])]
    assert texts[3] == answer(prompt(3, 20), 20)
    assert {(e.kind, e.request) for e in engine.violations} == {("foreign", 1), ("reached", 2)}


def test_without_the_checks_the_same_write_would_go_unnoticed() -> None:
    pages = page_manager(16, "off")
    engine = scheduler(pages)
    engine.add(sequence(1, prompt(1, 20), 5))
    engine.step(0.0)
    sequence_1 = engine.get(1)
    assert sequence_1 is not None and sequence_1.table is not None
    pages.memory.words[int(sequence_1.table.pages[0]), 1] = 999
    pages.memory.payload(int(sequence_1.table.pages[0]))[:] = 7
    texts, ends = run(engine)
    assert ends[1].code == "length" and texts[1] != answer(prompt(1, 20), 5)


def test_a_corrupt_cached_page_fails_its_readers_and_is_offered_no_more() -> None:
    pages = page_manager(16)
    engine = scheduler(pages)
    text = prompt(3, 40)
    engine.add(sequence(1, text, 2))
    run(engine)
    pages.memory.words[0, 2] += 1
    engine.add(sequence(2, text, 2))
    _, ends = run(engine)
    assert ends[2].code == "ownership_violation"
    engine.add(sequence(3, text, 2))
    texts, ends = run(engine)
    assert ends[3].code == "length" and texts[3] == answer(text, 2)


def test_a_client_that_leaves_in_any_phase_gives_all_pages_back() -> None:
    for steps in range(8):
        pages = page_manager(16)
        engine = scheduler(pages, batch_max=1, chunk_tokens=16)
        engine.add(sequence(1, prompt(1, 60), 8))
        engine.add(sequence(2, prompt(2, 60), 8))
        for _ in range(steps):
            engine.step(0.0)
        for request in (1, 2):
            leaving = engine.get(request)
            if leaving is not None:
                engine.finish(leaving, Outcome("client_gone"))
        assert engine.idle
        counts = pages.pool.counts()
        assert counts["leased"] == counts["quarantined"] == 0
        pages.pool.check_integrity()


def test_the_first_outcome_counts() -> None:
    engine = scheduler(page_manager(16))
    one = sequence(1, prompt(1, 20), 5)
    engine.add(one)
    engine.finish(one, Outcome("client_gone"))
    engine.finish(one, Outcome("stop"))
    assert [o.code for o in engine.outputs if isinstance(o, Ended)] == ["client_gone"]


def test_impossible_logits_end_the_request_and_not_the_node() -> None:
    engine = scheduler(page_manager(16))
    engine.add(sequence(1, prompt(1, 20), 5, logit_bias={10_000: 1.0}))
    engine.add(sequence(2, prompt(2, 20), 5))
    texts, ends = run(engine)
    assert ends[1].code == "internal_error"
    assert texts[2] == answer(prompt(2, 20), 5)


def test_stop_token_stop_string_and_length() -> None:
    text = prompt(8, 20)
    expected = answer(text, 20)
    engine = scheduler(page_manager(16))
    engine.add(sequence(1, text, 20, stop_token_ids=(expected[4],)))
    engine.add(sequence(2, text, 20, stop=(f"<{expected[5]}><{expected[6]}>",), scope="u"))
    outputs: list[str] = []
    while not engine.idle:
        engine.step(0.0)
        outputs += [o.text for o in engine.outputs if isinstance(o, Delta) and o.request == 2]
        ends = [o for o in engine.outputs if isinstance(o, Ended)]
        for end in ends:
            assert end.code == "stop"
            assert end.output_tokens <= 7
        engine.outputs.clear()
    first = expected.index(expected[5])  # the pair may begin earlier only if both stand there
    assert "".join(outputs).startswith("".join(f"<{t}>" for t in expected[:first]))
    assert f"<{expected[6]}>" not in "".join(outputs[6:])


def test_logprobs_come_with_every_token() -> None:
    engine = scheduler(page_manager(16))
    engine.add(sequence(1, prompt(1, 20), 3, logprobs=2))
    deltas = []
    while not engine.idle:
        engine.step(0.0)
        deltas += [o for o in engine.outputs if isinstance(o, Delta)]
        engine.outputs.clear()
    for delta in deltas:
        (info,) = delta.infos
        assert info.chosen.token == delta.tokens[0]
        assert info.chosen.piece == f"<{delta.tokens[0]}>".encode()
        assert len(info.top) == 2 and info.top[0] == info.chosen


def test_a_prompt_that_waits_for_pages_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = page_manager(4)
    engine = scheduler(pages)
    hashed: list[int] = []
    text = pages.text

    def counted(scope: str, tokens: list[int]) -> Text:
        hashed.append(len(tokens))
        return text(scope, tokens)

    monkeypatch.setattr(pages, "text", counted)
    engine.add(sequence(1, prompt(1, 50), 14))
    engine.add(sequence(2, prompt(2, 40), 14))
    texts, _ = run(engine)
    assert texts[2] == answer(prompt(2, 40), 14)
    assert hashed == [49, 39]
