"""Non-interference against a toy that knows the answers: disturbed by the other account's
requests, moody by itself, or neither."""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

from probe_kit import Request, completion, endpoint, http, serving
from sekisho.probe.budget import Budget
from sekisho.probe.canary import Mint
from sekisho.probe.exchange import Answer, Ask, Inconclusive, Outcome, Whole
from sekisho.probe.model import TechniqueResult, Verdict
from sekisho.probe.oracles import settle
from sekisho.probe.stats import change_caught, sign_p, sign_power
from sekisho.probe.techniques.controls import CONTROLS
from sekisho.probe.techniques.interference import Arm, Compared, Interference

SEED = 20261202
Fault = Literal[
    "none",
    "disturbed",  # the answer is another one while the other account is served
    "shown",  # the answer holds what the other account sent
    "moody",  # one answer in twelve is another one, always
    "random",  # every answer is another one, always
    "mute",
    "refuses plants",
]
KNOWN = {one.question: one.known for one in CONTROLS}


class Sage:
    """Answers control questions with what is known. A document is served until a question of the
    other account was answered, or a little while."""

    def __init__(self, fault: Fault = "none") -> None:
        self._fault = fault
        self._random = random.Random(SEED + 1)
        self._served: list[str] = []
        self._answered = asyncio.Event()
        self.amid = 0

    async def speak(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.account == "A":
            if self._fault == "refuses plants":
                writer.write(http(b"busy", 500))
                return
            self._served.append(request.prompt)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), 0.5)
            self._served.remove(request.prompt)
            writer.write(http(completion("The meeting goes on.")))
        else:
            writer.write(http(completion(self._answer(request.prompt))))
            self._answered.set()
            self._answered = asyncio.Event()

    def _answer(self, question: str) -> str:
        text = f"It is {KNOWN[question]}."
        self.amid += bool(self._served)
        drawn = self._random.random()
        if self._fault == "mute":
            return ""
        if self._fault == "disturbed" and self._served:
            return "It is not known."
        if self._fault == "shown" and self._served:
            return self._served[-1]
        if self._fault == "random" or (self._fault == "moody" and drawn < 1 / 12):
            return f"{text} {drawn}"
        return text


def run(
    fault: Fault, technique: Interference, **options: Any
) -> tuple[TechniqueResult, Sage, list[Request]]:
    async def main() -> tuple[TechniqueResult, Sage, list[Request]]:
        sage = Sage(fault)
        async with serving(sage.speak) as server, endpoint(server, **options) as found:
            result = await technique.run(found, Mint(SEED, random.Random(SEED).randrange))
            assert found.purse.spent.requests <= technique.cost().requests
            assert found.purse.spent.tokens <= technique.cost().tokens
            return settle([result]).techniques[0], sage, server.requests

    return asyncio.run(main())


ONCE = Interference(rounds=1, plants=2, words=60, lead_s=0.1)


def test_answers_that_the_other_disturbs_are_found_and_are_no_leak() -> None:
    found, sage, _ = run("disturbed", ONCE)
    assert sage.amid >= 12
    assert [(one.rule, one.report) for one in found.findings] == [("PROBE013", "vllm#39146")]
    assert found.verdict == Verdict.NO_LEAK_SEEN
    assert "changed with the other's traffic and 0 without" in found.findings[0].message
    assert f"; {sage.amid} lost what" in found.findings[0].message


def test_a_secret_in_an_answer_is_a_leak() -> None:
    found, _, _ = run("shown", ONCE)
    assert found.verdict == Verdict.LEAK
    assert {"PROBE001", "PROBE013"} <= {one.rule for one in found.findings}


def test_nothing_is_found_where_nothing_changes() -> None:
    found, sage, requests = run("none", ONCE)
    assert sage.amid
    assert found.findings == ()
    assert found.verdict == Verdict.NO_LEAK_SEEN
    assert found.clean_trials == 24
    assert "0 of 24 answers changed" in found.sentence()
    assert "a change in 56% of them or more would have shown" in found.sentence()
    asked = [one.prompt for one in requests if one.account == "B"]
    assert sorted(asked) == sorted(list(KNOWN) * 3)


def test_answers_that_change_alone_as_often_are_no_finding() -> None:
    found, _, _ = run("moody", ONCE)
    assert found.findings == ()
    assert found.verdict == Verdict.NO_LEAK_SEEN
    [test] = [one for one in found.tests if one.rule == "PROBE013"]
    assert test.p > 0.05
    assert " 0 without" not in test.message


def test_answers_that_always_change_alone_show_nothing() -> None:
    found, _, _ = run("random", ONCE)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert found.findings == ()
    assert "24 of 24 answers changed" in found.sentence()
    assert "change so often alone" in found.sentence()


@pytest.mark.parametrize(
    ("fault", "options", "reason"),
    [
        ("mute", {}, "no control question was answered three times"),
        ("refuses plants", {}, ""),
        ("none", {"budget": Budget(concurrency_max=1)}, ""),
        ("none", {"budget": Budget(requests_max=30)}, "answers changed"),
    ],
)
def test_what_cannot_be_compared_is_inconclusive(
    fault: Fault, options: dict[str, Any], reason: str
) -> None:
    found, _, _ = run(fault, ONCE, **options)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert found.findings == ()
    assert reason in found.sentence()
    assert found.unusable or fault == "mute"


