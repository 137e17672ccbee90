"""Each technique against a toy that leaks in the way it is meant for, and against one that does
not: caught, and silent."""

import asyncio
import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from probe_kit import Request, accounts, endpoint, http, serving
from probe_toy import Leak, Toy
from sekisho.probe.budget import Budget, Cost, Prices
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Refused, Whole
from sekisho.probe.model import TechniqueResult, Verdict
from sekisho.probe.oracles import settle
from sekisho.probe.techniques import Boundary, Crossed, Residue, Technique
from sekisho.probe.techniques import boundary as boundaries
from sekisho.probe.techniques.base import Notes
from sekisho.probe.techniques.ruler import Ruler

SEED = 20261202


@dataclasses.dataclass
class Done:
    """One technique, run and settled."""

    result: TechniqueResult
    spent: Cost
    prompts: list[tuple[str, str]]

    @property
    def rules(self) -> set[str]:
        return {finding.rule for finding in self.result.findings}


def done(technique: Technique, toy: Toy, seed: int = SEED, **options: Any) -> Done:
    async def main() -> Done:
        async with serving(toy.speak) as server, endpoint(server, **options) as found:
            result = await technique.run(found, Mint(seed))
            [settled] = settle([result]).techniques
            prompts = [(r.account, r.prompt) for r in server.requests if r.method == "POST"]
            return Done(settled, found.purse.spent, prompts)

    return asyncio.run(main())


def boundary(**options: Any) -> Boundary:
    return Boundary(**({"length_max": 4000, "plants": 1, "repeats": 1} | options))


RESIDUE = Residue(rounds=3, plants=2, words=60)
CROSSED = Crossed(rounds=2, streams=4)
ALL: list[Technique] = [boundary(), RESIDUE, CROSSED]


@pytest.mark.parametrize("technique", ALL, ids=lambda one: one.name)
def test_nothing_is_found_where_nothing_leaks(technique: Technique) -> None:
    found = done(technique, Toy())
    assert found.result.verdict == Verdict.NO_LEAK_SEEN
    assert found.result.findings == ()
    assert found.result.unusable == {}
    assert 0 < found.result.rate_caught < 0.35
    assert "no leak seen" in found.result.sentence()


CAUGHT: list[tuple[Technique, Leak, set[str]]] = [
    (boundary(), "placeholder", {"PROBE001", "PROBE003", "PROBE005"}),
    (RESIDUE, "residue", {"PROBE001"}),
    (RESIDUE, "garbled", {"PROBE002"}),
    (RESIDUE, "error page", {"PROBE001"}),
    (CROSSED, "swap", {"PROBE008"}),
    (CROSSED, "words", {"PROBE011"}),
]


@pytest.mark.parametrize(("technique", "leak", "rules"), CAUGHT, ids=str)
def test_each_technique_catches_the_leak_it_is_meant_for(
    technique: Technique, leak: Leak, rules: set[str]
) -> None:
    found = done(technique, Toy(leak))
    assert found.result.verdict == Verdict.LEAK
    assert rules <= found.rules
    assert all(finding.report for finding in found.result.findings)


@pytest.mark.parametrize("technique", ALL, ids=lambda one: one.name)
@pytest.mark.parametrize("leak", ["html"])
def test_an_endpoint_that_answers_nothing_is_inconclusive(technique: Technique, leak: Leak) -> None:
    found = done(technique, Toy(leak))
    assert found.result.verdict == Verdict.INCONCLUSIVE
    assert found.result.findings == ()
    assert sum(found.result.unusable.values()) > 0


@pytest.mark.parametrize("technique", ALL, ids=lambda one: one.name)
def test_no_run_costs_more_than_its_estimate(technique: Technique) -> None:
    found = done(technique, Toy(window=4000))
    cost = technique.cost()
    assert found.spent.requests <= cost.requests
    assert found.spent.tokens <= cost.tokens


def test_a_dry_run_says_beforehand_what_a_budget_does_not_allow() -> None:
    prices = Prices(prompt_per_million=1.0, answer_per_million=4.0)
    plan = sum((technique.cost() for technique in ALL), Cost())
    assert plan.requests == sum(technique.cost().requests for technique in ALL)
    money = plan.money(prices)
    assert Budget(money_max=money, prices=prices).refuses(plan) == ""
    assert "does not allow" in Budget(money_max=money * 0.99, prices=prices).refuses(plan)
    assert "requests" in Budget(requests_max=plan.requests - 1).refuses(plan)
    assert "tokens" in Budget(tokens_max=plan.tokens - 1).refuses(plan)


