"""What a technique is, and the notes that each keeps of what was sent, planted and seen."""

import abc
from collections import Counter
from collections.abc import Awaitable
from typing import ClassVar

import msgspec

from sekisho.probe.budget import Cost
from sekisho.probe.canary import Canary, Document, Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Inconclusive, Outcome
from sekisho.probe.model import Finding, Point, TechniqueResult, TestRun, conclude
from sekisho.probe.oracles import exact, near

WORDS_TO_TOKENS = 2
"""More tokens than a word of our documents has; for estimates before an endpoint has counted."""


class Technique(abc.ABC):
    """One way to look.

    The first account of an endpoint plants, the second asks; where both do both, it says so.

    Attributes:
        name: of one word; stable.
        goal: what it wants to see, as one sentence.
        report: the public report it comes from, as ``project#number``.
    """

    name: ClassVar[str]
    goal: ClassVar[str]
    report: ClassVar[str]

    @abc.abstractmethod
    def cost(self) -> Cost:
        """The most it can cost, if no request has to be tried again."""

    @abc.abstractmethod
    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        """Look. Nothing that the endpoint does raises; statistical tests are left to be settled
        over the whole run (`oracles.settle`)."""


class Notes:
    """What a technique did.

    Attributes:
        planted: secrets of the first account, by the serial of the request that sent them.
        seen: exchanges of the second account, in all of which one of them would be a leak.
        trials: those of ``seen`` that came after something was planted.
        findings: structural ones so far.
        points: questions of a known length.
        not_offered: parts of the technique that the endpoint refuses as such.
    """

    def __init__(self, technique: Technique, endpoint: Endpoint, mint: Mint) -> None:
        self.technique = technique
        self.endpoint = endpoint
        self.mint = mint
        self.planted: dict[int, tuple[Canary, ...]] = {}
        self.seen: list[Outcome] = []
        self.trials: list[Outcome] = []
        self.findings: list[Finding] = []
        self.points: list[Point] = []
        self.unplanted: Counter[str] = Counter()
        self.not_offered: list[str] = []
        self._is_planted = False

    async def plant(self, document: Document, answer_tokens: int) -> Outcome:
        """The first account sends a document and waits for its answer.

        A request that breaks may have planted, so its secrets are looked for all the same.
        """
        ask = planting(document, answer_tokens)
        return await self.plant_by(
            document.canaries, self.endpoint.ask(self.endpoint.accounts[0], ask)
        )

    async def plant_by(self, canaries: tuple[Canary, ...], sending: Awaitable[Outcome]) -> Outcome:
        """The same by ``sending``, any request of the first account that holds ``canaries``."""
        outcome = await sending
        self.planted[outcome.serial] = canaries
        self._is_planted |= isinstance(outcome, Answer)
        return outcome

    async def look(self, ask: Ask, *, is_trial: bool = True) -> Outcome:
        """The second account asks; a trial, once something was planted.

        Args:
            is_trial: False where what should prepare it did not come about: it is searched only.
        """
        outcome = await self.endpoint.ask(self.endpoint.accounts[1], ask)
        self.seen.append(outcome)
        if self._is_planted and is_trial:
            self.trials.append(outcome)
        return outcome

    def skipped(self, outcome: Outcome, count: int) -> None:
        """``count`` trials are not made because this request, made for them, was not answered."""
        self.missed(unprepared(outcome), count)

    def missed(self, reason: str, count: int = 1) -> None:
        """``count`` trials show nothing, for a reason of one sentence."""
        self.unplanted[reason] += count

    def refused(self, part: str) -> None:
        """The endpoint does not offer this part of the technique; that is no fault of a trial."""
        if part not in self.not_offered:
            self.not_offered.append(part)

    def conclude(self, sensitivity: float) -> TechniqueResult:
        """Search all that the second account was sent, and judge."""
        name, report = self.technique.name, self.technique.report
        certain = exact(name, self.seen, self.planted, report=report)
        tests: tuple[TestRun, ...] = ()
        if self.trials and not certain:  # a whole secret is near as well; said once, it is enough
            secrets = [canary for group in self.planted.values() for canary in group]
            tests = (near(name, self.seen, secrets, self.mint, report=report),)
        found = conclude(
            name,
            self.trials,
            [*certain, *self.findings],
            tests=tests,
            sensitivity=sensitivity,
            unplanted=self.unplanted,
        )
        return msgspec.structs.replace(
            found, points=tuple(self.points), not_offered=tuple(self.not_offered)
        )


def planting(document: Document, answer_tokens: int, *, stream: bool = False) -> Ask:
    """The request that plants a document, and asks for its last secret: whoever is answered from
    this request's memory then says it, where one that goes on with the minutes may take long."""
    prompt = f"{document.text}\n{document.canaries[-1].question()}"
    return Ask(prompt=prompt, answer_tokens=answer_tokens, stream=stream)


def unprepared(outcome: Outcome) -> str:
    """Why there is no trial, of a request without an answer that should prepare one."""
    if isinstance(outcome, Inconclusive):
        return outcome.reason
    return "what prepares a trial was refused"
