"""Secrets of the probe: how much entropy they have, and when an answer holds one."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sekisho.probe.canary import BITS_MIN, PATTERNS, QUESTIONS, Canary, Mint
from sekisho.probe.match import (
    RUN_BITS_MIN,
    normalise,
    p_value,
    rare_fraction,
    run,
    similarity,
    words,
)

KINDS = st.sampled_from(sorted(PATTERNS))
TEXTS = st.text(max_size=300)


def draws(data: st.DataObject, asked: list[int]) -> Mint:
    """A mint whose randomness hypothesis chooses; ``asked`` collects the bounds."""

    def below(bound: int) -> int:
        asked.append(bound)
        return data.draw(st.integers(0, bound - 1))

    return Mint(0, below)


@given(KINDS, st.data())
def test_the_stated_entropy_is_that_of_the_draws(kind: str, data: st.DataObject) -> None:
    asked: list[int] = []
    canary = draws(data, asked).canary(kind)
    assert canary.bits == pytest.approx(math.log2(math.prod(asked)))
    assert canary.bits >= BITS_MIN
    assert len(canary.symbol_bits) == len(canary.normal)


@given(KINDS, st.integers(0, 2**80), st.integers(0, 2**80))
def test_other_draws_give_another_secret_in_normal_form(kind: str, one: int, two: int) -> None:
    """Injective also after normalising, so that no entropy is lost there."""
    drawn: list[tuple[list[int], str]] = []
    for number in (one, two):
        left = number
        digits: list[int] = []

        def below(bound: int, digits: list[int] = digits) -> int:
            nonlocal left
            left, digit = divmod(left, bound)
            digits.append(digit)
            return digit

        drawn.append((digits, Mint(0, below).canary(kind).normal))
    assert (drawn[0][0] == drawn[1][0]) == (drawn[0][1] == drawn[1][1])


@given(KINDS)
def test_what_is_normal_of_a_canary_is_what_an_answer_becomes(kind: str) -> None:
    canary = Mint(1).canary(kind)
    assert normalise(canary.text)[0] == canary.normal


def test_one_seed_gives_one_layout_and_never_the_same_secrets() -> None:
    one, two = (Mint(7).document(200) for _ in range(2))
    assert [c.kind for c in one.canaries] == [c.kind for c in two.canaries]
    assert [c.place for c in one.canaries] == [c.place for c in two.canaries]
    assert not {c.text for c in one.canaries} & {c.text for c in two.canaries}
    assert not one.names & two.names


def test_a_mint_never_draws_a_secret_twice() -> None:
    # Its randomness is made to repeat itself: the second draw equals the first, symbol for symbol.
    first = [3] * 15
    numbers = iter(first + first + [4] * 15)
    mint = Mint(0, lambda bound: next(numbers) % bound)
    one, two = mint.canary("access code"), mint.canary("access code")
    assert one.text != two.text
    assert (one.serial, two.serial) == (1, 2)


@given(st.integers(0, 400), st.integers(1, 5))
def test_a_document_repeats_every_secret_and_a_question_holds_none(
    count: int, secrets: int
) -> None:
    document = Mint(count).document(count, secrets)
    assert len(document.text.split()) >= count
    assert len(document.canaries) == secrets
    assert any(document.text.endswith(canary.sentence()) for canary in document.canaries)
    for canary in document.canaries:
        assert canary.text in document.text
        asked = [canary.question(), *QUESTIONS.values()]
        assert all(run(canary, question) is None for question in asked)


def test_no_stretch_of_a_long_document_is_without_a_secret() -> None:
    document = Mint(3).document(2000)
    pieces = document.text.split("\n")
    for index in range(1, len(pieces) - 3):
        stretch = "\n".join(pieces[index : index + 3])
        assert any(canary.text in stretch for canary in document.canaries)


@given(st.integers(1, 300))
def test_filler_has_exactly_so_many_words_and_no_invented_name(count: int) -> None:
    mint = Mint(5)
    names = mint.document(50).names
    text = mint.filler(count)
    assert len(text.split()) == count
    assert rare_fraction(names, text) == 0


@given(KINDS, TEXTS, TEXTS, st.sampled_from([str, str.lower, str.upper, str.title]))
def test_a_whole_secret_is_found_wherever_it_stands(
    kind: str, before: str, after: str, change: object
) -> None:
    canary = Mint(2).canary(kind)
    shown = canary.text.replace("-", " \N{EN DASH} ").replace(" ", "\n")
    shown = change(shown) if callable(change) else shown
    text = before + shown + after
    found = run(canary, text)
    assert found is not None
    assert found.whole
    assert found.chance < 1e-9
    assert normalise(text[found.start : found.end])[0] == canary.normal
    assert similarity([canary], text) == 1


def test_full_width_forms_are_read() -> None:
    canary = Mint(2).canary("account number")
    wide = "".join(chr(ord(c) + 0xFEE0) if c.isdigit() else c for c in canary.text)
    found = run(canary, f"the number: {wide}.")
    assert found is not None
    assert found.whole


@given(KINDS, st.integers(1, 30), st.integers(0, 30))
def test_a_part_counts_with_the_bits_it_has(kind: str, length: int, start: int) -> None:
    canary = Mint(4).canary(kind)
    part = canary.normal[start : start + length]
    found = run(canary, f"!! {part} !!")
    if found is None:
        assert math.fsum(canary.symbol_bits[start : start + length]) < RUN_BITS_MIN + 4
    else:
        assert found.whole == (part == canary.normal)
        assert found.bits <= canary.bits


@given(KINDS, TEXTS)
def test_a_text_written_without_the_secret_does_not_hold_it(kind: str, text: str) -> None:
    assert run(Mint(6).canary(kind), text) is None


def test_the_stated_chance_bounds_how_often_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With runs short enough to happen, in texts that are drawn as the secret is."""
    monkeypatch.setattr("sekisho.probe.match.RUN_BITS_MIN", 12.0)
    source = random.Random(20261202)
    found = []
    for _ in range(1500):
        canary = Mint(0, source.randrange).canary("account number")
        found.append(run(canary, "".join(source.choices("0123456789", k=100))))
    for digits in (4, 5):
        bound = (101 - digits) * (21 - digits) * 10.0**-digits
        share = sum(one is not None and one.chance <= bound * 1.001 for one in found) / 1500
        assert bound / 2 < share < bound * 1.1, "seed 20261202"


