"""The technique of cancelled requests against toys that leak them, and only them, and against one
that does not."""

import asyncio
from typing import Any

import pytest

from probe_kit import Server, endpoint, serving
from probe_toy_gateway import GatewayToy, Leak
from sekisho.probe.budget import Budget, Cost
from sekisho.probe.canary import Mint
from sekisho.probe.exchange import Answer, Inconclusive, Outcome
from sekisho.probe.model import TechniqueResult, Verdict
from sekisho.probe.oracles import settle
from sekisho.probe.techniques.abort import Abort
from sekisho.probe.techniques.residue import Residue

SEED = 20261202
ABORT = Abort(rounds=2, leaves=4, words=60, answer_tokens=60)
TRIALS = 2 * 2 * (4 + 2 + 1)


def run(
    toy: GatewayToy, technique: Any = ABORT, **options: Any
) -> tuple[TechniqueResult, list[Outcome], Cost, Server]:
    log: list[Outcome] = []

    async def main() -> tuple[TechniqueResult, list[Outcome], Cost, Server]:
        async with (
            serving(toy.speak, toy.half) as server,
            endpoint(server, log=log.append, **options) as found,
        ):
            result = await technique.run(found, Mint(SEED))
            return settle([result]).techniques[0], log, found.purse.spent, server

    return asyncio.run(main())


def test_nothing_is_found_where_nothing_leaks() -> None:
    result, log, spent, server = run(GatewayToy(word_s=0.002))
    assert result.verdict == Verdict.NO_LEAK_SEEN
    assert result.findings == ()
    assert result.clean_trials > TRIALS / 2
    assert result.clean_trials + sum(result.unusable.values()) == TRIALS
    left = [one for one in log if isinstance(one, Inconclusive)]
    assert {one.account for one in left} == {"A"}
    assert {one.reason for one in left} == {"the prober left"}
    assert len(server.halves) == 4
    cost = ABORT.cost()
    assert spent.requests == len(log) <= cost.requests
    assert spent.tokens <= cost.tokens


@pytest.mark.parametrize("leak", ["left in the pool", "half closed", "half a body"])
def test_what_a_cancelled_request_leaves_is_caught(leak: Leak) -> None:
    result, log, _, _ = run(GatewayToy(leak, word_s=0.002))
    assert result.verdict == Verdict.LEAK
    assert {finding.rule for finding in result.findings} == {"PROBE001"}
    outcomes = {one.serial: one for one in log}
    for finding in result.findings:
        assert outcomes[finding.seen_in].account == "B"
        assert outcomes[finding.planted_in].account == "A"
        assert finding.report == "sglang#23392"


def test_the_toy_leaks_only_where_somebody_cancels() -> None:
    """So it is the cutting that the technique's findings come from."""
    toy = GatewayToy("left in the pool", word_s=0.002)
    result, log, _, _ = run(toy, Residue(rounds=2, plants=2, words=60))
    assert result.verdict == Verdict.NO_LEAK_SEEN
    assert all(isinstance(one, Answer) for one in log)


def test_what_is_not_cut_is_no_trial() -> None:
    """Answers that are whole before their client leaves: too few trials to tell."""
    result, _, _, _ = run(GatewayToy(word_s=0), Abort(rounds=1, leaves=8, leave_max_s=60, words=60))
    whole = result.unusable.get("the first account's answer was whole before it left", 0)
    assert result.clean_trials + whole == 2 * (8 + 2 + 1)
    slow = Abort(rounds=1, leaves=8, leave_max_s=0.0, words=60)
    result, _, _, _ = run(GatewayToy(word_s=0.01), slow)
    assert result.unusable == {}
    assert result.clean_trials == 2 * (8 + 2 + 1)


def test_a_page_or_a_spent_budget_is_inconclusive() -> None:
    result, _, _, _ = run(GatewayToy("page"))
    assert result.verdict == Verdict.INCONCLUSIVE
    assert sum(result.unusable.values()) == TRIALS
    result, _, _, _ = run(GatewayToy(word_s=0.002), budget=Budget(requests_max=3))
    assert result.verdict == Verdict.INCONCLUSIVE
    assert any("budget of 3 requests" in reason for reason in result.unusable)


def test_requests_are_left_at_staggered_moments_and_sent_again() -> None:
    cuts = ABORT._cuts(1.0, 0) + ABORT._cuts(1.0, 1)
    moments = [cut.after_s for cut in cuts if not cut.half_close and cut.share == 1]
    assert moments == [0, 1 / 16, 1 / 4, 9 / 16, 1 / 64, 9 / 64, 25 / 64, 49 / 64]
    assert sum(cut.half_close for cut in cuts) == 2
    _, _, _, server = run(GatewayToy(word_s=0.002))
    planted = [one.prompt for one in server.requests if one.account == "A"]
    counts = sorted(planted.count(prompt) for prompt in set(planted))
    assert counts == [1] * 2 + [2] * 2 * 5
