"""Four ways to judge what came back: exact, near, structural, statistical.

The first needs no control: its chance follows from entropy. Near and statistical yield p-values,
and only `settle`, which sees all of a run's, turns them into findings.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from sekisho.probe.canary import Canary, Mint
from sekisho.probe.exchange import Answer, Inconclusive, Outcome, Refused
from sekisho.probe.match import Match, run, similarity
from sekisho.probe.model import Finding, Result, Span, TechniqueResult, TestRun, Verdict
from sekisho.probe.rules import RULES
from sekisho.probe.stats import ALPHA, Test, compare, holm

CHANCE_MAX = 1e-9
"""A match is proof if chance alone shows one like it in at most so many runs of this size."""
NEAR_MIN = 0.6
"""A lower similarity is not tested: half of a secret's characters stand in any long text."""
_DECOYS_MAX = 1999
_DECOYS_AS_NEAR_MAX = 10


def exact(
    technique: str,
    seen: Sequence[Outcome],
    planted: Mapping[int, Sequence[Canary]],
    *,
    rule: str = "PROBE001",
    report: str = "",
) -> list[Finding]:
    """Secrets of ``planted`` in ``seen``: one finding for each secret and exchange.

    Args:
        seen: exchanges in which none of ``planted`` may appear; broken ones are searched too.
        planted: secrets, by the serial of the exchange that sent them; in that one they may be.
    """
    secrets = [(serial, canary) for serial, group in planted.items() for canary in group]
    # The bound holds for one comparison; all of a call are the tries that chance had.
    comparisons = max(1, len(secrets) * sum(len(outcome.texts()) for outcome in seen))
    findings = []
    for outcome in seen:
        texts = outcome.texts()
        for serial, canary in secrets:
            if serial == outcome.serial:
                continue
            hits = [(index, hit) for index, text in enumerate(texts) if (hit := run(canary, text))]
            if not hits:
                continue
            index, best = max(hits, key=lambda pair: pair[1].bits)
            chance = best.chance * comparisons
            if chance <= CHANCE_MAX:
                span = Span(index, best.start, best.end)
                message = _told(outcome, best)
                findings.append(
                    Finding(
                        rule=rule,
                        technique=technique,
                        message=message,
                        seen_in=outcome.serial,
                        planted_in=serial,
                        canary=canary.serial,
                        span=span,
                        bits=best.bits,
                        chance=chance,
                        report=report,
                    )
                )
    return findings


def _told(outcome: Outcome, match: Match) -> str:
    part = "the whole" if match.whole else "a part"
    return (
        f"request {outcome.serial} of account {outcome.account} was sent {part} of secret "
        f"{match.canary.serial} ({match.bits:.0f} bits), which it never had"
    )


def near(
    technique: str,
    seen: Sequence[Outcome],
    planted: Sequence[Canary],
    mint: Mint,
    *,
    report: str = "",
) -> TestRun:
    """Do the answers come nearer to what was planted than to secrets that were never sent?

    The control is the same answers with as many decoys of the same kinds, drawn as the planted
    ones were; without a leak the two cannot be told apart, so that the rank is an exact p-value
    (Besag and Clifford 1991: it stops early where enough decoys come as near).
    """
    texts = [text for outcome in seen for text in outcome.texts()[:1]]
    score = max((similarity(planted, text) for text in texts), default=0.0)
    p = 1.0
    if score >= NEAR_MIN:
        as_near, drawn = 0, 0
        while drawn < _DECOYS_MAX and as_near < _DECOYS_AS_NEAR_MAX:
            decoys = [mint.canary(canary.kind) for canary in planted]
            as_near += any(similarity(decoys, text) >= score for text in texts)
            drawn += 1
        stopped = as_near == _DECOYS_AS_NEAR_MAX
        p = as_near / drawn if stopped else (1 + as_near) / (1 + drawn)
    return TestRun(
        rule="PROBE002",
        technique=technique,
        p=p,
        effect=score,
        message=f"the nearest answer is {score:.0%} like a planted secret",
        report=report,
    )