@pytest.mark.parametrize("technique", ALL, ids=lambda one: one.name)
def test_a_spent_budget_is_inconclusive_and_no_leak_is_claimed(technique: Technique) -> None:
    found = done(technique, Toy(), budget=Budget(requests_max=3))
    assert found.result.verdict == Verdict.INCONCLUSIVE
    assert any("budget of 3 requests" in reason for reason in found.result.unusable)


# Boundary


def test_an_incident_between_pool_and_window_is_caught() -> None:
    """As in 2026: the pool is smaller than what is advertised, and only above it is the leak."""
    found = done(boundary(window=1500), Toy("placeholder", window=1500, pool=900))
    assert found.result.verdict == Verdict.LEAK
    assert {"PROBE001", "PROBE005"} <= found.rules
    counts = [f.observed for f in found.result.findings if f.rule == "PROBE005"]
    assert set(counts) == {1}
    planted = {f.planted_in for f in found.result.findings if f.rule == "PROBE001"}
    assert 0 not in planted


def test_the_limit_that_no_status_shows_is_found_and_said() -> None:
    leaking = done(boundary(window=1500), Toy("placeholder", window=1500, pool=900)).result
    [note] = [note for note in leaking.notes if "did not know the end" in note]
    [told] = re.findall(r"about (\d+) tokens", note)
    assert 840 <= int(told) <= 900 + 24  # the pool, as far as it is narrowed down
    for honest in (Toy(window=1500), Toy(window=1500, pool=900), Toy(echoes=False)):
        assert done(boundary(window=1500), honest).result.notes == ()


def test_lengths_that_are_never_answered_do_not_end_the_search() -> None:
    """As with sglang 0.5.19, where those just below the limit are held for ever."""

    class Holds(Toy):
        async def speak(self, request: Request, writer: asyncio.StreamWriter) -> None:
            if request.method == "POST" and 650 < self.tokens(request.prompt) < 860:
                writer.write(http(b'{"detail": "timed out"}', 504))
            else:
                await super().speak(request, writer)

    found = done(boundary(window=1500), Holds("placeholder", window=1500, pool=900))
    [note] = [note for note in found.result.notes if "did not know the end" in note]
    [told] = re.findall(r"about (\d+) tokens", note)
    assert 600 <= int(told) <= 650 + 48
    lengths = {len(p.split()) + 3 for account, p in found.prompts if account == "B"}
    assert any(860 <= length <= 880 for length in lengths)


class Gap(Toy):
    """Leaks only where what was written there before reaches to the end of the prompt. Its tokens
    are pieces of words, so that a secret has as many as it happens to have; asked to go on, it
    writes the last line again and ends, as small models do."""

    def tokens(self, prompt: str) -> int:
        return in_fives(prompt)

    def _over(self, writer: asyncio.StreamWriter, count: int, other: str) -> bool:
        # A question takes pages in their order, so that those of the first document of two are its.
        last = [text for account, text in self._memory[-2:] if account == "A"]
        ends = [self.tokens(text) + self._goes_on(text) for text in last]
        return super()._over(writer, count, other if count <= max(ends, default=0) else "")

    def _goes_on(self, text: str) -> int:
        """Tokens of the answer."""
        return min(48, self.tokens([line for line in text.splitlines() if line][-2]))


@pytest.mark.parametrize("plants", [1, 2])
def test_documents_reach_to_where_a_question_above_the_limit_ends(plants: int) -> None:
    for seed in range(3):
        toy = Gap("placeholder", window=3000, pool=1500)
        found = done(boundary(window=3000, plants=plants, bisect_max=9), toy, seed=seed)
        assert found.result.verdict == Verdict.LEAK, f"seed {seed}"


def test_an_endpoint_that_was_felled_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, all that follows the question which felled it would be inconclusive."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    class Felled(Toy):
        """The first documents come while it is down."""

        down = 6  # each document is sent twice

        async def speak(self, request: Request, writer: asyncio.StreamWriter) -> None:
            if request.account == "A" and self.down:
                self.down -= 1
                writer.write(http(b'{"detail": "no worker"}', 503))
            else:
                await super().speak(request, writer)

    monkeypatch.setattr(boundaries, "_wait", sleep)
    found = done(boundary(), Felled())
    assert found.result.verdict == Verdict.NO_LEAK_SEEN
    assert len(waited) == 3
    waited.clear()
    dead = Felled()
    dead.down = 10**6
    assert done(boundary(), dead).result.verdict == Verdict.INCONCLUSIVE
    assert len(waited) == 8


