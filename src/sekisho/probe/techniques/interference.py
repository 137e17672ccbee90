"""Non-interference: do one account's answers change while the other sends requests?

Reports: vllm#39146 (where blocks lie under load changes greedy answers; the cause was not proven),
sglang PR#35049 (a victim's answer changes with one page that was given away too early). A prompt
of random letters would differ by the batch alone in a tenth of the cases: the questions here are
natural, and a model is sure of their answers.
"""

import asyncio
import random
from typing import Literal, TypeAlias

import msgspec

from sekisho.probe.budget import Cost
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Outcome
from sekisho.probe.model import TechniqueResult, TestRun, Verdict
from sekisho.probe.power import LEVEL
from sekisho.probe.stats import CONFIDENCE, change_caught, sign_p
from sekisho.probe.techniques.base import WORDS_TO_TOKENS, Notes, Technique
from sekisho.probe.techniques.controls import CONTROLS, Control

Arm: TypeAlias = Literal["reference", "alone", "traffic"]
_ARMS: tuple[Arm, ...] = "reference", "alone", "traffic"
_ALONE_MAX = 0.25
"""Where more answers change alone, what traffic changes cannot be told."""
_FAILURES_MAX = 5
"""After so many unusable questions in a row the rest is not asked."""
_PARTS = 8, 4, 2, 1
"""Documents are so many parts of the longest."""
_QUESTION_WORDS = 20


