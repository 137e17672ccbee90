"""Stories at temperature 1, the same asked of both accounts: are any drawn only once?

The first account asks for each story three times, each time a thousandth colder, so that a cache of
whole requests holds three; then the second asks as the first did first. Nobody has a secret here.
Were all four drawn alike, each of their six pairs would be as likely to be the only equal one,
whatever the model likes to write. Where a cache is shared it is the first's first and the second's.
An endpoint that draws nothing, or always with one seed, gives four equal ones, which tell nothing.
One that makes its seed out of the whole request looks as if it had such a cache.
"""

import asyncio
import itertools
from collections.abc import Sequence

import msgspec

from sekisho.probe.budget import Cost
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Outcome
from sekisho.probe.model import TestRun
from sekisho.probe.stats import rate_tail

_STORY = "Story {}. Write a long and surprising story that begins at the {} of a small town."
_PROMPT_TOKENS = 60
_DRAWS = 3
_BEGIN = 80
"""Characters of two stories that are compared."""
_CHANCE = 1 / 6


def cost(count: int, answer_tokens: int) -> Cost:
    """Of `tell`."""
    return Cost(1, _PROMPT_TOKENS, answer_tokens).times(count * (_DRAWS + 1))


async def tell(
    endpoint: Endpoint, mint: Mint, count: int, answer_tokens: int, pause_s: float
) -> dict[int, list[Outcome]]:
    """By the number of each story: three of the first account, and last one of the second."""
    first, second = endpoint.accounts
    asks = {}
    for _ in range(count):
        number, place = mint.number(), mint.canary().place
        asks[number] = Ask(
            prompt=_STORY.format(number, place),
            answer_tokens=answer_tokens,
        )
    found: dict[int, list[Outcome]] = {number: [] for number in asks}
    for account, temperature in ((first, 1.0), (first, 0.999), (first, 0.998), (second, 1.0)):
        if account is second:
            await asyncio.sleep(pause_s)
        drawn = await asyncio.gather(
            *(
                endpoint.ask(
                    account, msgspec.structs.replace(ask, fields={"temperature": temperature})
                )
                for ask in asks.values()
            )
        )
        for number, outcome in zip(asks, drawn, strict=True):
            found[number].append(outcome)
    return found


def coincide(technique: str, stories: Sequence[Sequence[Outcome]], report: str) -> TestRun:
    """Is the only equal pair the first account's first and the second's, too often for chance?"""
    hits = alone = usable = 0
    for story in stories:
        texts = [one.whole.text for one in story if isinstance(one, Answer)]
        if len(texts) <= _DRAWS:
            continue
        usable += 1
        begins = [text[:_BEGIN] for text in texts]
        equal = [pair for pair in itertools.combinations(range(4), 2) if _same(begins, pair)]
        alone += len(equal) == 1
        hits += equal == [(0, _DRAWS)]
    return TestRun(
        rule="PROBE014",
        technique=technique,
        p=rate_tail(hits, alone, _CHANCE),
        effect=hits / usable if usable else 0.0,
        message=f"{hits} of {usable} stories of the second account begin as the first's",
        report=report,
    )


def _same(begins: Sequence[str], pair: tuple[int, int]) -> bool:
    return begins[pair[0]] == begins[pair[1]]
