"""Boundary: what happens at and above every limit, while secrets of the other fill the memory?

Reports: sglang#30233 (over-long input becomes a placeholder, one page is sent, and decode reads
other users' pages with status 200), sglang PR#30325 (two limits, two gates), sglang#4048 and
imp#1542 (more is advertised than can be served), sglang#33507 (an abort served as an empty
answer). The incident of 2026 is the first of them.
"""

from asyncio import sleep as _wait

import msgspec

from sekisho.probe.budget import Cost
from sekisho.probe.canary import QUESTIONS, Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Inconclusive, Outcome
from sekisho.probe.model import TechniqueResult, point
from sekisho.probe.oracles import structural
from sekisho.probe.techniques.base import WORDS_TO_TOKENS, Notes, Technique
from sekisho.probe.techniques.limits import LIMITS_MAX, Limit, Limits
from sekisho.probe.techniques.ruler import Ruler

_PLACES = 4
"""Lengths that are asked around a limit."""
_MORE_PLACES = 3
"""And around the one that no status shows, of which there is one at most."""
_SPARE = 6
"""Tokens by which a document stays below the limit, as the count of its filler is a guess."""
_SENTENCES = 4
"""Of a line, so that an answer which ends with the first line has all its tokens by then."""
_DENSITY_MAX = 3.0
"""Tokens of a word of a secret's sentence, compared with a word of plain text."""
_WAITS_MAX = 8
_WAIT_S = 15.0
"""A question at a limit may fell the endpoint, or open the breaker before it; without a pause all
that follows would be inconclusive."""