def structural(
    technique: str,
    outcome: Outcome,
    *,
    over_long: bool = False,
    promised: bool = False,
    prompt_tokens: range | None = None,
    report: str = "",
) -> list[Finding]:
    """Faults in status, counts and finish reason of one exchange.

    Args:
        over_long: the prompt is longer than every stated limit.
        promised: prompt and answer lie within the window that is advertised.
        prompt_tokens: what its prompt can have; None where nobody counted.
    """
    found: list[tuple[str, str, int | None, int | None]] = []
    if over_long and isinstance(outcome, Answer):
        found.append(("PROBE003", "was answered though longer than every limit", None, None))
    elif over_long and isinstance(outcome, Inconclusive) and _failed(outcome):
        found.append(("PROBE007", "was not refused though longer than every limit", None, None))
    if promised and isinstance(outcome, Refused):
        found.append(("PROBE006", "was refused within the advertised window", None, None))
    if isinstance(outcome, Answer):
        whole = outcome.whole
        empty = not (whole.text.strip() or whole.aside.strip() or whole.completion_tokens)
        if whole.finish_reason == "length" and empty:
            found.append(("PROBE004", "got an empty answer that says its length is reached", 0, 1))
        count = whole.prompt_tokens
        if prompt_tokens is not None and count is not None and count not in prompt_tokens:
            nearest = min((prompt_tokens[0], prompt_tokens[-1]), key=lambda n: abs(n - count))
            message = f"is counted as {count:,} tokens and has {nearest:,}"
            found.append(("PROBE005", message, count, nearest))
    return [
        Finding(
            rule=rule,
            technique=technique,
            message=f"request {outcome.serial} of account {outcome.account} {message}",
            seen_in=outcome.serial,
            observed=observed,
            expected=expected,
            report=report,
        )
        for rule, message, observed, expected in found
    ]


def _failed(outcome: Inconclusive) -> bool:
    """Did the endpoint take the request and fail, rather than ask for another key or rate?"""
    return outcome.sent and (outcome.status >= 500 or outcome.status in (0, 200))


def timing(
    technique: str,
    hits_s: Sequence[float],
    misses_s: Sequence[float],
    *,
    test: Test = "ks",
    report: str = "",
) -> TestRun:
    """Do first tokens come sooner where the other account's prefix could be hit?"""
    found = compare(hits_s, misses_s, test)
    return TestRun(
        rule="PROBE010",
        technique=technique,
        p=found.p,
        effect=found.effect,
        message=(
            f"{found.fast_count} and {found.slow_count} times: sooner in {found.effect:.0%} of "
            f"pairs, by {found.shift_s * 1000:.1f} ms"
        ),
        report=report,
    )


def settle(results: Sequence[TechniqueResult], alpha: float = ALPHA) -> Result:
    """The whole run: tests that stand become findings, and leaks in their technique's verdict.

    Over all tests together it raises a false alarm with probability ``alpha`` at most
    (Holm 1979).
    """
    made = [test for result in results for test in result.tests]
    adjusted = iter(holm([test.p for test in made]))
    settled = []
    for result in results:
        found = [
            Finding(
                rule=test.rule,
                technique=test.technique,
                message=f"{RULES[test.rule].help} Here {test.message}.",
                p=p,
                report=test.report,
            )
            for test, p in zip(result.tests, islice(adjusted, len(result.tests)), strict=True)
            if p <= alpha
        ]
        is_leak = any(RULES[finding.rule].is_leak for finding in found)
        settled.append(
            msgspec.structs.replace(
                result,
                verdict=Verdict.LEAK if is_leak else result.verdict,
                findings=(*result.findings, *found),
            )
        )
    return Result(techniques=tuple(settled))
