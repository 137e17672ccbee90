"""Response cache: is one account served an answer that was made for the other?

Reports: OmniRoute#3740 (the cache's key has no tenant), litellm#19575 (a semantic cache ignores
the namespace), semantic-router#2134 (a user's name in the embedded text moves it too little),
arXiv 2409.20002 (such caches told by their times).
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from sekisho.probe.budget import Cost
from sekisho.probe.canary import Canary, Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Outcome, Refused
from sekisho.probe.model import Finding, TechniqueResult, conclude
from sekisho.probe.techniques import stories
from sekisho.probe.techniques import tags as tagged
from sekisho.probe.techniques.base import Technique, unprepared

_QUESTION = "Question {}: which secret was named above? Please repeat that sentence."
_NEARLY: tuple[Callable[[str], str], ...] = (
    str,
    str.lower,
    lambda question: question.replace(" ", "  ", 1) + " ",
    lambda question: question.replace("Please repeat", "Repeat"),
    lambda question: question.replace("Please repeat", "Please quote"),
)
"""How the second's question differs from the first's: not at all, in case, in spaces, in words."""
_CONTEXTS = ("system message", "earlier turns")
_TURNS = 3
_PROMPT_TOKENS = 300


class _Pair(msgspec.Struct, frozen=True):
    """The two accounts' answers to the same question; ``number`` is its own."""

    number: int
    first: Outcome
    second: Outcome


class ResponseCache(Technique):
    """In each round the first account asks questions whose answer is a secret of their context,
    and the second asks the same or nearly the same with secrets of its own. The first's secret in
    the second's answer is proof; so is an answer with name and time of the first's.

    Then both ask for the same `stories` at temperature 1, where nobody has a secret.

    Args:
        rounds: each has ten questions of each account.
        stories: how many.
        pause_s: between the two accounts; more than a second, in which times are told.
    """

    name = "response-cache"
    goal = "be served an answer that was made for the other account"
    report = "OmniRoute#3740"

    def __init__(
        self,
        *,
        rounds: int = 2,
        stories: int = 6,
        pause_s: float = 1.2,
        answer_tokens: int = 48,
        story_tokens: int = 64,
    ) -> None:
        self._rounds = rounds
        self._stories = stories
        self._pause_s = pause_s
        self._answer_tokens = answer_tokens
        self._story_tokens = story_tokens

    def cost(self) -> Cost:
        ask = Cost(1, _PROMPT_TOKENS, self._answer_tokens)
        asks = self._rounds * 2 * len(_NEARLY) * len(_CONTEXTS)
        return ask.times(asks) + stories.cost(self._stories, self._story_tokens)

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        work = _Work(endpoint, mint, self._answer_tokens)
        for _ in range(self._rounds):
            await work.round(self._pause_s)
        told = await stories.tell(endpoint, mint, self._stories, self._story_tokens, self._pause_s)
        every = [*work.sent, *itertools.chain(*told.values())]
        findings = tagged.foreign(self.name, every, work.tags, report=self.report)
        pairs = [*work.pairs, *(_Pair(number, one[0], one[-1]) for number, one in told.items())]
        numbers = {one.serial: number for number, story in told.items() for one in story}
        findings += self._stored(pairs, work.numbers | numbers, every)
        result = conclude(
            self.name,
            work.trials,
            findings,
            tests=(stories.coincide(self.name, list(told.values()), self.report),),
            sensitivity=tagged.sensitivity(work.first, work.tags),
            unplanted=work.unmade,
        )
        return msgspec.structs.replace(result, not_offered=tuple(sorted(work.not_offered)))

    def _stored(
        self, pairs: list[_Pair], numbers: dict[int, int], every: list[Outcome]
    ) -> list[Finding]:
        """Answers of the second account that have name and time of the first's.

        Both were asked more than a second apart, so a new answer has another time, whatever names
        it. Not so where the endpoint states one time for all, or names several answers alike:
        other questions tell.
        """
        answers = [one for one in every if isinstance(one, Answer)]
        found = []
        for pair in pairs:
            first, second = pair.first, pair.second
            if not (isinstance(first, Answer) and isinstance(second, Answer)):
                continue
            name, created = second.whole.answer_name, second.whole.created
            if not name or created is None or _identity(first) != (name, created):
                continue
            others = [one for one in answers if numbers.get(one.serial) != pair.number]
            if any(one.whole.answer_name == name for one in others):
                continue
            if all(one.whole.created in (created, None) for one in others):
                continue
            message = (
                f"request {second.serial} of account {second.account} was sent the answer that was "
                f"made for request {first.serial}, with its name and its time"
            )
            found.append(
                Finding(
                    rule="PROBE012",
                    technique=self.name,
                    message=message,
                    seen_in=second.serial,
                    planted_in=first.serial,
                    report=self.report,
                )
            )
        return found


