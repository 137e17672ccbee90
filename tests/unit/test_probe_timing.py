"""Timing against a toy with a prefix cache: shared between accounts, one for each, or none.

Its time is counted and not measured, but for one test: what it computes moves a clock that only
the probe's stopwatch reads. Noise has a seed.
"""

import asyncio
import random
import types
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from probe_kit import (
    STREAM_HEAD,
    Request,
    Speak,
    completion,
    endpoint,
    http,
    refusal,
    serving,
    stream,
)
from sekisho.probe.budget import Budget
from sekisho.probe.canary import Mint
from sekisho.probe.exchange import Answer, Ask, Event, Whole
from sekisho.probe.model import TechniqueResult, Verdict
from sekisho.probe.oracles import settle, timing
from sekisho.probe.techniques.timing import Timing, balanced, first_token_s

SEED = 20261202
Scope = Literal["all", "account", "none"]


class Caching:
    """Takes 0.1 ms for each word that is not in its cache, and a random time besides.

    Args:
        spend: takes seconds.
        streams: whether it streams.
        window: words; more are refused.
        share: the share of requests that look into the cache.
    """

    def __init__(
        self,
        scope: Scope,
        spend: Callable[[float], Any],
        *,
        streams: bool = True,
        window: int = 1000,
        share: float = 1.0,
        word_s: float = 1e-4,
    ) -> None:
        self._scope = scope
        self._spend = spend
        self._streams = streams
        self._window = window
        self._share = share
        self._word_s = word_s
        self._random = random.Random(SEED + 1)
        self._stored: list[tuple[str, list[str]]] = []

    async def speak(self, request: Request, writer: asyncio.StreamWriter) -> None:
        words = request.prompt.split()
        if len(words) > self._window:
            writer.write(refusal("too long"))
            return
        owner = request.account if self._scope == "account" else ""
        cached = 0
        if self._scope != "none" and self._random.random() < self._share:
            texts = [text for scope, text in self._stored if scope == owner]
            cached = max((_common(words, text) for text in texts), default=0)
        self._stored.append((owner, words))
        noise_s = self._random.lognormvariate(-5, 0.5)
        await self._spend((len(words) - cached) * self._word_s + noise_s)
        if not request.fields.get("stream"):
            writer.write(http(completion(words[-1], prompt_tokens=len(words))))
        elif self._streams:
            writer.write(STREAM_HEAD)
            for one in stream(["", words[-1]], prompt_tokens=len(words)):
                writer.write(one)
        else:
            writer.write(http(b'{"detail": "not found"}', 404))


def _common(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def run(technique: Timing, speak: Speak, **options: Any) -> TechniqueResult:
    async def main() -> TechniqueResult:
        async with serving(speak) as server, endpoint(server, **options) as found:
            mint = Mint(SEED, random.Random(SEED).randrange)
            result = await technique.run(found, mint)
            assert found.purse.spent.requests <= technique.cost().requests
            assert found.purse.spent.tokens <= technique.cost().tokens
            return result

    [settled] = settle([asyncio.run(main())]).techniques
    return settled


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Any]:
    """Moves the stopwatch's clock."""
    now = [0.0]

    async def forward(seconds: float) -> None:
        now[0] += seconds

    watch = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("sekisho.probe.reading.time", watch)
    return forward


SMALL = Timing(samples=24, own_samples=12, words=200, pause_s=0)


def test_a_prefix_cache_that_accounts_share_is_found(spend: Callable[[float], Any]) -> None:
    found = run(SMALL, Caching("all", spend).speak)
    assert found.verdict == Verdict.LEAK
    assert [(one.rule, one.report) for one in found.findings] == [("PROBE010", "vllm PR#17045")]
    assert found.times is not None
    assert found.own_times is not None
    assert len(found.times.hits_s) == len(found.times.misses_s) == 24
    assert np.median(found.times.hits_s) < np.median(found.times.misses_s)
    assert len(found.own_times.hits_s) == 12
    assert found.sentence().startswith("leak: 1 finding; the endpoint caches")


def test_a_cache_for_each_account_is_none_between_them(spend: Callable[[float], Any]) -> None:
    """And the first account's own prefix shows that a shared one would have been seen."""
    found = run(SMALL, Caching("account", spend).speak)
    assert found.verdict == Verdict.NO_LEAK_SEEN
    assert found.findings == ()
    assert len(found.tests) == 1
    assert 0.2 < found.rate_caught < 0.9
    assert "the endpoint caches" in found.sentence()
    assert "no leak seen in 24 trials" in found.sentence()
    assert "probability of 99% to 100%" in found.sentence()
    points = {(point.count, point.power.low > 0.9) for point in found.power}
    assert {(5, False), (24, True), (250, True)} <= points
    assert max(point.shift_s for point in found.power) > 0.01


def test_where_nothing_is_cached_the_verdict_says_so(spend: Callable[[float], Any]) -> None:
    found = run(SMALL, Caching("none", spend).speak)
    assert found.verdict == Verdict.NO_LEAK_SEEN
    assert found.findings == ()
    assert "no cache was seen at all" in found.sentence()
    assert "of prompts of 200 words" in found.sentence()
    assert "ms sooner would have been enough" in found.sentence()
    assert 0.2 < found.rate_caught < 0.9
    assert found.power


