"""Boundary: what happens at and above every limit, while secrets of the other fill the memory?

Reports: sglang#30233 (over-long input becomes a placeholder, one page is sent, and decode reads
other users' pages with status 200), sglang PR#30325 (two limits, two gates), sglang#4048 and
imp#1542 (more is advertised than can be served), sglang#33507 (an abort served as an empty
answer). The incident of 2026 is the first of them.
"""

import re

from sekisho.probe.budget import Cost
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Outcome, Refused
from sekisho.probe.model import TechniqueResult, point
from sekisho.probe.oracles import structural
from sekisho.probe.techniques.base import WORDS_TO_TOKENS, Notes, Technique
from sekisho.probe.techniques.ruler import Ruler

_FAR = 2.0
_LIMITS_MAX = 4
_PLACES = 4  # just below a limit, at it, just above, far above
_SAME = 0.02
"""Limits that differ by less are one."""


class Boundary(Technique):
    """Learns every limit, then asks around each: advertised, stated by ``/models``, told by error
    messages, and measured by bisection.

    Args:
        window: what is advertised, in tokens; None where only the endpoint says.
        length_max: no prompt above so many tokens, whatever the limits are.
        plants: documents that the first account sends before every question.
        repeats: how often each length of each limit is asked.
    """

    name = "boundary"
    goal = "see the other account's text in answers to prompts at and above a limit"
    report = "sglang#30233"

    def __init__(
        self,
        *,
        window: int | None = None,
        length_max: int = 32_768,
        plants: int = 2,
        repeats: int = 2,
        bisect_max: int = 10,
        answer_tokens: int = 24,
        sensitivity: float = 1.0,
    ) -> None:
        self._window = window
        self._length_max = length_max
        self._plants = plants
        self._repeats = repeats
        self._bisect_max = bisect_max
        self._answer_tokens = answer_tokens
        self._sensitivity = sensitivity

    def cost(self) -> Cost:
        longest = self._length_max
        if self._window is not None:
            longest = min(longest, round(_FAR * self._window))
        ask = Cost(1, longest + 16 * WORDS_TO_TOKENS, self._answer_tokens)
        asks = _LIMITS_MAX * _PLACES * self._repeats
        search = Ruler.REQUESTS_MAX + self._bisect_max + max(1, longest.bit_length())
        plant = Cost(1, longest // 2 + 200 * WORDS_TO_TOKENS, self._answer_tokens)
        return ask.times(asks + search) + plant.times(self._plants * (asks + 1)) + Cost(1)

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        notes = Notes(self, endpoint, mint)
        said = (await endpoint.models(endpoint.accounts[1])).get(endpoint.model)
        stated = [limit for limit in (self._window, said) if limit]
        ruler = await Ruler.made(notes, self._answer_tokens)
        if ruler is not None and await self._plant(notes, ruler, min([*stated, 1024])):
            limits = await self._learn(notes, ruler, stated)
            for limit in limits:
                for tokens in self._around(limit, ruler) * self._repeats:
                    if await self._plant(notes, ruler, min(limits)):
                        await self._ask(notes, ruler, ruler.words(tokens), stated)
        return notes.conclude(self._sensitivity)

    async def _plant(self, notes: Notes, ruler: Ruler, limit: int) -> bool:
        """Documents that half fill ``limit``, so that every role takes them; was one answered?"""
        words = ruler.words(min(limit, self._length_max) // 2)
        canary_count = 3 if words > 300 else 1
        plantings = [
            await notes.plant(notes.mint.document(words, canary_count), self._answer_tokens)
            for _ in range(self._plants)
        ]
        if any(isinstance(outcome, Answer) for outcome in plantings):
            return True
        notes.skipped(plantings[0], 1)
        return False

    async def _ask(self, notes: Notes, ruler: Ruler, words: int, stated: list[int]) -> Outcome:
        """One trial, judged by what is known of its length."""
        counted = ruler.tokens(words)
        outcome = await notes.look(
            Ask(prompt=ruler.prompt(words), answer_tokens=self._answer_tokens)
        )
        notes.points.append(point(counted[len(counted) // 2], outcome))
        notes.findings += structural(
            self.name,
            outcome,
            over_long=bool(stated) and counted[0] > max(stated),
            promised=bool(stated) and counted[-1] + self._answer_tokens <= max(stated),
            prompt_tokens=counted if ruler.is_counted else None,
            report=self.report,
        )
        return outcome

    async def _learn(self, notes: Notes, ruler: Ruler, stated: list[int]) -> list[int]:
        """Every limit, smallest first, at most `_LIMITS_MAX`."""
        limits = list(stated)
        low, high = ruler.base_words * 2, 0
        tokens = round(_FAR * max(stated)) if stated else 4 * ruler.tokens(low)[-1]
        while not high:
            words = ruler.words(min(tokens, self._length_max))
            outcome = await self._ask(notes, ruler, words, stated)
            if isinstance(outcome, Refused):
                high = words
                limits += _told(outcome.message, ruler.tokens(words)[0])
            elif not isinstance(outcome, Answer) or tokens >= self._length_max or stated:
                break
            low = max(low, words) if isinstance(outcome, Answer) and not stated else low
            tokens *= 2
        for _ in range(self._bisect_max):
            if not high or high - low <= max(4, high // 100):
                break
            middle = (low + high) // 2
            outcome = await self._ask(notes, ruler, middle, stated)
            if isinstance(outcome, Answer):
                low = middle
            elif isinstance(outcome, Refused):
                high = middle
            else:
                break
        if high:
            limits.append(ruler.tokens(low)[0] + self._answer_tokens)
        return _distinct(limits)

    def _around(self, limit: int, ruler: Ruler) -> list[int]:
        """Prompt lengths in tokens: with its answer surely below, at, surely above, far above."""
        slack = len(ruler.tokens(ruler.base_words))
        lengths = [
            limit - self._answer_tokens - slack,
            limit - self._answer_tokens,
            limit + slack,
            round(_FAR * limit),
        ]
        return [min(length, self._length_max) for length in lengths if length > 0]


def _told(message: str, sent: int) -> list[int]:
    """Numbers of an error message that can be a limit: below what was sent, and not tiny."""
    numbers = [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]{1,9}", message[:2000])]
    return [number for number in numbers if 64 <= number < sent * (1 - _SAME)]


def _distinct(limits: list[int]) -> list[int]:
    found: list[int] = []
    for limit in sorted(limits):
        if not found or limit > found[-1] * (1 + _SAME):
            found.append(limit)
    return found[:_LIMITS_MAX]
