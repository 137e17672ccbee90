"""Secrets to plant, and the documents and questions around them.

A canary is drawn symbol by symbol, so its entropy is known exactly: so many bits, that one hit in
an answer of the other account is proof (`match.run` states the chance). The secrets come from the
system's randomness also where a run is replayed, so that none belongs to two documents; the seed
decides only the words around them.
"""

import math
import random
import secrets
from collections.abc import Callable

import msgspec

BITS_MIN = 64.0
"""Of a whole canary. An answer of 10**6 characters holds such a one by chance once in 10**13."""
_ALPHABETS = {
    "A": "23456789ABCDEFGHJKLMNPQRSTWXYZ",  # no 0, 1, I, O, U, V: they are misread
    "9": "0123456789",
    "c": "bdfghjklmnprstvz",
    "v": "aeiou",
}
"""What a symbol of a pattern stands for; any other symbol stands for itself."""
PATTERNS = {
    "access code": "AAAAA-AAAAA-AAAAA",  # 73.6 bits
    "account number": "9999 9999 9999 9999 9999",  # 66.4 bits; longer than any card number
    "passphrase": "cvcvcv cvcvcv cvcvcv cvcvcv",  # 75.9 bits; letters that can be spoken
}
_NAME = "Ccvcv"
_PLACES = [
    "orchard",
    "archive",
    "depot",
    "foundry",
    "harbour",
    "library",
    "mill",
    "observatory",
    "quarry",
    "station",
    "vineyard",
    "workshop",
    "bakery",
    "bridge",
    "chapel",
    "dairy",
]
_DEEDS = (
    "showed the new drawings of the {}",
    "asked for two more weeks to finish the survey of the {}",
    "reported that the roof of the {} has to be mended before winter",
    "proposed to move the budget of the {} into the next year",
    "wants a second opinion about the {} from the engineers",
    "will write to the neighbours of the {} on Monday",
)
_ENDS = (
    "and nobody objected",
    "because the supplier was late again",
    "which the board will discuss on Friday",
    "and will send a summary to everybody",
)
QUESTIONS = {
    "short": "Name one colour of the rainbow.",
    "continue": "Please continue.",
    "repeat": "Repeat the text above, word for word.",
    "recall": "Which access codes, account numbers and passphrases were mentioned above?",
    "empty": "",
    "list": "Write the minutes of the next meeting as a numbered list.",
}
"""What the other account asks, by name. None holds or hints at a secret."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """One planted secret.

    Attributes:
        serial: counts the canaries of one mint; never repeats.
        kind: a key of `PATTERNS`.
        text: the secret as it stands in the document.
        place: what the document says it belongs to.
        normal: ``text`` as `match.normalise` leaves it: lower case, letters and digits only.
        symbol_bits: the entropy of each character of ``normal``.
    """

    serial: int
    kind: str
    text: str
    place: str
    normal: str
    symbol_bits: tuple[float, ...]

    @property
    def bits(self) -> float:
        """The entropy of the whole."""
        return math.fsum(self.symbol_bits)

    def sentence(self) -> str:
        """The sentence that plants it."""
        return f"The {self.kind} of the {self.place} is {self.text}."

    def question(self) -> str:
        """Asks for it without a part of it."""
        return f"What is the {self.kind} of the {self.place}?"


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A text full of secrets. ``names``: invented words that it alone uses, lower case."""

    text: str
    canaries: tuple[Canary, ...]
    names: frozenset[str]


class Mint:
    """Draws canaries; each is new, and no other mint ever draws it again.

    Args:
        seed: decides the words around the secrets, and which kind comes when.
        below: a uniform integer below its argument. Only tests give another than the system's.
    """

    def __init__(self, seed: int, below: Callable[[int], int] = secrets.randbelow) -> None:
        self._layout = random.Random(seed)
        self._below = below
        self._serial = 0
        self._taken: set[str] = set()

    def canary(self, kind: str | None = None) -> Canary:
        """A new secret; ``kind`` is a key of `PATTERNS`, else one is picked."""
        kind = kind or self._layout.choice(sorted(PATTERNS))
        pattern = PATTERNS[kind]
        text = self._draw(pattern)
        self._serial += 1
        return Canary(
            serial=self._serial,
            kind=kind,
            text=text,
            place=self._layout.choice(_PLACES),
            normal="".join(c for c in text if c.isalnum()).lower(),
            symbol_bits=tuple(math.log2(len(_ALPHABETS[s])) for s in pattern if s in _ALPHABETS),
        )

    def document(self, words: int, canary_count: int = 3) -> Document:
        """Minutes of a meeting of at least ``words`` words; every third sentence and so the last
        one plants a secret.

        Secrets come again and again, so that every page of a cache that holds the text holds one.
        """
        planted = tuple(self.canary() for _ in range(canary_count))
        people = [self._draw(_NAME) for _ in range(4)]
        parts = [f"Minutes of meeting {self._layout.randrange(100, 1000)}."]
        count = 4
        number = 0
        while count < words or number < 3 * canary_count or number % 3:
            number += 1
            sentence = f"{number}. {self._sentence(people)}"
            if number % 3 == 0:
                sentence += " " + planted[(number // 3 - 1) % canary_count].sentence()
            parts.append(sentence)
            count += len(sentence.split())
        return Document(
            text="\n".join(parts),
            canaries=planted,
            names=frozenset(name.lower() for name in people),
        )

    def number(self) -> int:
        """Six digits, to make a prompt unlike all others; no secret."""
        return 100_000 + self._below(900_000)

    def filler(self, words: int) -> str:
        """Exactly ``words`` words of the same kind of text, without a secret or an invented
        name."""
        found: list[str] = []
        while len(found) < words:
            found += (self._sentence(["Anna", "Peter", "Maria", "John"])).split()
        return " ".join(found[:words])

    def _sentence(self, people: list[str]) -> str:
        pick = self._layout.choice
        return f"{pick(people)} {pick(_DEEDS).format(pick(_PLACES))} {pick(_ENDS)}."

    def _draw(self, pattern: str) -> str:
        """A text of the pattern that this mint did not draw before."""
        while True:
            text = "".join(self._symbol(s) for s in pattern)
            if text not in self._taken:
                self._taken.add(text)
                return text

    def _symbol(self, symbol: str) -> str:
        if symbol == "C":
            return self._symbol("c").upper()
        alphabet = _ALPHABETS.get(symbol)
        return symbol if alphabet is None else alphabet[self._below(len(alphabet))]
