"""The stand-in model of the simulator: an answer is a function of all that is read."""

import numpy as np
import pytest

from sekisho.engine.batch import Batch
from sekisho.sim.model import LAYOUT, PAGE_SIZE, VOCABULARY, SimRunner, Writer, answer, states
from sekisho.sim.process import new_memory

PAGES = 8
ME = Writer(7, 1, 0)


class Bench:
    """One runner over one region, and what it reported."""

    def __init__(self, owner: Writer = ME) -> None:
        self.memory = new_memory("m", PAGES)
        self.wrong: list[tuple[int, list[int]]] = []
        self.runner = SimRunner(
            self.memory.region,
            PAGES,
            writer_of=lambda page: owner,
            tamper=lambda batch: None,
            wrong=lambda request, pages: self.wrong.append((request, pages)),
            landing=lambda: None,
        )

    def run(self, tokens: list[int], start: int, wanted: bool) -> int | None:
        """One sequence over pages 0, 1, …; the token it answers."""
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        logits = self.runner.forward(
            Batch(
                tokens=np.array(tokens, np.int32),
                positions=positions,
                sequence_starts=np.array([0, len(tokens)], np.int32),
                tables=np.arange(PAGES, dtype=np.int32)[None],
                logit_rows=np.array([len(tokens) - 1] if wanted else [], np.int32),
            )
        )
        return int(logits[0].argmax()) if wanted else None


def test_the_closed_form_is_the_recurrence() -> None:
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 100).astype(np.uint32)
    expected, state = [], 12345
    for token in tokens.tolist():
        state = (state * 2891336453 + token + 1) % 2**32
        expected.append(state)
    assert states(12345, tokens).tolist() == expected


@pytest.mark.parametrize("cut", [1, 7, 16, 17, 40, 59])
def test_an_answer_does_not_depend_on_how_the_prompt_was_cut(cut: int) -> None:
    prompt = np.random.default_rng(2).integers(0, VOCABULARY, 60).tolist()
    bench = Bench()
    bench.run(prompt[:cut], 0, wanted=False)
    assert bench.run(prompt[cut:], cut, wanted=True) == answer(prompt, 1)[0]
    assert bench.wrong == []


def test_one_wrong_slot_changes_the_answer_and_is_reported() -> None:
    prompt = np.random.default_rng(3).integers(0, VOCABULARY, 40).tolist()
    for slot in range(39):
        bench = Bench()
        bench.run(prompt[:-1], 0, wanted=False)
        page, at = divmod(slot, PAGE_SIZE)
        bench.memory.slots[page, at] = (prompt[slot] + 1) % VOCABULARY, 99, 8, 1
        bench.run(prompt[-1:], 39, wanted=True)
        assert bench.wrong == [(7, [page])]


def test_what_is_computed_from_anothers_slots_is_anothers_too() -> None:
    bench = Bench()
    bench.run([1, 2, 3], 0, wanted=False)
    bench.memory.slots[0, 1, 2] = 8
    bench.run([4], 3, wanted=False)
    assert bench.memory.slots[0, 3, 2] not in (7, 8)


def test_a_cached_beginning_may_be_the_tenants_but_not_anothers() -> None:
    for tenant, wrong in ((1, []), (2, [(9, [0])])):
        bench = Bench(Writer(9, 1, shared=1))
        bench.memory.slots[0] = 0, 0, 3, tenant
        bench.run([5], PAGE_SIZE, wanted=False)
        assert bench.wrong == wrong


def test_a_page_holds_its_slots_exactly() -> None:
    assert LAYOUT.payload_bytes == PAGE_SIZE * 16
