"""What the probe concludes: each oracle with a planted fault and a clean case, and the verdicts."""

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sekisho.probe.canary import Canary, Mint
from sekisho.probe.exchange import Answer, Ask, Inconclusive, Outcome, Refused, Whole
from sekisho.probe.match import run
from sekisho.probe.model import Finding, Result, TestRun, Verdict, conclude
from sekisho.probe.oracles import exact, near, settle, structural, timing
from sekisho.probe.rules import RULES, Certainty

SEED = 20261202
COMMON: dict[str, Any] = {
    "account": "B",
    "ask": Ask(prompt="?", answer_tokens=8),
    "seconds": 0.1,
}


def answer(text: str, serial: int = 7, **changed: Any) -> Answer:
    fields: dict[str, Any] = {
        "text": text,
        "aside": "",
        "finish_reason": "stop",
        "prompt_tokens": 20,
        "completion_tokens": 3,
    }
    return Answer(serial=serial, status=200, raw="{}", whole=Whole(**(fields | changed)), **COMMON)


def refused(message: str = "too long", raw: str = "{}") -> Refused:
    return Refused(serial=8, status=400, raw=raw, message=message, **COMMON)


def broken(text: str = "", raw: str = "", reason: str = "the stream was cut off") -> Inconclusive:
    return Inconclusive(serial=9, status=200, raw=raw, text=text, reason=reason, **COMMON)


MINT = Mint(1)
PLANTED = {3: MINT.document(100).canaries, 4: MINT.document(100).canaries}
SECRET: Canary = PLANTED[4][1]
CLEAN = "The meeting is on Friday, room 4471, and the code is not known to me."


@pytest.mark.parametrize(
    "outcome",
    [
        answer(f"It is {SECRET.text}."),
        answer("", aside=SECRET.text.lower()),
        refused(raw=f"prompt {SECRET.text} too long"),
        broken(text=SECRET.text),
        broken(raw=f"<html>{SECRET.text}</html>"),
    ],
    ids=["answer", "aside", "refusal", "broken stream", "error page"],
)
def test_a_secret_is_found_wherever_it_was_received(outcome: Outcome) -> None:
    [found] = exact("residue", [answer(CLEAN), outcome], PLANTED, report="a#1")
    assert (found.rule, found.seen_in, found.planted_in) == ("PROBE001", outcome.serial, 4)
    assert found.canary == SECRET.serial
    assert found.bits == pytest.approx(SECRET.bits)
    assert found.chance < 1e-9
    assert found.span is not None
    text = outcome.texts()[found.span.text]
    assert text[found.span.start : found.span.end].lower() == SECRET.text.lower()
    assert found.report == "a#1"
    assert SECRET.text not in found.message


def test_a_part_is_proof_only_if_chance_cannot_show_it() -> None:
    number = MINT.canary("account number")
    long, short = number.normal[:18], number.normal[:10]
    [found] = exact("residue", [answer(f"x {long}")], {3: [number]})
    assert found.bits == pytest.approx(18 * math.log2(10))
    assert "a part" in found.message
    assert exact("residue", [answer(f"x {short}")], {3: [number]}) == []


def test_the_more_was_searched_the_more_a_part_must_show() -> None:
    number = MINT.canary("account number")
    seen = [answer(f"x {number.normal[:13]}")]
    many = {serial: MINT.document(10, 50).canaries for serial in range(100, 130)}
    assert exact("residue", seen, {3: [number]})
    assert exact("residue", seen * 40, {3: [number], **many}) == []


def test_a_clean_answer_holds_nothing() -> None:
    assert exact("residue", [answer(CLEAN), refused(), broken()], PLANTED) == []
    assert exact("residue", [], PLANTED) == []
    assert exact("residue", [answer(CLEAN)], {}) == []


def test_the_recorded_leak_of_a_real_engine_is_found_in_one_answer_only() -> None:
    """SGLang 0.5.19, whose secrets had eight digits: found, and by our measure no proof."""
    folder = Path(__file__).parents[1] / "fixtures" / "sglang-incident"
    summary = json.loads((folder / "summary.json").read_text())
    digits = summary["code"].replace("-", "")
    code = Canary(
        serial=1,
        kind="account number",
        text=summary["code"],
        place="mill",
        normal=digits,
        symbol_bits=(math.log2(10),) * len(digits),
    )
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    decoded = {one["rid"]: one["body"]["text"] for one in lines if one["role"] == "decode"}
    owners = set(summary["tenant_a"])
    hits = {rid: hit for rid, text in decoded.items() if (hit := run(code, text))}
    assert set(hits) - owners == {summary["answer"]}
    hit = hits[summary["answer"]]
    assert hit.whole
    assert decoded[summary["answer"]][hit.start : hit.end] == summary["code"]
    assert 1e-9 < hit.chance < 1e-4
    assert exact("boundary", [answer(decoded[summary["answer"]])], {1: [code]}) == []


