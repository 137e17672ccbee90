"""Timing: does one account's first token come sooner after a prefix that the other sent?

Reports: vllm PR#17045 (GHSA-4qjh-9fv9-r85r: prompts of one user are guessed by how soon the first
token comes for another), and CacheProbe (a gateway puts many users into one account of its
provider, and so into one cache). The procedure is that of Gu et al. 2025 (arXiv 2502.07776) and
differs in what `Timing` states.
"""

import asyncio
from collections import Counter

import msgspec
import numpy as np

from sekisho.probe.budget import Cost
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Account, Endpoint
from sekisho.probe.exchange import Answer, Ask, Inconclusive, Outcome
from sekisho.probe.model import TechniqueResult, TestRun, Times, Verdict, conclude
from sekisho.probe.oracles import timing
from sekisho.probe.power import COUNTS, LEVEL, apart_s, power_curve, share_caught, shift_caught
from sekisho.probe.stats import ALPHA, CONFIDENCE, compare, power, samples_needed
from sekisho.probe.techniques.base import WORDS_TO_TOKENS, Technique

_FAILURES_MAX = 5
"""After so many unusable pairs in a row the rest is not tried."""
_NUMBERS = 2  # of six digits, at the beginning of a prefix: no prompt begins like another


class Timing(Technique):
    """In each pair the first account sends a prompt; then the second sends two as long, one with
    the same first 0.95 and one that is all new, and waits for one token of each.

    Which of the two comes first is random, and each comes first in half of the pairs: whatever a
    place in the order does to times, it does to both kinds alike. The number of pairs is fixed
    before, and a pair of which one request fails is left out whole.

    Before that the first account does the same with its own prefix. What that shows, the second
    account's times are judged by: a cache that nobody sees cannot be seen to be shared.

    Args:
        samples: pairs of the second account; Gu et al. take 250.
        own_samples: pairs of the first account.
        words: of a prompt; a third of it where that is refused. Providers may cache only prompts
            of 1,024 tokens and more.
        prefix_fraction: of a prompt, what may be in a cache.
        pause_s: before each request of a pair; a cache may keep a prompt only after its answer.
    """

    name = "timing"
    goal = "see by the time of the first token that the other account's prefix is in a cache"
    report = "vllm PR#17045"

    def __init__(
        self,
        *,
        samples: int = 60,
        own_samples: int = 30,
        words: int = 400,
        prefix_fraction: float = 0.95,
        pause_s: float = 0.1,
    ) -> None:
        self._samples = samples
        self._own_samples = own_samples
        self._words = words
        self._prefix_fraction = prefix_fraction
        self._pause_s = pause_s

    def cost(self) -> Cost:
        each = Cost(1, (self._words + 20) * WORDS_TO_TOKENS, 1)
        return each.times(3 * (self._samples + self._own_samples) + _Stopwatch.TRIES_MAX)

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        watch = _Stopwatch(endpoint, mint, self._prefix_fraction, self._pause_s)
        refused = await watch.start(self._words)
        if refused is not None:
            return conclude(self.name, [], [], unplanted={_reason(refused): self._samples})
        rng = np.random.default_rng(mint.number())
        planter, asker = endpoint.accounts
        own = await watch.pairs(planter, balanced(self._own_samples, rng))
        other = await watch.pairs(asker, balanced(self._samples, rng))
        return self._judge(own, other, watch.words, rng)

    def _judge(
        self, own: "_Pairs", other: "_Pairs", words: int, rng: np.random.Generator
    ) -> TechniqueResult:
        """The test, and what it would have shown."""
        tests: tuple[TestRun, ...] = ()
        if other.hits_s:
            tests = (timing(self.name, other.hits_s, other.misses_s, report=self.report),)
        found = conclude(self.name, other.trials, [], tests=tests, unplanted=other.unusable)
        if not other.hits_s:
            return found
        count, misses = len(other.hits_s), other.misses_s
        cached = compare(own.hits_s, own.misses_s) if own.hits_s else None
        seen = cached is not None and cached.p <= ALPHA and cached.shift_s > 0
        if cached is not None and seen:
            shift: float | None = cached.shift_s
            rate = share_caught(misses, cached.shift_s, count, rng)
            all_hit = power(misses, cached.shift_s, count, rng, alpha=LEVEL)
            note = (
                f"the endpoint caches, since the first account's own prefix came sooner in "
                f"{cached.effect:.0%} of pairs, by {_ms(cached.shift_s)}; if every request of the "
                f"second hit as that did, {count} times of each kind would have shown it with a "
                f"probability of {all_hit.low:.0%} to {all_hit.high:.0%}"
            )
            if rate >= 1 and cached.effect > 0.5:
                needed = samples_needed(cached.effect, LEVEL, CONFIDENCE)
                note += f", which is too little: about {needed:,} would do"
        else:
            shift = shift_caught(misses, count, rng)
            rate = share_caught(misses, apart_s(misses), count, rng)
            note = _unseen(own, words)
            if shift is None:
                note += "; so few times show nothing"
            else:
                note += (
                    f"; the rate caught holds for hits sooner than every miss, and if every "
                    f"request hit, {_ms(shift)} sooner would have been enough"
                )
        is_blind = rate >= 1 and found.verdict == Verdict.NO_LEAK_SEEN
        return msgspec.structs.replace(
            found,
            verdict=Verdict.INCONCLUSIVE if is_blind else found.verdict,
            rate_caught=rate,
            times=other.times(),
            own_times=own.times() if own.hits_s else None,
            power=power_curve(misses, shift, rng, counts=sorted({*COUNTS, count})) if shift else (),
            notes=(note,),
        )


