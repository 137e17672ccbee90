"""Crossed streams: many at once, each with a tag; every event must carry its own.

Reports: OpenAI 2023-03-20 (a cancelled request leaves its answer in a pooled connection),
cloudflare/ai#620 and langchain-oracle PR#256 (shared state of streams), mlx-lm#965 (a batch of
concurrent requests mixes), vllm#56009 (a value per request that the answer must repeat).
"""

import asyncio
import re
from collections import defaultdict

from sekisho.probe.budget import Cost
from sekisho.probe.canary import Canary, Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Outcome
from sekisho.probe.model import Finding, TechniqueResult, TestRun, conclude
from sekisho.probe.oracles import exact
from sekisho.probe.stats import rate_tail
from sekisho.probe.techniques.base import Technique
from sekisho.probe.techniques.tags import PROMPT_TOKENS, prompt, sensitivity

_GROUP = re.compile(r"(?<!\d)\d{4}(?!\d)")


class Crossed(Technique):
    """Both accounts open streams together; each asks for its own tag, again and again.

    A tag is a secret of full entropy, so a foreign one in a stream is proof, and between two
    streams of one account it is too. An endpoint whose answers do not repeat their own tags could
    cross them unseen: the share that does repeat it counts as the sensitivity.

    Args:
        rounds, streams: so many streams of each account, so many times.
    """

    name = "crossed"
    goal = "see an event of one stream in another that runs at the same time"
    report = "cloudflare/ai#620"

    def __init__(self, *, rounds: int = 4, streams: int = 8, answer_tokens: int = 96) -> None:
        self._rounds = rounds
        self._streams = streams
        self._answer_tokens = answer_tokens

    def cost(self) -> Cost:
        each = Cost(1, PROMPT_TOKENS, self._answer_tokens)
        return each.times(2 * self._streams * self._rounds)

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        tags: dict[int, Canary] = {}
        trials: list[Outcome] = []

        async def stream(index: int) -> None:
            tag = mint.canary("account number")
            ask = Ask(prompt=prompt(tag), answer_tokens=self._answer_tokens, stream=True)
            outcome = await endpoint.ask(endpoint.accounts[index % 2], ask)
            tags[outcome.serial] = tag
            trials.append(outcome)

        for _ in range(self._rounds):
            await asyncio.gather(*(stream(index) for index in range(2 * self._streams)))
        sent = {serial: [tag] for serial, tag in tags.items()}
        findings = exact(self.name, trials, sent, rule="PROBE008", report=self.report)
        findings += self._names(trials)
        answers = [one for one in trials if isinstance(one, Answer)]
        tests = (self.fragments(answers, tags),) if answers else ()
        shown = sensitivity(trials, tags)
        return conclude(self.name, trials, findings, tests=tests, sensitivity=shown)

    def fragments(self, answers: list[Answer], tags: dict[int, Canary]) -> TestRun:
        """Streams that are crossed word by word hold no whole tag, but groups of its digits.

        Counted are the numbers of four digits of each stream that are not its own, each once. One
        that knows nothing of the other tags is a group of one of them with probability
        ``groups / 10**4`` at most.
        """
        shown = others = hits = 0
        groups = {serial: set(tag.text.split()) for serial, tag in tags.items()}
        every = set().union(*groups.values())
        for answer in answers:
            own = groups[answer.serial]
            numbers = set(_GROUP.findall(answer.whole.text)) - own
            others += len(numbers)
            hits += len(numbers & every)
            shown += bool(numbers & every)
        return TestRun(
            rule="PROBE011",
            technique=self.name,
            p=rate_tail(hits, others, min(1.0, len(every) / 10**4)),
            effect=shown / len(answers),
            message=f"{hits} of {others} numbers that are not its own are parts of other tags",
            report=self.report,
        )

    def _names(self, trials: list[Outcome]) -> list[Finding]:
        """An endpoint names each answer once, the same in all of its events (OpenAI's ``id``)."""
        owners: dict[str, set[int]] = defaultdict(set)
        found = []
        for outcome in trials:
            events = outcome.whole.events if isinstance(outcome, Answer) else ()
            names = {event.answer_name for event in events} - {""}
            for name in names:
                owners[name].add(outcome.serial)
            if len(names) > 1:
                message = (
                    f"the stream of request {outcome.serial} has {len(names)} names of answers"
                )
                found.append(self._shared(message, outcome.serial, len(names)))
        for serials in owners.values():
            if len(serials) > 1:
                listed = ", ".join(str(serial) for serial in sorted(serials)[:5])
                message = f"the answers to requests {listed} have one name"
                found.append(self._shared(message, min(serials), len(serials)))
        return found

    def _shared(self, message: str, serial: int, count: int) -> Finding:
        return Finding(
            rule="PROBE009",
            technique=self.name,
            message=message,
            seen_in=serial,
            observed=count,
            expected=1,
            report=self.report,
        )