def test_traffic_comes_around_any_of_the_three_times() -> None:
    """So that nothing but the traffic tells the arms apart."""
    _, _, requests = run("none", ONCE)
    asked, places = 0, set()
    for one in requests[1:]:  # the first document comes before all questions
        if one.account == "A":
            places.add(asked % 3)
        else:
            asked += 1
    assert places == {0, 1, 2}


def answer(text: str) -> Answer:
    whole = Whole(text=text, aside="", finish_reason="", prompt_tokens=1, completion_tokens=1)
    ask = Ask(prompt="", answer_tokens=1)
    return Answer(serial=1, account="B", ask=ask, seconds=1, status=200, raw="", whole=whole)


def test_what_changed_is_counted_pair_by_pair() -> None:
    compared = Compared()
    control = CONTROLS[0]
    assert control.known == "paris"
    table = [
        ("Paris.", "Paris.", "Paris."),
        ("Paris.", "Paris.", "It is Paris."),
        ("Paris.", "Paris.", "Rome."),
        ("Paris.", "It is Paris.", "Paris."),
        ("Paris.", "It is Paris.", "Rome."),
    ]
    for reference, alone, traffic in table:
        arms: dict[Arm, Outcome] = {
            "traffic": answer(traffic),
            "alone": answer(alone),
            "reference": answer(reference),
        }
        assert compared.add(control, arms)
    broken = Inconclusive(
        serial=1,
        account="B",
        ask=Ask(prompt="", answer_tokens=1),
        seconds=1,
        status=500,
        raw="",
        reason="x",
    )
    whole = answer("Paris.")
    assert not compared.add(control, {"reference": whole, "alone": broken, "traffic": whole})
    assert (compared.count, compared.traffic, compared.alone) == (5, 3, 2)
    assert (compared.only_traffic, compared.only_alone, compared.lost) == (2, 1, 2)


def test_traffic_has_many_lengths_and_secrets() -> None:
    _, _, requests = run("none", Interference(rounds=1, plants=3, words=200))
    plants = [one.prompt for one in requests if one.account == "A"]
    assert len(plants) == 24 * 3 + 1
    assert len({len(one.split()) // 20 for one in plants}) >= 4
    kinds = ("access code", "account number", "passphrase")
    assert all(any(f"The {kind} of" in one for kind in kinds) for one in plants)


def test_the_sign_test_has_the_value_of_counting() -> None:
    assert sign_p(5, 0) == pytest.approx(1 / 32)
    assert sign_p(4, 1) == pytest.approx(6 / 32)
    assert sign_p(0, 0) == 1


def answers(
    rng: np.random.Generator, moods: np.ndarray[Any, np.dtype[np.float64]]
) -> Iterator[tuple[bool, bool]]:
    """Who differs from the reference, alone and with traffic, if traffic does not matter: each
    question has a rate of its own, and the first time it is asked is unlike the others."""
    for mood in moods:
        texts = (rng.random(3) < mood).astype(int)
        texts[0] += 2 * (rng.random() < 0.3)
        reference, alone, traffic = rng.permutation(texts)
        yield bool(alone != reference), bool(traffic != reference)


def test_false_alarms_come_at_most_at_the_stated_rate(rng: np.random.Generator) -> None:
    runs, alarms = 2000, 0
    for _ in range(runs):
        pairs = list(answers(rng, rng.random(48) * 0.6))
        more = sum(traffic and not alone for alone, traffic in pairs)
        less = sum(alone and not traffic for alone, traffic in pairs)
        alarms += sign_p(more, less) <= 0.05
    assert 0.01 < alarms / runs < 0.05 * 1.25


@pytest.mark.parametrize("base", [0.0, 0.1])
def test_a_change_that_is_said_to_be_caught_is_caught(
    base: float, rng: np.random.Generator
) -> None:
    rate = change_caught(48, base, 0.01)
    alone = rng.random((4000, 48)) < base
    traffic = (rng.random((4000, 48)) < rate) | (rng.random((4000, 48)) < base)
    shown = [
        sign_p(int(more), int(less)) <= 0.01
        for more, less in zip(
            (traffic & ~alone).sum(axis=1), (alone & ~traffic).sum(axis=1), strict=True
        )
    ]
    assert np.mean(shown) == pytest.approx(0.95, abs=0.015)
    assert change_caught(5, 0.0, 0.01) == 1
    assert sign_power(48, 0.0, base, 0.01) <= 0.01


def test_control_questions_are_many_short_and_unlike() -> None:
    assert len(KNOWN) == len(CONTROLS) == 24
    assert all(len(one.question.split()) <= 10 for one in CONTROLS)
    assert all(one.known == one.known.lower() for one in CONTROLS)
    assert not any(one.known in one.question.lower().split() for one in CONTROLS)