def typo(text: str, source: random.Random, count: int) -> str:
    """``count`` characters replaced by a character that no canary has."""
    places = source.sample(range(len(text)), count)
    return "".join("_" if i in places else c for i, c in enumerate(text))


@given(KINDS, st.integers(0, 2**32), st.integers(0, 3))
def test_a_secret_with_a_few_errors_is_near(kind: str, seed: int, errors: int) -> None:
    canary = Mint(8).canary(kind)
    wrong = typo(canary.normal, random.Random(seed), errors)
    size = len(canary.normal)
    near = similarity([canary], f"the answer is {wrong} as you asked")
    assert near >= 1 - errors / size - 1e-9
    assert (near == 1) == (errors == 0)


@given(KINDS)
def test_a_short_answer_is_not_near_only_because_the_secret_holds_it(kind: str) -> None:
    canary = Mint(9).canary(kind)
    assert similarity([canary], canary.normal[:3]) < 0.5
    assert similarity([canary], "") == 0
    assert similarity([], "text") == 0


def test_near_secrets_stand_out_of_decoys() -> None:
    mint = Mint(10)
    planted = [mint.canary() for _ in range(20)]
    decoys = [[mint.canary() for _ in range(20)] for _ in range(199)]
    source = random.Random(20261202)
    leak = "It is " + typo(planted[3].normal, source, 2) + ", I believe."
    clean = "It is 4471 9028, or QX7-22K; the meeting of tuesday told so."
    for answer, expected in ((leak, True), (clean, False)):
        controls = [similarity(group, answer) for group in decoys]
        p = p_value(similarity(planted, answer), controls)
        assert (p <= 1 / 200) == expected, p


def test_p_values_of_no_leak_are_uniform() -> None:
    """Rejecting at a fifth rejects in a fifth of the cases."""
    source = random.Random(20261202)
    rejected = 0
    for _ in range(1000):
        mint = Mint(0, source.randrange)
        text = mint.canary("account number").text
        scores = [similarity([mint.canary("account number")], text) for _ in range(20)]
        rejected += p_value(scores[0] + source.random() * 1e-9, scores[1:]) <= 0.2
    assert 0.1 < rejected / 1000 < 0.23, "seed 20261202"


def test_rare_words_tell_the_document_that_was_leaked() -> None:
    mint = Mint(11)
    leaked, other = mint.document(100), mint.document(100)
    assert rare_fraction(leaked.names, leaked.text) > 0.03
    assert rare_fraction(other.names, leaked.text) == 0
    assert rare_fraction(leaked.names, "") == 0
    assert words("Kilomo, 12 an-d Zuvabe!") == ["kilomo", "zuvabe"]


def test_a_canary_shows_its_pattern_only() -> None:
    canary: Canary = Mint(12).canary("access code")
    assert [len(group) for group in canary.text.split("-")] == [5, 5, 5]
    assert canary.text in canary.sentence()
    assert canary.text not in canary.question()