def test_a_cache_too_small_to_be_told_is_inconclusive(spend: Callable[[float], Any]) -> None:
    """The first account sees it in many pairs; the second has too few for the size it has."""
    few = Timing(samples=6, own_samples=100, words=200, pause_s=0)
    found = run(few, Caching("account", spend, word_s=1e-5).speak)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert found.rate_caught == 1
    assert "which is too little: about" in found.sentence()


def test_too_few_pairs_show_nothing(spend: Callable[[float], Any]) -> None:
    few = Timing(samples=4, own_samples=2, words=200, pause_s=0)
    found = run(few, Caching("none", spend).speak)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "so few times show nothing" in found.sentence()
    assert found.power == ()


@pytest.mark.parametrize("options", [{"streams": False}, {"window": 100}, {"share": 0.6}])
def test_a_shared_cache_is_found_all_the_same(
    options: dict[str, Any], spend: Callable[[float], Any]
) -> None:
    """Without streams, with a shorter prompt, and where not every request finds the cache."""
    found = run(SMALL, Caching("all", spend, **options).speak)
    assert found.verdict == Verdict.LEAK


def test_a_shared_cache_is_found_by_real_time() -> None:
    toy = Caching("all", asyncio.sleep, word_s=1e-3)
    found = run(Timing(samples=14, own_samples=4, words=100, pause_s=0.001), toy.speak)
    assert found.verdict == Verdict.LEAK


def test_each_prompt_is_new_and_only_hits_begin_as_planted(spend: Callable[[float], Any]) -> None:
    prompts: list[tuple[str, list[str]]] = []
    toy = Caching("none", spend)

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        prompts.append((request.account, request.prompt.split()))
        assert request.fields["max_tokens"] == 1
        await toy.speak(request, writer)

    run(SMALL, speak)
    texts = [" ".join(words) for _, words in prompts]
    assert len(set(texts)) == len(texts) == 2 + 3 * 36
    assert len({len(words) for _, words in prompts}) == 1
    common: dict[str, list[tuple[int, int]]] = {"A": [], "B": []}
    for at in range(2, len(prompts), 3):
        (planter, planted), (asker, first), (same, second) = prompts[at : at + 3]
        assert planter == "A"
        assert asker == same
        common[asker].append((_common(planted, first), _common(planted, second)))
    for account, count in (("A", 12), ("B", 24)):
        assert [min(pair) for pair in common[account]] == [0] * count
        assert {max(pair) for pair in common[account]} <= set(range(190, 195))
        assert sum(first > second for first, second in common[account]) == count // 2


def test_an_endpoint_that_fails_on_the_way_is_inconclusive(spend: Callable[[float], Any]) -> None:
    toy = Caching("account", spend)
    answered = 0

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        answered += 1
        if answered > 60:
            writer.write(http(b"gone", 500))
        else:
            await toy.speak(request, writer)

    found = run(SMALL, speak)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert found.unusable == {"the endpoint answers 500: it failed": 17}
    assert found.clean_trials == 7
    assert answered == 60 + 5


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (http(b"<html>Welcome</html>"), "the endpoint answers with HTML or XML, not JSON"),
        (refusal("no"), "a request to time was refused"),
    ],
)
def test_nothing_to_time_is_inconclusive(raw: bytes, reason: str) -> None:
    async def speak(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    found = run(SMALL, speak)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert found.unusable == {reason: 24}


def test_a_budget_ends_it(spend: Callable[[float], Any]) -> None:
    found = run(SMALL, Caching("all", spend).speak, budget=Budget(requests_max=50))
    assert found.verdict == Verdict.INCONCLUSIVE
    assert found.clean_trials == 4
    assert sum(found.unusable.values()) == 20


def answer(*events: tuple[float, str]) -> Answer:
    whole = Whole(
        text="",
        aside="",
        finish_reason="stop",
        prompt_tokens=1,
        completion_tokens=1,
        events=tuple(Event(at_s=at, text=text, answer_name="") for at, text in events),
    )
    ask = Ask(prompt="", answer_tokens=1)
    return Answer(serial=1, account="A", ask=ask, seconds=9, status=200, raw="", whole=whole)


def test_the_first_token_is_the_first_text() -> None:
    assert first_token_s(answer((1, ""), (2, "x"), (3, "y"))) == 2
    assert first_token_s(answer((1, ""))) == 9
    assert first_token_s(answer()) == 9


@pytest.mark.parametrize("second_s", [0.0, 3.0, -3.0])
def test_false_alarms_come_at_most_at_the_stated_rate(
    second_s: float, rng: np.random.Generator
) -> None:
    """Where times drift and the second place of each pair is always slower or always faster."""
    runs, count, alarms = 500, 30, 0
    for _ in range(runs):
        drift = np.cumsum(rng.normal(0, 0.05, count))
        places = rng.lognormal(0, 0.4, (count, 2)) + drift[:, None] + [0, second_s]
        first = np.array(balanced(count, rng))
        hits = np.where(first, places[:, 0], places[:, 1])
        misses = np.where(first, places[:, 1], places[:, 0])
        alarms += timing("timing", hits.tolist(), misses.tolist()).p <= 0.05
    assert alarms / runs < 0.05 * 1.25


def test_orders_are_balanced_and_random(rng: np.random.Generator) -> None:
    assert {sum(balanced(30, rng)) for _ in range(50)} == {15}
    assert {sum(balanced(7, rng)) for _ in range(50)} == {3, 4}
    assert len({tuple(balanced(30, rng)) for _ in range(50)}) == 50
    assert balanced(0, rng) == []
