"""The controls of the probe over toys: a defect that is caught, one that is missed, one that is
caught too late, and a server that is not as clean as it says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from probe_kit import KEY_A, KEY_B, MODEL, serving
from probe_toy import Leak, Toy
from sekisho.gate.fetch import Key
from sekisho.probe.budget import Cost
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Ask
from sekisho.probe.model import Finding, Result, TechniqueResult, TestRun, Verdict, conclude
from sekisho.probe.self_test import TRIALS_MAX, Control, SelfTest, Server, Start, doubt, self_test
from sekisho.probe.techniques import Crossed, Residue, Technique

RESIDUE = Residue(rounds=2, plants=2, words=60)
CROSSED = Crossed(rounds=1, streams=4)


def start(leak: Leak) -> Start:
    @contextlib.asynccontextmanager
    async def run() -> AsyncIterator[Server]:
        async with serving(Toy(leak).speak) as server:
            yield Server(base_url=server.url, model=MODEL, key_a=Key(KEY_A), key_b=Key(KEY_B))

    return run


def control(technique: Technique, leak: Leak) -> Control:
    return Control(technique=technique, defect=leak, report="x#1", start=start(leak))


def outcome(
    *controls: Control, clean: Leak = "none", techniques: tuple[Technique, ...] = ()
) -> SelfTest:
    of = techniques or tuple(one.technique for one in controls)
    return asyncio.run(self_test(controls, start(clean), of))


class Scripted(Technique):
    """Asks as often as it says, and finds ``rule`` in the last answer, or in a test over all."""

    name, goal, report = "scripted", "find", "x#1"

    def __init__(self, questions: int = 3, rule: str = "PROBE001", p: float | None = None) -> None:
        self._questions = questions
        self._rule = rule
        self._p = p

    def cost(self) -> Cost:
        return Cost(1, 10, 1).times(self._questions)

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        ask = Ask(prompt="so", answer_tokens=1)
        seen = [await endpoint.ask(endpoint.accounts[1], ask) for _ in range(self._questions)]
        rule, name = self._rule, self.name
        if self._p is not None:
            test = TestRun(rule=rule, technique=name, message="found", p=self._p, effect=1.0)
            return conclude(name, seen, [], tests=(test,))
        last = seen[-1].serial
        found = Finding(rule=rule, technique=name, message="found", seen_in=last)
        return conclude(name, seen, [found])


def test_defects_are_caught_and_a_clean_server_is_silent() -> None:
    found = outcome(control(RESIDUE, "residue"), control(CROSSED, "swap"))
    assert found.passed()
    assert found.doubts() == {}
    assert [one.caught for one in found.positive] == [True, True]
    for one in found.positive:
        assert 1 <= one.first <= TRIALS_MAX
        assert 0 < one.shown <= one.trials
        assert one.rate.low < one.shown / one.trials <= one.rate.high
        assert f"caught {one.defect} (x#1) in {one.shown} of {one.trials}" in one.sentence()
    assert [(one.silent, one.false_alarms) for one in found.negative] == [(True, 0)] * 2
    assert found.sentence().startswith("passed: 2 of 2 defects caught; 0 false alarms")
    assert msgspec.json.decode(msgspec.json.encode(found), type=SelfTest) == found


def test_a_defect_that_is_missed_makes_its_technique_doubtful() -> None:
    found = outcome(control(RESIDUE, "none"), control(CROSSED, "swap"))
    assert not found.passed()
    assert set(found.doubts()) == {"residue"}
    assert "missed none" in found.positive[0].sentence()
    assert found.sentence().startswith("failed: 1 of 2")
    assert "not believed: residue" in found.sentence()


@pytest.mark.parametrize(("questions", "caught"), [(TRIALS_MAX, True), (TRIALS_MAX + 1, False)])
def test_a_leak_that_shows_too_late_is_missed(questions: int, caught: bool) -> None:
    [one] = outcome(control(Scripted(questions), "none")).positive
    assert (one.first, one.caught) == (questions, caught)


@pytest.mark.parametrize(
    ("rule", "p", "caught"),
    [
        ("PROBE010", 1e-6, True),
        ("PROBE013", 1e-6, True),  # no leak by itself, and yet what its control does
        ("PROBE010", 0.2, False),
        ("PROBE004", None, False),  # a fault of another kind is no catch
    ],
)
def test_what_counts_as_caught(rule: str, p: float | None, caught: bool) -> None:
    [one] = outcome(control(Scripted(3, rule, p), "none")).positive
    assert one.caught is caught
    if caught:
        assert "by a test over 3 trials, p = 1e-06" in one.sentence()


@pytest.mark.parametrize("clean", ["residue", "html"])
def test_a_server_that_is_not_clean_or_does_not_answer_is_no_silence(clean: Leak) -> None:
    found = outcome(control(RESIDUE, "residue"), clean=clean)
    assert not found.passed()
    assert found.doubts() == {"residue": "its self-test failed: it was not silent"}
    [one] = found.negative
    assert bool(one.false_alarms) is (clean == "residue")
    assert "not silent" in one.sentence()


def test_a_technique_without_a_control_is_not_believed() -> None:
    found = asyncio.run(self_test([], start("none"), [CROSSED], untested=["crossed"]))
    assert found.doubts() == {"crossed": "its self-test has no control"}


def result(verdict: Verdict, *rules: str) -> Result:
    findings = [Finding(rule=rule, technique="residue", message="m") for rule in rules]
    one = msgspec.structs.replace(conclude("residue", [], findings), verdict=verdict)
    return Result(techniques=(one,))


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (result(Verdict.NO_LEAK_SEEN), Verdict.INCONCLUSIVE, 3),
        (result(Verdict.LEAK, "PROBE010"), Verdict.INCONCLUSIVE, 1),
        (result(Verdict.LEAK, "PROBE001"), Verdict.LEAK, 1),
    ],
)
def test_doubt_takes_a_verdict_but_no_finding_and_no_proof(
    before: Result, after: Verdict, code: int
) -> None:
    found = doubt(before, {"residue": "its self-test failed"})
    assert found.techniques[0].verdict == after
    assert found.techniques[0].findings == before.techniques[0].findings
    assert found.exit_code() == code
    assert doubt(before, {"crossed": "x"}) == before