FAULTS: list[tuple[Leak, str]] = [
    ("cut", "PROBE003"),
    ("empty", "PROBE004"),
    ("hang up", "PROBE007"),
]


@pytest.mark.parametrize(("leak", "rule"), FAULTS)
def test_what_is_not_refused_is_a_finding_of_its_own(leak: Leak, rule: str) -> None:
    found = done(boundary(), Toy(leak))
    assert rule in found.rules
    assert found.result.verdict != Verdict.LEAK


def test_a_window_that_is_not_served_is_a_finding() -> None:
    found = done(boundary(window=1500), Toy(window=1500, pool=900))
    assert found.rules == {"PROBE006"}
    assert found.result.verdict == Verdict.NO_LEAK_SEEN


def test_a_limit_that_only_an_error_tells_is_asked_around() -> None:
    found = done(boundary(bisect_max=0), Toy(window=1500, pool=900))
    lengths = [len(prompt.split()) + 3 for account, prompt in found.prompts if account == "B"]
    assert any(800 < length <= 900 - 24 for length in lengths)
    assert any(900 < length < 960 for length in lengths)


def test_a_limit_that_nobody_states_is_found_and_asked_around() -> None:
    found = done(boundary(length_max=8000), Toy(window=700, says=False))
    assert found.result.verdict == Verdict.NO_LEAK_SEEN
    assert found.result.findings == ()
    lengths = sorted(len(prompt.split()) for account, prompt in found.prompts if account == "B")
    assert any(600 < length + 48 + 3 <= 700 for length in lengths)
    assert any(700 < length + 48 + 3 < 800 for length in lengths)
    assert any(length > 1200 for length in lengths)
    leaking = done(boundary(length_max=8000), Toy("placeholder", window=700, says=False))
    assert leaking.result.verdict == Verdict.LEAK


def test_a_small_window_is_measured_with_the_short_ruler() -> None:
    found = done(boundary(), Toy("placeholder", window=160))
    assert found.result.verdict == Verdict.LEAK


def test_no_prompt_is_longer_than_allowed() -> None:
    found = done(boundary(length_max=1000), Toy(window=100_000))
    assert max(len(prompt.split()) for _, prompt in found.prompts) <= 1010
    assert found.result.verdict == Verdict.NO_LEAK_SEEN


def test_the_ruler_knows_the_length_of_its_prompts() -> None:
    async def main() -> None:
        toy = Toy(window=5000)
        async with serving(toy.speak) as server, endpoint(server) as found:
            notes = Notes(boundary(), found, Mint(SEED))
            ruler = await Ruler.made(notes, 8)
            assert ruler is not None
            assert ruler.is_counted
            for words in (1, 119, 120, 121, 700, 3001):
                prompt = ruler.prompt(words)
                assert len(prompt.split()) + 3 in ruler.tokens(words)
                middle = (ruler.tokens(words)[0] + ruler.tokens(words)[-1]) // 2
                assert middle < 40 or abs(ruler.words(middle) - words) <= 1
            assert ruler.prompt(50) != ruler.prompt(50)
            toy.says = False
            blind = await Ruler.made(notes, 8)
            assert blind is not None
            assert not blind.is_counted

    asyncio.run(main())