def balanced(count: int, rng: np.random.Generator) -> list[bool]:
    """For each pair, whether its hit comes first: in half of them, in random order.

    Were each drawn alone, a place that is always faster would move both samples apart by chance
    farther than the test of two independent samples allows.
    """
    return [bool(one) for one in rng.permutation(np.arange(count) % 2 == rng.integers(2))]


def first_token_s(answer: Answer) -> float:
    """When the first text of a stream came; the whole answer's time where none did."""
    return next((event.at_s for event in answer.whole.events if event.text), answer.seconds)


class _Pairs:
    """Times of one account, and why others are missing; ``trials``: what could have hit."""

    def __init__(self) -> None:
        self.hits_s: list[float] = []
        self.misses_s: list[float] = []
        self.trials: list[Outcome] = []
        self.unusable: Counter[str] = Counter()

    def times(self) -> Times:
        return Times(hits_s=tuple(self.hits_s), misses_s=tuple(self.misses_s))

    def missing(self, reason: str, count: int) -> None:
        if count:
            self.unusable[reason] += count


class _Stopwatch:
    """Takes times of one endpoint, one request at a time."""

    TRIES_MAX = 5
    """Requests of `start`, at most."""

    def __init__(self, endpoint: Endpoint, mint: Mint, fraction: float, pause_s: float) -> None:
        self._endpoint = endpoint
        self._mint = mint
        self._fraction = fraction
        self._pause_s = pause_s
        self._stream = True
        self.words = 0

    async def start(self, words: int) -> Outcome | None:
        """Learn which length is taken and whether there are streams, and open connections; what
        came instead of an answer, if that cannot be."""
        planter, asker = self._endpoint.accounts
        outcome: Outcome | None = None
        for self.words in (words, words // 3):
            for self._stream in (True, False):
                outcome = await self._ask(asker, self._prefix() + self._rest())
                if isinstance(outcome, Answer):
                    first = await self._ask(planter, self._prefix() + self._rest())
                    return None if isinstance(first, Answer) else first
        return outcome

    async def pairs(self, account: Account, orders: list[bool]) -> _Pairs:
        """One pair for each of ``orders``, which say whether the hit comes first."""
        found = _Pairs()
        failures = 0
        for index, hit_first in enumerate(orders):
            failed = await self._pair(account, hit_first, found)
            failures = failures + 1 if failed else 0
            if failed:
                found.missing(failed, 1)
            if failures == _FAILURES_MAX:
                found.missing(failed, len(orders) - index - 1)
                break
        return found

    async def _pair(self, account: Account, hit_first: bool, found: _Pairs) -> str:
        """Two times into ``found``; or why there are none."""
        prefix = self._prefix()
        planted = await self._ask(self._endpoint.accounts[0], prefix + self._rest())
        if not isinstance(planted, Answer):
            return _reason(planted)
        times_s: dict[bool, float] = {}
        trial: Outcome = planted
        for is_hit in (hit_first, not hit_first):
            await asyncio.sleep(self._pause_s)
            begin = prefix if is_hit else self._prefix()
            outcome = await self._ask(account, begin + self._rest())
            if not isinstance(outcome, Answer):
                return _reason(outcome)
            times_s[is_hit] = first_token_s(outcome)
            trial = outcome if is_hit else trial
        found.hits_s.append(times_s[True])
        found.misses_s.append(times_s[False])
        found.trials.append(trial)
        return ""

    async def _ask(self, account: Account, prompt: str) -> Outcome:
        ask = Ask(prompt=prompt, answer_tokens=1, stream=self._stream)
        return await self._endpoint.ask(account, ask)

    def _prefix(self) -> str:
        """New from its first word on."""
        words = max(1, round(self.words * self._fraction))
        numbers = " ".join(str(self._mint.number()) for _ in range(_NUMBERS))
        return f"{numbers} {self._mint.filler(words)} "

    def _rest(self) -> str:
        """The end of a prompt, new as well: no prompt is sent twice."""
        words = max(1, self.words - round(self.words * self._fraction))
        return f"{self._mint.number()} {self._mint.filler(words)}"


def _unseen(own: _Pairs, words: int) -> str:
    if not own.hits_s:
        return "whether the endpoint caches at all could not be measured"
    p = compare(own.hits_s, own.misses_s).p
    return (
        f"no cache was seen at all, since the first account's own prefix of prompts of {words} "
        f"words came no sooner ({len(own.hits_s)} pairs, p = {p:.2g})"
    )


def _reason(outcome: Outcome) -> str:
    return outcome.reason if isinstance(outcome, Inconclusive) else "a request to time was refused"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
