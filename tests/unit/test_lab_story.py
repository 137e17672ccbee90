"""The lab's texts: exact lengths, one secret, and the words of A found again in an answer."""

import random

import pytest

from sekisho.lab.incident import marked_spans
from sekisho.lab.story import small_talk, tell

SECRET = "1111 2222 3333"
DOCUMENT = f"The access code of the vault is {SECRET}. Ines keeps the register upstairs."


def count(text: str) -> int:
    return len(text.split())


def told(seed: int) -> tuple[str, str, str]:
    return tell(random.Random(seed), count, 150, 160)


@pytest.mark.parametrize("seed", range(20))
def test_the_texts_have_the_lengths_asked_for_and_the_secret_is_as_alone(seed: int) -> None:
    secret, document, question = told(seed)
    longest_sentence = 25
    assert 150 - longest_sentence < count(document) <= 150
    assert 160 <= count(question) < 160 + longest_sentence
    assert document.count(secret) == 2
    assert secret not in question
    assert len(secret.replace(" ", "")) == 12 and secret.replace(" ", "").isdigit()


def test_a_seed_tells_the_same_story_and_another_one_another() -> None:
    assert told(3) == told(3)
    assert len({told(seed)[0] for seed in range(50)}) == 50


@pytest.mark.parametrize("tokens", [30, 47, 111])
def test_small_talk_is_of_an_exact_length(tokens: int) -> None:
    assert count(small_talk(random.Random(1), count, tokens)) == tokens


@pytest.mark.parametrize(
    ("answer", "marked"),
    [
        (f"\n\nThe access code of the vault is {SECRET}.", [DOCUMENT.partition(".")[0]]),
        (f"It is *{SECRET}*!", [SECRET]),
        ("Ines keeps the register, I hear", ["Ines keeps the register"]),
        ("keeps the register", []),
        ("1111 2222 of the vault", []),
        (f"{SECRET} and Ines keeps the register", [SECRET, "Ines keeps the register"]),
        ("", []),
    ],
)
def test_words_of_the_document_are_marked_from_four_on_and_the_secret_always(
    answer: str, marked: list[str]
) -> None:
    spans = marked_spans(answer, DOCUMENT, SECRET)
    assert [answer[start:end] for start, end in spans] == marked