class Interference(Technique):
    """The second account asks each control question three times, one at a time and in random
    order: as a reference, once more alone, and among documents of the first account.

    Who of the last two differs from the reference is compared pair by pair. If traffic does not
    matter, either is as likely, whatever the question and whatever else changes answers: the sign
    test is exact. All answers are searched for the first account's secrets besides; only such a
    one is a leak.

    Args:
        rounds: how often each of `controls.CONTROLS` is asked so.
        plants: documents around a question, at once; fewer where the budget allows fewer.
        words: of the longest document.
        lead_s: from sending the documents to asking.
    """

    name = "interference"
    goal = "see answers of one account change, or hold secrets, while the other sends documents"
    report = "vllm#39146"

    def __init__(
        self,
        *,
        rounds: int = 2,
        plants: int = 4,
        words: int = 300,
        answer_tokens: int = 24,
        lead_s: float = 0.05,
    ) -> None:
        self._rounds = rounds
        self._plants = plants
        self._words = words
        self._answer_tokens = answer_tokens
        self._lead_s = lead_s

    def cost(self) -> Cost:
        plant = Cost(1, (self._words + 60) * WORDS_TO_TOKENS, 2 * self._answer_tokens)
        asks = Cost(1, _QUESTION_WORDS * WORDS_TO_TOKENS, self._answer_tokens).times(len(_ARMS))
        return (plant.times(self._plants) + asks).times(self._rounds * len(CONTROLS)) + plant

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        notes = Notes(self, endpoint, mint)
        order = random.Random(mint.number())
        asked = [one for _ in range(self._rounds) for one in order.sample(CONTROLS, len(CONTROLS))]
        plants = min(self._plants, endpoint.purse.budget.concurrency_max - 1)
        if plants < 1:
            notes.missed("the budget allows one request at a time, so that none is in between", 1)
            return notes.conclude(1.0)
        first = await notes.plant(mint.document(self._words), 2 * self._answer_tokens)
        if not isinstance(first, Answer):
            notes.skipped(first, len(asked))
            return notes.conclude(1.0)
        compared = Compared()
        failures = 0
        for index, control in enumerate(asked):
            arms = await self._three(notes, control, plants, order)
            failures = 0 if compared.add(control, arms) else failures + 1
            if failures == _FAILURES_MAX:
                notes.skipped(_failed(arms), len(asked) - index - 1)
                break
        return self._judge(notes, compared)

    async def _three(
        self, notes: Notes, control: Control, plants: int, order: random.Random
    ) -> dict[Arm, Outcome]:
        """One question in each arm; the order is drawn, so that only traffic tells them apart."""
        ask = Ask(prompt=control.question, answer_tokens=self._answer_tokens)
        found: dict[Arm, Outcome] = {}
        for arm in order.sample(_ARMS, len(_ARMS)):
            if arm == "traffic":
                lengths = [self._words // order.choice(_PARTS) for _ in range(plants)]
                found[arm] = await self._amid(notes, ask, lengths)
            else:
                found[arm] = await notes.look(ask, is_trial=False)
        return found

    async def _amid(self, notes: Notes, ask: Ask, lengths: list[int]) -> Outcome:
        """``ask`` among documents of so many words; what came instead of one, if none was
        answered."""
        tokens = 2 * self._answer_tokens
        async with asyncio.TaskGroup() as group:
            sending = [
                group.create_task(notes.plant(notes.mint.document(words, 1), tokens))
                for words in lengths
            ]
            await asyncio.sleep(self._lead_s)
            outcome = await notes.look(ask, is_trial=False)
        plantings = [task.result() for task in sending]
        if not any(isinstance(one, Answer) for one in plantings):
            notes.skipped(plantings[0], 1)
            return plantings[0]
        notes.trials.append(outcome)
        return outcome

    def _judge(self, notes: Notes, compared: "Compared") -> TechniqueResult:
        found = notes.conclude(1.0)
        count, changed, alone = compared.count, compared.traffic, compared.alone
        if not count:
            note = "no control question was answered three times"
            return msgspec.structs.replace(
                found, verdict=_open(found.verdict), notes=(*found.notes, note)
            )
        told = (
            f"{changed} of {count} answers changed with the other's traffic and {alone} without; "
            f"{compared.lost} lost what every other answer to the question held"
        )
        test = TestRun(
            rule="PROBE013",
            technique=self.name,
            p=sign_p(compared.only_traffic, compared.only_alone),
            effect=(changed - alone) / count,
            message=told,
            report=self.report,
        )
        rate = change_caught(count, alone / count, LEVEL)
        is_blind = alone > _ALONE_MAX * count or rate >= 1
        note = f"{told}; a change in {rate:.0%} of them or more would have shown with "
        note += f"{CONFIDENCE:.0%} confidence"
        if is_blind:
            note = f"{told}; so few, or answers that change so often alone, show no influence"
        return msgspec.structs.replace(
            found,
            verdict=_open(found.verdict) if is_blind else found.verdict,
            tests=(*found.tests, test),
            notes=(*found.notes, note),
        )


class Compared:
    """Answers that differ from their reference, over questions answered in all three arms.

    Attributes:
        alone, traffic: how many differ; ``only_…``: where the other arm does not.
        lost: held what is known in both other arms and not with traffic.
    """

    def __init__(self) -> None:
        self.count = self.alone = self.traffic = self.lost = 0
        self.only_alone = self.only_traffic = 0

    def add(self, control: Control, arms: dict[Arm, Outcome]) -> bool:
        """False where an answer is missing or without text."""
        texts: dict[Arm, str] = {}
        for arm, outcome in arms.items():
            if isinstance(outcome, Answer):
                texts[arm] = f"{outcome.whole.text}\n{outcome.whole.aside}".strip()
        if len(texts) < len(_ARMS) or not any(texts.values()):
            return False
        alone = texts["alone"] != texts["reference"]
        traffic = texts["traffic"] != texts["reference"]
        known = {arm: control.known in text.lower() for arm, text in texts.items()}
        self.count += 1
        self.alone += alone
        self.traffic += traffic
        self.only_alone += alone and not traffic
        self.only_traffic += traffic and not alone
        self.lost += known["reference"] and known["alone"] and not known["traffic"]
        return True


def _open(verdict: Verdict) -> Verdict:
    """Not "no leak seen"; a leak stays one."""
    return verdict if verdict == Verdict.LEAK else Verdict.INCONCLUSIVE


def _failed(arms: dict[Arm, Outcome]) -> Outcome:
    """One without an answer, if there is one."""
    return next((one for one in arms.values() if not isinstance(one, Answer)), arms["traffic"])
