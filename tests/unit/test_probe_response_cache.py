"""The technique of stored answers against toys whose cache forgets the tenant, and against caches
and endpoints that only look as if theirs did."""

import random

import pytest

from probe_runs import SEED, done
from probe_toy_gateway import GatewayToy, Leak
from sekisho.probe.budget import Budget
from sekisho.probe.exchange import Answer, Ask, Outcome, Whole
from sekisho.probe.model import Verdict
from sekisho.probe.stats import rate_tail
from sekisho.probe.techniques.response_cache import ResponseCache
from sekisho.probe.techniques.stories import coincide

CACHE = ResponseCache(rounds=2, pause_s=0)
TRIALS, STORIES = 2 * 10, 6


@pytest.mark.parametrize("leak", ["none", "own cache", "greedy", "one name", "counted"])
def test_nothing_is_found_where_no_answer_is_shared(leak: Leak) -> None:
    found = done(CACHE, GatewayToy(leak))
    assert found.result.findings == ()
    assert found.result.verdict == Verdict.NO_LEAK_SEEN
    assert found.result.unusable == {}
    assert found.result.clean_trials == TRIALS
    assert found.result.sensitivity == 1
    [test] = found.result.tests
    assert test.p > 0.2
    cost = CACHE.cost()
    assert found.spent.requests == cost.requests
    assert found.spent.tokens <= cost.tokens


CAUGHT: list[tuple[Leak, set[str]]] = [
    ("by question", {"PROBE001", "PROBE012"}),
    ("nearly", {"PROBE001", "PROBE012"}),
    ("by body", {"PROBE012", "PROBE014"}),
    ("by body, renamed", {"PROBE014"}),
]


@pytest.mark.parametrize(("leak", "rules"), CAUGHT)
def test_a_cache_without_a_tenant_is_caught(leak: Leak, rules: set[str]) -> None:
    found = done(CACHE, GatewayToy(leak))
    assert found.result.verdict == Verdict.LEAK
    assert found.rules == rules
    for finding in found.result.findings:
        if finding.rule != "PROBE014":
            seen, planted = found.log[finding.seen_in], found.log[finding.planted_in]
            assert (seen.account, planted.account) == ("B", "A")


def test_nearly_equal_questions_find_what_equal_ones_do_not() -> None:
    exact, nearly = done(CACHE, GatewayToy("by question")), done(CACHE, GatewayToy("nearly"))
    secrets = [
        {f.seen_in for f in one.result.findings if f.rule == "PROBE001"} for one in (exact, nearly)
    ]
    assert len(secrets[0]) == 4  # the equal question, in two contexts and two rounds
    assert len(secrets[1]) == TRIALS


def test_a_stored_answer_is_known_by_its_name_where_nothing_is_repeated() -> None:
    found = done(CACHE, GatewayToy("by question", echoes=False))
    assert found.result.sensitivity == 0
    assert "PROBE012" in found.rules
    assert "PROBE001" not in found.rules
    assert done(CACHE, GatewayToy(echoes=False)).result.verdict == Verdict.INCONCLUSIVE


def test_both_ask_the_same_and_nobody_is_given_the_others_secret() -> None:
    found = done(CACHE, GatewayToy())
    last = {
        account: [one.fields["messages"][-1]["content"] for one in found.sent(account)]
        for account in "AB"
    }
    equal = set(last["A"]) & set(last["B"])
    assert len([one for one in equal if "Question" in one]) == 4
    stories = [one for one in equal if "Story" in one]
    assert len(stories) == STORIES
    bodies = {
        account: [one.body for one in found.sent(account) if b"Story" in one.body]
        for account in "AB"
    }
    assert set(bodies["B"]) < set(bodies["A"])
    assert len(bodies["A"]) == 3 * STORIES == len(set(bodies["A"]))


def test_a_context_that_is_refused_is_not_offered() -> None:
    found = done(CACHE, GatewayToy(refuses=frozenset({"system"})))
    assert found.result.not_offered == ("system message",)
    assert found.result.clean_trials == TRIALS // 2
    assert found.result.verdict == Verdict.NO_LEAK_SEEN


def test_a_page_or_a_spent_budget_is_inconclusive() -> None:
    page = done(CACHE, GatewayToy("page")).result
    assert page.verdict == Verdict.INCONCLUSIVE
    assert sum(page.unusable.values()) == TRIALS
    spent = done(CACHE, GatewayToy(), budget=Budget(requests_max=3)).result
    assert spent.verdict == Verdict.INCONCLUSIVE


def told(text: str) -> Outcome:
    whole = Whole(text=text, aside="", finish_reason="", prompt_tokens=1, completion_tokens=1)
    ask = Ask(prompt="", answer_tokens=1)
    return Answer(serial=1, account="A", ask=ask, seconds=0, status=200, raw="", whole=whole)


def test_stories_raise_no_more_alarms_than_stated_however_often_they_are_equal() -> None:
    """Endpoints that draw among few and many stories."""
    source = random.Random(SEED)
    for kinds in (1, 2, 3, 8, 40, 1000):
        alarms = 0
        for _ in range(500):
            stories = [[told(str(source.randrange(kinds))) for _ in range(4)] for _ in range(12)]
            alarms += coincide("x", stories, "").p <= 0.05
        assert alarms / 500 < 0.08, f"seed {SEED}, {kinds} kinds"


def test_one_shared_story_is_no_proof_and_six_are_beyond_chance() -> None:
    def story(number: int) -> list[Outcome]:
        return [told(f"{number} {draw} once upon") for draw in (0, 1, 2, 0)]

    assert coincide("x", [story(1)], "").p == pytest.approx(1 / 6)
    assert coincide("x", [story(n) for n in range(6)], "").p == pytest.approx(6**-6)
    other = [[one[0], one[1], one[0], one[2]] for one in map(story, range(6))]
    assert coincide("x", other, "").p == 1
    assert coincide("x", [story(1)[:3]], "").p == 1
    assert coincide("x", [], "").p == rate_tail(0, 0, 0.1) == 1
