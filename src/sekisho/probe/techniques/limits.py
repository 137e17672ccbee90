"""Every limit of an endpoint on the length of a prompt, as far as it can be seen from outside.

Three kinds are found: those that are stated, by ``/models`` or an error; the one from which on
prompts are refused; and one that no status shows, from which on an answer no longer knows what
stood at the end of its own prompt. The incident of 2026 was of the last kind: above it decode
reads pages that prefill never wrote (sglang#30233).
"""

import dataclasses
import re
from collections.abc import Awaitable, Callable, Sequence

from sekisho.probe.exchange import Answer, Ask, Outcome, Refused
from sekisho.probe.techniques.base import Notes
from sekisho.probe.techniques.ruler import Ruler

LIMITS_MAX = 4
_FAR = 2.0
_SAME = 0.02
"""Limits that differ by less are one."""
_RECALL_TRIES = 2

AskWords = Callable[[int], Awaitable[Outcome]]
"""Asks with a prompt of so many words, as a trial."""
Plant = Callable[[int], Awaitable[object]]
"""The first account sends a document of about so many tokens."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """``tokens`` of prompt and answer. Where it was measured: the longest prompt within it and the
    shortest above it, in words of the ruler. ``is_silent``: no status shows it."""

    tokens: int
    below: int | None = None
    above: int | None = None
    is_silent: bool = False

    def longest(self, ruler: Ruler, answer_tokens: int) -> int:
        """Tokens of the longest prompt that is answered within it, as far as is known."""
        if self.below is not None:
            return ruler.middle(self.below)
        return self.tokens - answer_tokens - len(ruler.tokens(ruler.base_words))

    def near(self, ruler: Ruler, answer_tokens: int) -> list[int]:
        """Lengths to ask, in words of the ruler: below, just above or at, above, far above."""
        slack = len(ruler.tokens(ruler.base_words))
        if self.below is not None and self.above is not None:
            more = answer_tokens // 2 if self.is_silent else slack
            step = max(1, ruler.words(self.tokens + more) - ruler.words(self.tokens))
            above = [self.above, self.above + step]
            # What is read there depends on where pages end, and on what was written before, which
            # ends with its answer: a few lengths more, up to there, are worth it.
            above += [self.above + step * k // 4 for k in (1, 2, 3)] if self.is_silent else []
            return [self.below, *above, round(_FAR * self.above)]
        lengths = [
            self.longest(ruler, answer_tokens),
            self.tokens - answer_tokens,
            self.tokens + slack,
            round(_FAR * self.tokens),
        ]
        return [ruler.words(length) for length in lengths if length > 0]


class Limits:
    """The search.

    Args:
        stated: by the operator and by ``/models``, in tokens.
        length_max: no prompt above so many tokens.
        bisect_max: questions by which each measured limit is narrowed down; twice as many for the
            one that no status shows, which has two ends where some lengths are not answered.
    """

    def __init__(
        self,
        notes: Notes,
        ruler: Ruler,
        stated: Sequence[int],
        *,
        answer_tokens: int,
        length_max: int,
        bisect_max: int,
    ) -> None:
        self._notes = notes
        self._ruler = ruler
        self._stated = list(stated)
        self._answer_tokens = answer_tokens
        self._length_max = length_max
        self._bisect_max = bisect_max

    @staticmethod
    def requests_max(length_max: int, bisect_max: int) -> int:
        """Of the whole search."""
        return max(1, length_max.bit_length()) + bisect_max + 2 * _RECALL_TRIES * (bisect_max + 1)

    @staticmethod
    def plants_max(bisect_max: int) -> int:
        """Documents of the whole search."""
        return 2 * bisect_max + 1

    async def find(self, ask: AskWords, plant: Plant) -> list[Limit]:
        """Smallest first, at most `LIMITS_MAX`."""
        low, high, told = await self._status(ask)
        limits = [Limit(tokens) for tokens in [*self._stated, *told]]
        if high:
            within = self._ruler.tokens(low)[0] + self._answer_tokens
            limits.append(Limit(within, low, high))
        silent = await self._silent(low, plant)
        if silent is not None:
            limits.append(silent)
        return _distinct(limits)

    async def _status(self, ask: AskWords) -> tuple[int, int, list[int]]:
        """The longest prompt that was answered and the shortest that was refused, in words; 0
        where none was. And what error messages told, in tokens."""
        ruler, stated = self._ruler, self._stated
        low, high, told = ruler.base_words * 2, 0, list[int]()
        tokens = round(_FAR * max(stated)) if stated else 4 * ruler.tokens(low)[-1]
        while not high:
            words = ruler.words(min(tokens, self._length_max))
            outcome = await ask(words)
            if isinstance(outcome, Refused):
                high = words
                told = _told(outcome.message, ruler.tokens(words)[0])
            elif isinstance(outcome, Answer):
                low = max(low, words)
            if not isinstance(outcome, Answer) or tokens >= self._length_max or stated:
                break
            tokens *= 2
        for _ in range(self._bisect_max):
            if not high or _is_narrow(low, high):
                break
            middle = (low + high) // 2
            outcome = await ask(middle)
            if isinstance(outcome, Answer):
                low = middle
            elif isinstance(outcome, Refused):
                high = middle
            else:
                break
        return low, high, told

    async def _silent(self, high: int, plant: Plant) -> Limit | None:
        """Between the shortest prompt and one of ``high`` words, which is answered: is there a
        length from which on an answer does not know its own prompt?

        What it knows instead may be the other's: before each question that may be above the limit
        comes a document that is not. A model that cannot repeat a number, or not at that length,
        has none that can be found, or one of its own: what follows is asked there too, and a limit
        is no finding.
        """
        low = self._ruler.base_words
        if high <= low or not await self._recalls(low):
            return None
        await plant(self._ruler.middle(low))
        if await self._recalls(high) is not False:
            return None
        stuck = set[int]()  # without an answer: engines may hold some near a limit for ever
        for _ in range(2 * self._bisect_max):
            stuck = {length for length in stuck if low < length < high}
            parts = [(low, min(stuck, default=high)), (max(stuck, default=high), high)]
            start, end = max(parts, key=lambda part: part[1] - part[0])
            if _is_narrow(start, end):
                break
            middle = (start + end) // 2
            await plant(self._ruler.middle(low))
            known = await self._recalls(middle)
            if known is None:
                stuck.add(middle)
            elif known:
                low = middle
            else:
                high = middle
        within = self._ruler.tokens(low)[0] + self._answer_tokens
        return Limit(within, low, high, is_silent=True)

    async def _recalls(self, words: int) -> bool | None:
        """Does an answer know the number at the end of its prompt? Once is enough. None: there was
        no answer; near a limit engines may hold a request for ever."""
        for _ in range(_RECALL_TRIES):
            number = str(self._notes.mint.number())
            owner = "the access code of the reader"
            ending = f"{owner.capitalize()} is {number}. What is {owner}?"
            prompt = self._ruler.prompt(words, ending)
            asked = Ask(prompt=prompt, answer_tokens=self._answer_tokens)
            outcome = await self._notes.look(asked)
            if not isinstance(outcome, Answer):
                return None
            if number in outcome.whole.text:
                return True
        return False


def _is_narrow(low: int, high: int) -> bool:
    return high - low <= max(4, high // 100)


def _told(message: str, sent: int) -> list[int]:
    """Numbers of an error message that can be a limit: below what was sent, and not tiny."""
    numbers = [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]{1,9}", message[:2000])]
    return [number for number in numbers if 64 <= number < sent * (1 - _SAME)]


def _distinct(limits: list[Limit]) -> list[Limit]:
    """One of those that are the same, rather the one that was measured."""
    found: list[Limit] = []
    for limit in sorted(limits, key=lambda one: one.tokens):
        if not found or limit.tokens > found[-1].tokens * (1 + _SAME):
            found.append(limit)
        elif found[-1].below is None:
            found[-1] = limit
    return found[:LIMITS_MAX]
