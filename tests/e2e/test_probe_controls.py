"""The probe against the lab's engines with the real model: it catches each defect that lies in the
engine, and says nothing of the same server without one. What lies before an engine is tested over
a backend without a model (test_lab_controls)."""

import asyncio
import random

import pytest

from sekisho.gate.fetch import Key
from sekisho.lab.controls import SIZES, negative, positive
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Account, Endpoint
from sekisho.probe.exchange import Outcome
from sekisho.probe.model import TechniqueResult, Verdict
from sekisho.probe.oracles import settle
from sekisho.probe.techniques import TECHNIQUES

pytestmark = pytest.mark.timeout(600)
engines = pytest.mark.engines

SEED = 7
TRIALS_MAX = 20
CONTENT = ["residue", "prefix"]
STATISTICAL = {"timing": "PROBE010", "interference": "PROBE013"}


def probed(name: str, *, has_defect: bool) -> tuple[TechniqueResult, list[Outcome]]:
    """The settled result, and what the second account was sent, in order. Secrets are drawn from
    the seed too, so that a failure can be repeated."""
    asked: list[Outcome] = []

    async def main() -> TechniqueResult:
        async with positive(name) if has_defect else negative() as control:
            accounts = Account("A", Key(control.key_a)), Account("B", Key(control.key_b))
            async with Endpoint(
                control.base_url, control.model, accounts, log=asked.append
            ) as endpoint:
                mint = Mint(SEED, random.Random(SEED).randrange)
                return await TECHNIQUES[name](**SIZES[name]).run(endpoint, mint)

    print(f"seed {SEED}")
    [result] = settle([asyncio.run(main())]).techniques
    print(result.sentence())
    of_b = sorted((one for one in asked if one.account == "B"), key=lambda one: one.serial)
    return result, of_b


# `make test` asks for boundary as well: what it catches hangs on the words of its prompts, which
# toys do not know. Without a defect it asks for minutes; the self-test of the command does that.
@pytest.mark.parametrize(
    "name", ["boundary", *[pytest.param(name, marks=engines) for name in CONTENT]]
)
def test_text_of_the_other_is_caught_within_so_many_trials(name: str) -> None:
    result, of_b = probed(name, has_defect=True)
    assert result.verdict == Verdict.LEAK
    shown = {finding.seen_in for finding in result.findings if finding.rule == "PROBE001"}
    assert shown & {one.serial for one in of_b[:TRIALS_MAX]}


@engines
@pytest.mark.parametrize(("name", "rule"), list(STATISTICAL.items()))
def test_influence_of_the_other_is_found(name: str, rule: str) -> None:
    result, _ = probed(name, has_defect=True)
    assert [finding.rule for finding in result.findings] == [rule]


@engines
@pytest.mark.parametrize("name", [*CONTENT, *STATISTICAL])
def test_nothing_is_found_where_there_is_no_defect(name: str) -> None:
    result, of_b = probed(name, has_defect=False)
    assert of_b
    assert result.findings == ()
    assert result.verdict != Verdict.LEAK
