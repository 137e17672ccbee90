"""Residue: does what one account left behind show in the next answer of the other?

Reports: llama.cpp#27148 (a new slot gets the snapshot of a finished conversation, also when the
two come one after the other), TGI PR#2489 and vllm PR#35219 (pages that were never filled or not
erased are read).
"""

import asyncio

from sekisho.probe.budget import Cost
from sekisho.probe.canary import QUESTIONS, Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask
from sekisho.probe.model import TechniqueResult
from sekisho.probe.techniques.base import WORDS_TO_TOKENS, Notes, Technique


class Residue(Technique):
    """In each round the first account fills memory with secrets and ends; at once the second asks
    every question of `QUESTIONS` and one long one, all together.

    Args:
        rounds: how often; every question of every round is a trial.
        plants: documents per round; together they should exceed what the endpoint can hold.
        words: of a document, and of the long question.
        sensitivity: what the self-test measured.
    """

    name = "residue"
    goal = "see what the other account left behind, in the first answers after it ended"
    report = "llama.cpp#27148"

    def __init__(
        self,
        *,
        rounds: int = 10,
        plants: int = 4,
        words: int = 400,
        answer_tokens: int = 48,
        sensitivity: float = 1.0,
    ) -> None:
        self._rounds = rounds
        self._plants = plants
        self._words = words
        self._answer_tokens = answer_tokens
        self._sensitivity = sensitivity

    def cost(self) -> Cost:
        planting = Cost(1, (self._words + 40) * WORDS_TO_TOKENS, self._answer_tokens)
        short = Cost(1, 20 * WORDS_TO_TOKENS, self._answer_tokens)
        each = planting.times(self._plants) + short.times(len(QUESTIONS)) + planting
        return each.times(self._rounds)

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        notes = Notes(self, endpoint, mint)
        for _ in range(self._rounds):
            documents = [mint.document(self._words) for _ in range(self._plants)]
            plantings = await asyncio.gather(
                *(notes.plant(document, self._answer_tokens) for document in documents)
            )
            asks = self._asks(mint)
            if not any(isinstance(outcome, Answer) for outcome in plantings):
                notes.skipped(plantings[0], len(asks))
                continue
            await asyncio.gather(*(notes.look(ask) for ask in asks))
        return notes.conclude(self._sensitivity)

    def _asks(self, mint: Mint) -> list[Ask]:
        prompts = [*QUESTIONS.values(), f"{mint.filler(self._words)} {QUESTIONS['continue']}"]
        return [Ask(prompt=prompt, answer_tokens=self._answer_tokens) for prompt in prompts]