def in_fives(text: str) -> int:
    """A tokenizer that cuts words, as byte-pair encodings do."""
    return sum(-(-len(word) // 5) for word in text.split())


@pytest.mark.parametrize("count", [len, in_fives, lambda text: len(text.split())])
def test_the_ruler_is_right_for_every_tokenizer_and_length(count: Callable[[str], int]) -> None:
    """A count outside of its range would be a finding, and a false one."""
    for seed in range(60):
        notes = Notes(boundary(), Endpoint("http://host/v1", "m", accounts()), Mint(seed))
        for base_words in (20, 120):
            ruler = Ruler(notes, base_words)
            ruler.measure(*(count(ruler.prompt(n * base_words)) for n in (1, 2)))
            assert ruler.is_counted
            lengths = [*range(1, 3 * base_words, 7), 1000, 4567]
            for words in lengths:
                assert count(ruler.prompt(words)) in ruler.tokens(words), f"seed {seed}"


@pytest.mark.parametrize("counts", [(None, 9), (9, None), (1, 1), (300, 200), (1, 200), (5, 9000)])
def test_the_ruler_does_not_believe_counts_that_cannot_be(
    counts: tuple[int | None, int | None],
) -> None:
    notes = Notes(boundary(), Endpoint("http://host/v1", "m", accounts()), Mint(SEED))
    ruler = Ruler(notes, 120)
    ruler.measure(*counts)
    assert not ruler.is_counted


# Residue and crossed streams


def test_the_second_account_is_never_given_a_secret() -> None:
    for technique in (boundary(), RESIDUE):
        found = done(technique, Toy("residue"))
        sent = {account: " ".join(p for a, p in found.prompts if a == account) for account in "AB"}
        assert "access code of" in sent["A"] or "passphrase of" in sent["A"]
        for finding in found.result.findings:
            assert finding.canary
        codes = re.findall(r" of the \w+ is ([A-Z0-9-]{17}|[\d ]{24}|[a-z ]{27})\.", sent["A"])
        assert codes
        assert not [code for code in codes if code in sent["B"]]


def test_a_rare_leak_is_caught_by_enough_rounds() -> None:
    found = done(Residue(rounds=10, plants=1, words=60), Toy("residue", share=0.1))
    assert found.result.verdict == Verdict.LEAK
    assert 1 <= len({finding.seen_in for finding in found.result.findings}) < 30


def test_what_a_self_test_measured_widens_what_is_excluded() -> None:
    full, half = (
        done(Residue(rounds=3, plants=1, words=60, sensitivity=share), Toy()).result
        for share in (1.0, 0.5)
    )
    assert half.rate_caught == pytest.approx(2 * full.rate_caught)


def test_streams_that_repeat_no_tag_show_nothing() -> None:
    found = done(CROSSED, Toy(echoes=False))
    assert found.result.verdict == Verdict.INCONCLUSIVE
    assert found.result.sensitivity == 0
    assert found.result.clean_trials == 16


def test_one_name_for_all_answers_is_a_finding_and_no_leak() -> None:
    found = done(CROSSED, Toy("one name"))
    assert found.rules == {"PROBE009"}
    assert found.result.verdict == Verdict.NO_LEAK_SEEN


def test_fragments_of_own_numbers_raise_no_alarm() -> None:
    """Streams full of numbers, none of them of another stream: no more alarms than stated."""
    source = random.Random(SEED)
    alarms = 0
    for _ in range(400):
        mint = Mint(0, source.randrange)
        tags = {serial: mint.canary("account number") for serial in range(16)}
        answers = []
        for serial in tags:
            text = " ".join(f"{source.randrange(10_000):04d}" for _ in range(40))
            whole = Whole(
                text=text, aside="", finish_reason="", prompt_tokens=1, completion_tokens=1
            )
            ask = Ask(prompt="", answer_tokens=1)
            answers.append(
                Answer(
                    serial=serial, account="A", ask=ask, seconds=0, status=200, raw="", whole=whole
                )
            )
        alarms += CROSSED.fragments(answers, tags).p <= 0.05
    assert alarms / 400 < 0.075, f"seed {SEED}"


def test_every_stream_has_a_tag_of_its_own() -> None:
    found = done(CROSSED, Toy())
    prompts = [prompt for _, prompt in found.prompts]
    assert len(set(prompts)) == len(prompts) == 16
    assert sorted(account for account, _ in found.prompts) == ["A"] * 8 + ["B"] * 8


@pytest.mark.parametrize("technique", ALL, ids=lambda one: one.name)
def test_a_technique_says_what_it_is_for(technique: Technique) -> None:
    assert technique.name == technique.name.lower()
    assert len(technique.goal) > 20
    assert "#" in technique.report
    assert technique.cost().requests > 0


def test_a_trial_counts_only_after_something_was_planted() -> None:
    """Before, and where planting is refused, answers are searched and show nothing else."""

    async def main() -> None:
        toy = Toy(window=60)
        async with serving(toy.speak) as server, endpoint(server) as found:
            notes = Notes(RESIDUE, found, Mint(SEED))
            ask = Ask(prompt="What is it?", answer_tokens=8)
            long, short = notes.mint.document(300), notes.mint.filler(20)
            assert isinstance(await notes.plant(long, 8), Refused)
            assert isinstance(await notes.look(ask), Answer)
            assert (len(notes.seen), len(notes.trials)) == (1, 0)
            assert notes.conclude(1.0).verdict == Verdict.INCONCLUSIVE
            small = msgspec.structs.replace(long, text=short)
            first = await notes.plant(small, 8)
            assert isinstance(first, Answer)
            assert first.serial in notes.planted
            await notes.look(ask)
            assert (len(notes.seen), len(notes.trials)) == (2, 1)

    asyncio.run(main())