class Boundary(Technique):
    """Learns every limit, then asks around each (`limits`).

    Args:
        window: what is advertised, in tokens; None where only the endpoint says.
        length_max: no prompt above so many tokens, whatever the limits are; documents have half.
        plants: documents that the first account sends before every question. Each is, with its
            answer, as long as the limit, so that its pages are those that a question just above
            it is given, at the same places; shorter, it would leave a gap that was never written,
            of which answers are noise. It is one secret again and again, so that an answer that
            goes on from any of its places says it; a shorter one is sent before, to measure it.
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
        answer_tokens: int = 48,
        sensitivity: float = 1.0,
    ) -> None:
        self._window = window
        self._length_max = length_max
        self._plants = plants
        self._repeats = repeats
        self._bisect_max = bisect_max
        self._answer_tokens = answer_tokens
        self._sensitivity = sensitivity
        self._waits = 0

    def cost(self) -> Cost:
        longest = self._length_max
        if self._window is not None:
            longest = min(longest, 2 * self._window)
        ask = Cost(1, longest + 16 * WORDS_TO_TOKENS, self._answer_tokens)
        asks = (LIMITS_MAX * _PLACES + _MORE_PLACES) * self._repeats
        search = Ruler.REQUESTS_MAX + Limits.requests_max(longest, self._bisect_max)
        plant = Cost(1, longest // 2 + 200 * WORDS_TO_TOKENS, self._answer_tokens)
        plants = self._plants * (asks + 1 + _WAITS_MAX) + Limits.plants_max(self._bisect_max)
        return ask.times(asks + search) + plant.times(2 * plants) + Cost(1)

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        notes = Notes(self, endpoint, mint)
        self._waits = 0
        said = (await endpoint.models(endpoint.accounts[1])).get(endpoint.model)
        stated = [limit for limit in (self._window, said) if limit]
        ruler = await Ruler.made(notes, self._answer_tokens)
        silent = None
        if ruler is not None:
            first = min([*stated, 1024])
            if await self._plant(notes, ruler, first // 2):
                limits = await self._limits(notes, ruler, stated)
                silent = next((one for one in limits if one.is_silent), None)
                for limit in limits:
                    await self._around(notes, ruler, limit, limits, stated)
        found = notes.conclude(self._sensitivity)
        if silent is not None:
            told = (
                f"from about {silent.tokens:,} tokens on, answers with status 200 did not know the "
                "end of their own prompt"
            )
            found = msgspec.structs.replace(found, notes=(*found.notes, told))
        return found

    async def _limits(self, notes: Notes, ruler: Ruler, stated: list[int]) -> list[Limit]:
        search = Limits(
            notes,
            ruler,
            stated,
            answer_tokens=self._answer_tokens,
            length_max=self._length_max,
            bisect_max=self._bisect_max,
        )
        return await search.find(
            lambda words: self._ask(notes, ruler, words, stated),
            lambda tokens: self._plant_one(notes, ruler, tokens),
        )

    async def _around(
        self, notes: Notes, ruler: Ruler, limit: Limit, limits: list[Limit], stated: list[int]
    ) -> None:
        """The questions around one limit, each after new documents."""
        # What is advertised may be more than what is served.
        served = [one for one in limits if one.below is not None and not one.is_silent]
        full = min(one.longest(ruler, self._answer_tokens) for one in [limit, *served])
        longest = ruler.words(self._length_max)
        lengths = limit.near(ruler, self._answer_tokens) * self._repeats
        for words in lengths:
            if await self._plant(notes, ruler, full):
                await self._ask(notes, ruler, min(words, longest), stated)

    async def _plant(self, notes: Notes, ruler: Ruler, tokens: int) -> bool:
        """Documents whose prompts have so many tokens; was one answered?"""
        plantings = [await self._plant_one(notes, ruler, tokens) for _ in range(self._plants)]
        if any(isinstance(outcome, Answer) for outcome in plantings):
            return True
        if all(map(_is_down, plantings)) and self._waits < _WAITS_MAX:
            self._waits += 1
            await _wait(_WAIT_S)
            return await self._plant(notes, ruler, tokens)
        notes.skipped(plantings[0], 1)
        return False

    async def _plant_one(self, notes: Notes, ruler: Ruler, tokens: int) -> Outcome:
        """Of which the answer fills the places up to where a question above the limit ends."""
        tokens = min(tokens, self._length_max // 2)
        secret = notes.mint.canary()
        sentence = secret.sentence()
        each = _DENSITY_MAX * ruler.rate * len(sentence.split())
        overhead = ruler.middle(1)
        count = max(1, int((tokens - overhead) / each))
        counted = _counted(await self._send(notes, ruler, "", sentence, count))
        if counted and overhead < counted <= overhead + each * count:
            each = (counted - overhead) / count
        room = tokens - _SPARE - overhead
        count = max(1, int(room / each))
        filler = notes.mint.filler(max(0, int((room - count * each) / ruler.rate)))
        return await notes.plant_by((secret,), self._send(notes, ruler, filler, sentence, count))

    async def _send(
        self, notes: Notes, ruler: Ruler, filler: str, sentence: str, count: int
    ) -> Outcome:
        """It begins and ends as the prompts of the ruler do, so that its length is known. It is to
        be gone on with: asked to repeat it, a small model is done with one sentence or one line,
        so that a line has many."""
        # The last line is whole: it is the one that small models say again.
        first, rest = [sentence] * (count % _SENTENCES), [sentence] * _SENTENCES
        lines = [" ".join(one) for one in [first, *[rest] * (count // _SENTENCES)]]
        text = "\n".join([filler, *lines, "", QUESTIONS["continue"]])
        asked = Ask(prompt=ruler.numbered(text), answer_tokens=self._answer_tokens)
        return await notes.endpoint.ask(notes.endpoint.accounts[0], asked)

    async def _ask(self, notes: Notes, ruler: Ruler, words: int, stated: list[int]) -> Outcome:
        """One trial, judged by what is known of its length."""
        counted = ruler.tokens(words)
        outcome = await notes.look(
            Ask(prompt=ruler.prompt(words), answer_tokens=self._answer_tokens)
        )
        notes.points.append(point(ruler.middle(words), outcome))
        notes.findings += structural(
            self.name,
            outcome,
            over_long=bool(stated) and counted[0] > max(stated),
            promised=bool(stated) and counted[-1] + self._answer_tokens <= max(stated),
            prompt_tokens=counted if ruler.is_counted else None,
            report=self.report,
        )
        return outcome


def _is_down(outcome: Outcome) -> bool:
    """Has the endpoint failed as such, as after a question that felled it?"""
    is_failure = outcome.status == 0 or outcome.status >= 500
    return isinstance(outcome, Inconclusive) and outcome.sent and is_failure


def _counted(outcome: Outcome) -> int:
    """Tokens of its prompt, as the endpoint counted them; 0 where it did not."""
    return (outcome.whole.prompt_tokens or 0) if isinstance(outcome, Answer) else 0