class _Work:
    """Questions about secrets, and what came.

    Attributes:
        sent: every outcome; ``first`` those of the first account, ``trials`` of the second.
        numbers: of the question, by the serial of each outcome.
    """

    def __init__(self, endpoint: Endpoint, mint: Mint, answer_tokens: int) -> None:
        self.sent: list[Outcome] = []
        self.first: list[Outcome] = []
        self.trials: list[Outcome] = []
        self.pairs: list[_Pair] = []
        self.tags: dict[int, Canary] = {}
        self.numbers: dict[int, int] = {}
        self.unmade: Counter[str] = Counter()
        self.not_offered: set[str] = set()
        self._endpoint = endpoint
        self._mint = mint
        self._answer_tokens = answer_tokens

    async def round(self, pause_s: float) -> None:
        """All questions of the first account, a pause, and those of the second."""
        plan = [
            (context, nearly, self._mint.number())
            for context in _CONTEXTS
            if context not in self.not_offered
            for nearly in _NEARLY
        ]
        planted = await asyncio.gather(
            *(self._ask(0, context, str, number) for context, _, number in plan)
        )
        self.first += planted
        for context in _CONTEXTS:
            mine = [
                one for one, (other, _, _) in zip(planted, plan, strict=True) if other == context
            ]
            if mine and all(isinstance(one, Refused) for one in mine):
                self.not_offered.add(context)
        asked = []
        for outcome, (context, nearly, number) in zip(planted, plan, strict=True):
            if isinstance(outcome, Answer):
                asked.append((outcome, context, nearly, number))
            elif context not in self.not_offered:
                self.unmade[unprepared(outcome)] += 1
        await asyncio.sleep(pause_s)
        seen = await asyncio.gather(
            *(self._ask(1, context, nearly, number) for _, context, nearly, number in asked)
        )
        self.trials += seen
        self.pairs += [
            _Pair(number, outcome, other)
            for (outcome, _, _, number), other in zip(asked, seen, strict=True)
        ]

    async def _ask(
        self, account: int, context: str, nearly: Callable[[str], str], number: int
    ) -> Outcome:
        """With a context that holds a new secret of this account."""
        canary = self._mint.canary()
        messages = _messages(context, canary.sentence(), nearly(_QUESTION.format(number)))
        ask = Ask(
            prompt="\n".join(str(one["content"]) for one in messages),
            answer_tokens=self._answer_tokens,
            fields={"messages": messages},
        )
        outcome = await self._endpoint.ask(self._endpoint.accounts[account], ask)
        self.sent.append(outcome)
        self.tags[outcome.serial] = canary
        self.numbers[outcome.serial] = number
        return outcome


def _messages(context: str, sentence: str, question: str) -> list[dict[str, Any]]:
    """A conversation whose last message is ``question`` alone."""
    last = {"role": "user", "content": question}
    if context == "system message":
        line = f"{sentence} Whoever asks may know this."
        return [{"role": "system", "content": "\n".join([line] * _TURNS)}, last]
    turn = [
        {"role": "user", "content": f"Please remember this: {sentence}"},
        {"role": "assistant", "content": sentence},
    ]
    return [*turn * _TURNS, last]


def _identity(answer: Answer) -> tuple[str, int | None]:
    return answer.whole.answer_name, answer.whole.created