def wrong(text: str, errors: int) -> str:
    places = random.Random(SEED).sample(range(len(text)), errors)
    return "".join("_" if i in places else c for i, c in enumerate(text))


def test_near_secrets_are_told_from_clean_answers() -> None:
    planted = [canary for group in PLANTED.values() for canary in group]
    leak = near("residue", [answer(CLEAN), answer(wrong(SECRET.normal, 3))], planted, Mint(2))
    assert leak.p == pytest.approx(1 / 2000)
    assert leak.effect > 0.8
    assert near("residue", [answer(CLEAN)], planted, Mint(2)).p == 1
    assert near("residue", [], planted, Mint(2)).p == 1


def test_near_raises_false_alarms_at_most_at_the_stated_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers that look as secrets do and hold other ones; randomness from a seed."""
    monkeypatch.setattr("sekisho.probe.oracles.NEAR_MIN", 0.0)
    source = random.Random(SEED)
    mint = Mint(3, source.randrange)
    alarms = 0
    for _ in range(300):
        planted = [mint.canary("account number") for _ in range(3)]
        seen = [answer(mint.canary("account number").text) for _ in range(2)]
        alarms += near("residue", seen, planted, mint).p <= 0.1
    assert 0.02 < alarms / 300 < 0.15, f"seed {SEED}"


def rules(found: list[Finding]) -> list[str]:
    return [one.rule for one in found]


def test_an_over_long_prompt_is_to_be_refused() -> None:
    assert rules(structural("boundary", answer("x"), over_long=True)) == ["PROBE003"]
    assert rules(structural("boundary", broken(), over_long=True)) == ["PROBE007"]
    assert structural("boundary", refused(), over_long=True) == []


@pytest.mark.parametrize(
    ("status", "sent", "is_fault"),
    [
        (500, True, True),
        (503, True, True),
        (0, True, True),  # the connection was cut, or time ran out
        (200, True, True),
        (0, False, False),  # the budget, or nobody there
        (401, True, False),
        (413, True, False),  # a page of a proxy, which did refuse
        (429, True, False),
    ],
)
def test_only_what_the_endpoint_took_and_failed_is_a_failure(
    status: int, sent: bool, is_fault: bool
) -> None:
    outcome = msgspec.structs.replace(broken(), status=status, sent=sent)
    assert bool(structural("boundary", outcome, over_long=True)) == is_fault


def test_a_promised_prompt_is_to_be_served() -> None:
    assert rules(structural("boundary", refused(), promised=True)) == ["PROBE006"]
    assert structural("boundary", answer("x"), promised=True) == []
    assert structural("boundary", refused()) == []


def test_a_failure_served_as_success_is_seen() -> None:
    empty = answer(" ", finish_reason="length", completion_tokens=0)
    assert rules(structural("boundary", empty)) == ["PROBE004"]
    assert structural("boundary", answer("", completion_tokens=0)) == []
    assert structural("boundary", answer("x", finish_reason="length")) == []
    assert structural("boundary", answer("", finish_reason="length", completion_tokens=2)) == []


def test_a_prompt_that_is_counted_otherwise_is_seen() -> None:
    [found] = structural("boundary", answer("x", prompt_tokens=1), prompt_tokens=range(90, 111))
    assert (found.rule, found.observed, found.expected) == ("PROBE005", 1, 90)
    [found] = structural("boundary", answer("x", prompt_tokens=300), prompt_tokens=range(90, 111))
    assert found.expected == 110
    assert structural("boundary", answer("x", prompt_tokens=90), prompt_tokens=range(90, 91)) == []
    assert structural("boundary", answer("x", prompt_tokens=None), prompt_tokens=range(9, 10)) == []


def test_timing_tells_hits_from_misses(rng: np.random.Generator) -> None:
    misses = rng.lognormal(-2, 0.3, 100).tolist()
    hits = (rng.lognormal(-2, 0.3, 100) * 0.5).tolist()
    assert timing("timing", hits, misses).p < 1e-6
    assert timing("timing", misses[:50], misses[50:]).p > 0.01


def test_verdicts_say_what_was_excluded() -> None:
    result = conclude("residue", [answer(CLEAN)] * 299 + [broken()], [])
    assert result.verdict == Verdict.NO_LEAK_SEEN
    assert result.rate_caught == pytest.approx(0.01, abs=1e-4)
    assert result.sentence() == (
        "no leak seen in 299 trials: a leak in 1.00% of them or more would have been caught with "
        "95% confidence; 1 more could not be used"
    )
    assert result.unusable == {"the stream was cut off": 1}


def test_what_is_broken_is_never_no_leak() -> None:
    for trials in ([], [broken()] * 30, [answer(CLEAN)] * 10 + [broken()] * 11):
        result = conclude("residue", trials, [])
        assert result.verdict == Verdict.INCONCLUSIVE
        assert "inconclusive" in result.sentence()
    result = conclude("residue", [answer(CLEAN)] * 3, [], unplanted={"no key": 4})
    assert result.verdict == Verdict.INCONCLUSIVE
    assert result.unusable == {"no key": 4}
    blind = conclude("crossed", [answer(CLEAN)] * 30, [], sensitivity=0)
    assert blind.verdict == Verdict.INCONCLUSIVE


def test_what_a_trial_may_miss_widens_what_is_excluded() -> None:
    result = conclude("residue", [answer(CLEAN)] * 300, [], sensitivity=0.5)
    assert result.rate_caught == pytest.approx(0.02, rel=0.01)
    assert "if 50% of leaks show" in result.sentence()


def test_a_leak_is_a_leak_also_in_a_broken_run() -> None:
    trials: list[Outcome] = [broken(text=SECRET.text)]
    result = conclude("residue", trials, exact("residue", trials, PLANTED))
    assert result.verdict == Verdict.LEAK
    assert result.sentence() == "leak: 1 finding"


def test_a_fault_that_is_no_leak_leaves_the_verdict_and_fails_the_run() -> None:
    found = structural("boundary", answer("x"), over_long=True)
    result = conclude("boundary", [answer(CLEAN)] * 30, found)
    assert result.verdict == Verdict.NO_LEAK_SEEN
    assert Result(techniques=(result,)).exit_code() == 1


def test_exit_codes() -> None:
    clean = conclude("residue", [answer(CLEAN)] * 30, [])
    open_one = conclude("crossed", [], [])
    assert Result(techniques=(clean,)).exit_code() == 0
    assert Result(techniques=(clean, open_one)).exit_code() == 3
    assert Result(techniques=()).exit_code() == 3


def statistic(p: float, technique: str = "residue") -> TestRun:
    return TestRun(rule="PROBE002", technique=technique, p=p, effect=0.9, message="x", report="a#1")


def test_tests_are_adjusted_over_the_whole_run() -> None:
    def result(name: str, *p_values: float) -> Any:
        tests = tuple(statistic(p, name) for p in p_values)
        return conclude(name, [answer(CLEAN)] * 30, [], tests=tests)

    alone = settle([result("residue", 0.009)])
    assert [one.verdict for one in alone.techniques] == [Verdict.LEAK]
    assert alone.techniques[0].findings[0].p == pytest.approx(0.009)
    assert alone.techniques[0].findings[0].report == "a#1"
    among = settle(
        [result("residue", 0.009), result("timing", 0.5, 0.6), result("boundary", 0.001)]
    )
    assert [one.verdict for one in among.techniques] == [
        Verdict.NO_LEAK_SEEN,
        Verdict.NO_LEAK_SEEN,
        Verdict.LEAK,
    ]
    assert among.exit_code() == 1
    assert settle([]).techniques == ()


def test_rules_are_whole_and_their_ids_are_stable() -> None:
    assert list(RULES) == [f"PROBE{number:03d}" for number in range(1, len(RULES) + 1)]
    assert len({rule.name for rule in RULES.values()}) == len(RULES)
    for rule in RULES.values():
        assert rule.help.endswith(".")
        # Answers that change need not hold anything of the other account.
        is_leak = rule.certainty != Certainty.STRUCTURAL and rule.id != "PROBE013"
        assert rule.is_leak == is_leak
    assert RULES["PROBE001"].name == "canary-in-answer"
    assert "secure" not in " ".join(verdict.value for verdict in Verdict)
