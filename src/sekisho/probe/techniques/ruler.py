"""Prompts of a known number of tokens, without the endpoint's tokenizer.

The prompts are one short text again and again, so their length in tokens is linear in its repeats,
and two answered questions give both numbers. Each begins with a number of its own, so that no
prefix cache knows it.
"""

import math
from typing import ClassVar, Self

from sekisho.probe.canary import QUESTIONS
from sekisho.probe.exchange import Answer, Ask, Outcome
from sekisho.probe.techniques.base import Notes

_BASES = (120, 20)
"""Words of the text; the short one is for windows that do not hold the long one twice."""
_TOKENS_PER_WORD = 1.4
_TOKENS_PER_WORD_MAX = 12  # where each letter is a token
_SLACK = 4
"""Tokens by which the number at a prompt's beginning may change it."""


class Ruler:
    """Between words and tokens.

    Attributes:
        base_words: of the text that is repeated.
        is_counted: the endpoint counts; else lengths are estimates and prove nothing.
    """

    REQUESTS_MAX: ClassVar[int] = 2 * len(_BASES)

    def __init__(self, notes: Notes, base_words: int) -> None:
        self._notes = notes
        self._base = notes.mint.filler(base_words).split()
        self.base_words = base_words
        self.is_counted = False
        self._per_word = _TOKENS_PER_WORD
        self._overhead = 16.0

    @classmethod
    async def made(cls, notes: Notes, answer_tokens: int) -> Self | None:
        """By asking; None, with the reason noted, where no short question is answered."""
        for base_words in _BASES:
            ruler = cls(notes, base_words)
            counts: list[int | None] = []
            for repeats in (1, 2):
                prompt = ruler.prompt(repeats * base_words)
                outcome: Outcome = await notes.look(Ask(prompt=prompt, answer_tokens=answer_tokens))
                if not isinstance(outcome, Answer):
                    break
                counts.append(outcome.whole.prompt_tokens)
            if len(counts) == 2:
                ruler.measure(counts[0], counts[1])
                return ruler
        notes.skipped(outcome, 1)
        return None

    @property
    def rate(self) -> float:
        """Tokens of a word."""
        return self._per_word

    def measure(self, one: int | None, two: int | None) -> None:
        """From the counts of one and of two repeats; counts that cannot be are not believed."""
        if one is None or two is None:
            return
        per_word = (two - one) / self.base_words
        if 0.5 <= per_word <= _TOKENS_PER_WORD_MAX and one >= per_word * self.base_words:
            self._per_word = per_word
            self._overhead = one - per_word * self.base_words
            self.is_counted = True

    def prompt(self, words: int, ending: str = QUESTIONS["continue"]) -> str:
        """Of so many words of the text; a longer ``ending`` stands in place of as many of them.
        `tokens` holds of the usual one alone, and about of others."""
        words = max(1, words - len(ending.split()) + len(QUESTIONS["continue"].split()))
        repeats = -(-words // self.base_words)
        text = " ".join((self._base * repeats)[:words])
        return self.numbered(f"{text} {ending}")

    def numbered(self, text: str) -> str:
        """It as a prompt that begins as all of these do, with a number of its own."""
        return f"Report {self._notes.mint.number()}. {text}"

    def tokens(self, words: int) -> range:
        """How many tokens `prompt` has with so many words."""
        middle = self.middle(words)
        # Exact after whole repeats. Within one, words of unlike length make a bridge; taking half
        # of the mean as the deviation of a word, it leaves three times that times the root of the
        # words with probability 2 exp(-18).
        slack = _SLACK + math.ceil(1.5 * self._per_word * math.sqrt(self.base_words))
        return range(max(1, middle - slack), middle + slack + 1)

    def middle(self, words: int) -> int:
        """The likeliest of `tokens`."""
        return round(self._overhead + self._per_word * words)

    def words(self, tokens: int) -> int:
        """With how many words `prompt` has about so many tokens; at least one."""
        return max(1, round((tokens - self._overhead) / self._per_word))
