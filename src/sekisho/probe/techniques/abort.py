"""Abort: does what one account cancelled show in answers of the other?

Reports: sglang#23392 (two requests cancelled some milliseconds after their start and sent again
change the answer of a third), sglang PR#32564 and vllm PR#32255 (pages of an aborted request are
given to the next one while they are still written), OpenAI 2023-03-20 and metabase PR#49773 (a
request that was cancelled leaves its answer in a connection that the next one uses).
"""

import asyncio
from itertools import cycle

from sekisho.probe.budget import Cost
from sekisho.probe.canary import QUESTIONS, Document, Mint
from sekisho.probe.cut import LEFT, Cut
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Outcome, Refused
from sekisho.probe.model import TechniqueResult
from sekisho.probe.techniques.base import WORDS_TO_TOKENS, Notes, Technique, planting, unprepared

_HALF_WAYS = 2  # a half-closed connection, and half of a body
_ESTIMATED = 3
"""Tokens of a word; who leaves is told no count, so that the estimate of the purse is paid."""


class Abort(Technique):
    """In each round the first account is answered once, which tells how long that takes; then it
    sends several documents together and leaves each at another moment of that time, most of them
    early. One connection is half closed, and one ends in the middle of its body. Whenever one is
    cut the second account asks at once, besides a question that runs all the time. Then the same
    documents are sent, and left, again.

    A trial counts where the request before it really was cut.

    Args:
        rounds: how often.
        leaves: requests of a round that are left in time.
        retries: how often the same are sent again.
        leave_max_s: the latest moment of leaving, however long answers take.
        words: of a document.
        answer_tokens: of the answers that are left; the second account asks for half.
    """

    name = "abort"
    goal = "see the other account's text in answers that follow a request which it cancelled"
    report = "sglang#23392"

    def __init__(
        self,
        *,
        rounds: int = 4,
        leaves: int = 6,
        retries: int = 1,
        leave_max_s: float = 2.0,
        words: int = 200,
        answer_tokens: int = 96,
        sensitivity: float = 1.0,
    ) -> None:
        self._rounds = rounds
        self._leaves = leaves
        self._retries = retries
        self._leave_max_s = leave_max_s
        self._words = words
        self._answer_tokens = answer_tokens
        self._sensitivity = sensitivity

    def cost(self) -> Cost:
        plant = Cost(1, (self._words + 40) * WORDS_TO_TOKENS, self._answer_tokens)
        short = Cost(1, 20 * WORDS_TO_TOKENS, self._answer_tokens // 2)
        cut = Cost(1, (self._words + 40) * _ESTIMATED, self._answer_tokens)
        wave = (cut + short).times(self._leaves + _HALF_WAYS) + plant
        return (plant + wave.times(1 + self._retries)).times(self._rounds)

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        notes = Notes(self, endpoint, mint)
        for number in range(self._rounds):
            whole = await notes.plant(mint.document(self._words), self._answer_tokens)
            if isinstance(whole, Answer):
                cuts = self._cuts(whole.seconds, number)
                documents = [mint.document(self._words) for _ in cuts]
                for _ in range(1 + self._retries):
                    await self._wave(notes, documents, cuts)
            else:
                count = self._leaves + _HALF_WAYS + 1
                notes.skipped(whole, count * (1 + self._retries))
        return notes.conclude(self._sensitivity)

    async def _wave(self, notes: Notes, documents: list[Document], cuts: list[Cut]) -> None:
        """All documents are sent and cut together."""
        half = self._answer_tokens // 2
        filler = f"{notes.mint.filler(self._words)} {QUESTIONS['continue']}"
        runs = Ask(prompt=filler, answer_tokens=half, stream=True)
        questions = zip(cycle(QUESTIONS.values()), cycle((True, False, True)), strict=False)
        asks = [
            Ask(prompt=question, answer_tokens=half, stream=stream)
            for question, stream in (next(questions) for _ in cuts)
        ]
        await asyncio.gather(
            notes.look(runs),
            *(
                self._cut(notes, document, cut, ask)
                for document, cut, ask in zip(documents, cuts, asks, strict=True)
            ),
        )

    async def _cut(self, notes: Notes, document: Document, cut: Cut, ask: Ask) -> None:
        """One document is sent and left, and the second account asks."""
        endpoint = notes.endpoint
        planted = planting(document, self._answer_tokens, stream=ask.stream)
        sending = endpoint.ask_and_leave(
            endpoint.accounts[0],
            planted,
            cut.after_s,
            share=cut.share,
            half_close=cut.half_close,
        )
        outcome = await notes.plant_by(document.canaries, sending)
        failed = _failed(outcome, cut)
        if failed:
            notes.missed(failed)
        await notes.look(ask, is_trial=not failed)

    def _cuts(self, seconds: float, number: int) -> list[Cut]:
        """Moments from 0 up to ``seconds``, each round others; early ones lie closer together, as
        it is there that a request is admitted, prefilled and handed over."""
        span_s = min(seconds, self._leave_max_s)
        shares = [(i + number / self._rounds) / self._leaves for i in range(self._leaves)]
        return [
            *(Cut(after_s=span_s * share**2) for share in shares),
            Cut(half_close=True),
            Cut(share=0.5, after_s=span_s * shares[0] ** 2),
        ]


def _failed(outcome: Outcome, cut: Cut) -> str:
    """Why this request of the first account prepares no trial; empty where it does."""
    if isinstance(outcome, Refused):
        return unprepared(outcome)
    if isinstance(outcome, Answer):
        return "" if cut.half_close else "the first account's answer was whole before it left"
    # A server may drop a connection that is half closed.
    is_cut = outcome.reason == LEFT or cut.half_close
    return "" if is_cut and outcome.sent and outcome.status in (0, 200) else outcome.reason
