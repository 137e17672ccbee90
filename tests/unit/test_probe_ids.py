"""The technique of equal ids against toys that keep state by what clients call things, and against
one whose state is an account's own."""

import pytest

from probe_runs import done
from probe_toy_gateway import GatewayToy, Leak
from sekisho.probe.budget import Budget
from sekisho.probe.model import Verdict
from sekisho.probe.techniques.ids import Ids

IDS = Ids(rounds=1)
WAYS, TRIALS = 8, 4


@pytest.mark.parametrize("leak", ["none", "own sessions"])
def test_nothing_is_found_where_nothing_is_mixed_up(leak: Leak) -> None:
    found = done(IDS, GatewayToy(leak))
    assert found.result.verdict == Verdict.NO_LEAK_SEEN
    assert found.result.findings == ()
    assert found.result.unusable == {}
    assert found.result.clean_trials == WAYS * TRIALS
    assert found.result.sensitivity == 1
    cost = IDS.cost()
    assert found.spent.requests == cost.requests
    assert found.spent.tokens <= cost.tokens


CAUGHT: list[tuple[Leak, set[str], bool]] = [
    ("by id", {"PROBE001", "PROBE008", "PROBE009"}, True),
    ("streams by id", {"PROBE008"}, True),
    ("named by id", {"PROBE009"}, False),
]


@pytest.mark.parametrize(("leak", "rules", "is_leak"), CAUGHT)
def test_state_by_id_is_caught_by_every_way_of_sending_one(
    leak: Leak, rules: set[str], is_leak: bool
) -> None:
    found = done(IDS, GatewayToy(leak))
    assert found.rules == rules
    assert (found.result.verdict == Verdict.LEAK) == is_leak
    ways = set()
    for finding in found.result.findings:
        seen, planted = found.log[finding.seen_in], found.log[finding.planted_in]
        assert seen.account != planted.account
        assert (finding.rule == "PROBE008") <= seen.ask.stream
        ways |= {*seen.ask.fields, *seen.ask.headers}
    assert len(ways) == WAYS


def test_both_accounts_send_the_same_ids_and_never_the_same_tag() -> None:
    found = done(IDS, GatewayToy())
    chosen = {
        account: {one.fields["user"] for one in found.sent(account) if "user" in one.fields}
        for account in "AB"
    }
    assert len(chosen["A"] & chosen["B"]) == 2
    assert len(chosen["A"] - chosen["B"]) == 1  # what is tried alone
    prompts = [one.prompt for one in found.requests]
    assert len(set(prompts)) == len(prompts)


def test_ways_that_are_refused_are_not_offered() -> None:
    refuses = frozenset({"request_id", "rid", "metadata", "X-Request-Id"})
    found = done(IDS, GatewayToy(refuses=refuses))
    assert set(found.result.not_offered) == refuses
    assert found.result.clean_trials == (WAYS - len(refuses)) * TRIALS
    assert found.result.verdict == Verdict.NO_LEAK_SEEN


def test_answers_that_repeat_no_tag_show_nothing() -> None:
    found = done(IDS, GatewayToy(echoes=False))
    assert found.result.sensitivity == 0
    assert found.result.verdict == Verdict.INCONCLUSIVE


def test_a_page_or_a_spent_budget_is_inconclusive() -> None:
    page = done(IDS, GatewayToy("page")).result
    assert page.verdict == Verdict.INCONCLUSIVE
    assert sum(page.unusable.values()) == WAYS * TRIALS
    spent = done(IDS, GatewayToy(), budget=Budget(requests_max=3)).result
    assert spent.verdict == Verdict.INCONCLUSIVE
