"""Runs of the probe as they could have been, judged by the real oracles: no endpoint is needed."""

from typing import Any

import msgspec
import numpy as np

from sekisho.probe.budget import Cost, Prices
from sekisho.probe.canary import Document, Mint
from sekisho.probe.exchange import Answer, Ask, Inconclusive, Outcome, Refused, Whole
from sekisho.probe.model import Result, TechniqueResult, Times, Verdict, conclude, point
from sekisho.probe.oracles import exact, settle, structural, timing
from sekisho.probe.output import About
from sekisho.probe.power import power_curve
from sekisho.probe.techniques.base import planting

SEED = 20261202
MINT = Mint(SEED)
ABOUT = About(
    base_url="http://127.0.0.1:8000/v1",
    model="glm",
    started="2026-12-02T10:00:00Z",
    seed=SEED,
    authorised_by="Ada, 2026-12-01",
    version="0.1.0",
    spent=Cost(120, 40_000, 3_000),
    prices=Prices(prompt_per_million=1.0, answer_per_million=2.0),
    self_test="each of 6 techniques caught its defect within 20 trials; no false alarm in 300",
)


def answer(serial: int, text: str, prompt: str = "What was said?", **more: Any) -> Answer:
    fields: dict[str, Any] = {"prompt_tokens": 20, "completion_tokens": 9, "aside": ""}
    fields |= {name: more.pop(name) for name in ("prompt_tokens", "aside") if name in more}
    whole = Whole(text=text, finish_reason="stop", **fields)
    return Answer(**_common(serial, prompt, more), whole=whole)


def refused(serial: int, message: str = "too long", **more: Any) -> Refused:
    return Refused(**_common(serial, "long " * 9, {"status": 400, "raw": "{}"} | more),
                   message=message)  # fmt: skip


def broken(serial: int, text: str = "", **more: Any) -> Inconclusive:
    reason = more.pop("reason", "the stream was cut off")
    return Inconclusive(**_common(serial, "?", more), reason=reason, text=text)


def _common(serial: int, prompt: str, more: dict[str, Any]) -> dict[str, Any]:
    base = {"account": "B", "seconds": 0.1, "status": 200, "raw": "{}"}
    return base | {"serial": serial, "ask": Ask(prompt=prompt, answer_tokens=8)} | more


def planted(serial: int, document: Document) -> Answer:
    """What the first account sent."""
    return answer(serial, "Noted.", ask=planting(document, 8), account="A")


class Run:
    """A result with the exchanges that it rests on."""

    def __init__(self, result: Result, exchanges: list[Outcome]) -> None:
        self.result = result
        self.exchanges = {outcome.serial: outcome for outcome in exchanges}


def leaking(received: str | None = None, document: Document | None = None) -> Run:
    """Boundary sees a secret in the answer to an over-long prompt, and a wrong count; timing sees
    a shared prefix; residue sees nothing; interference could not be judged.

    Args:
        received: by the second account; holds a secret of ``document``, or of one that is made.
    """
    document = document or MINT.document(120)
    secret = document.canaries[0].text
    received = received or f"Certainly. The code is {secret.upper().replace('-', ' ')}, I think."
    first, leak = planted(1, document), answer(2, received, prompt_tokens=1)
    asked = [answer(n, "All is well.") for n in (3, 4, 5)]
    refusals = [refused(6), refused(7)]
    cut = broken(8)
    lengths = {2: 4000, 3: 900, 4: 1000, 5: 1000, 6: 1100, 7: 4000, 8: 2000}
    trials: list[Outcome] = [leak, *asked, *refusals, cut]
    planting_of = {first.serial: document.canaries}
    findings = exact("boundary", trials, planting_of, report="sglang#30233")
    findings += structural("boundary", leak, prompt_tokens=range(3990, 4011), report="sglang#33507")
    boundary = msgspec.structs.replace(
        conclude("boundary", trials, findings),
        points=tuple(point(lengths[outcome.serial], outcome) for outcome in trials),
    )
    quiet: list[Outcome] = [answer(n, "Nothing.") for n in range(20, 320)]
    residue = conclude("residue", quiet, [])
    none = conclude("interference", [broken(n, reason="it failed") for n in (330, 331)], [])
    result = settle([boundary, residue, timed(), none])
    return Run(result, [first, *trials, *quiet])


def timed() -> TechniqueResult:
    """Hits are 20 ms sooner."""
    rng = np.random.default_rng(SEED)
    misses = tuple(rng.normal(0.120, 0.010, 60).tolist())
    hits = tuple(rng.normal(0.100, 0.010, 60).tolist())
    return TechniqueResult(
        technique="timing",
        verdict=Verdict.NO_LEAK_SEEN,
        clean_trials=120,
        unusable={},
        rate_caught=0.2,
        sensitivity=1.0,
        findings=(),
        tests=(timing("timing", hits, misses),),
        times=Times(hits_s=hits, misses_s=misses),
        own_times=Times(hits_s=hits, misses_s=misses),
        power=power_curve(misses, 0.02, rng, counts=(5, 20, 60)),
    )


def quiet() -> Run:
    """Nothing was seen."""
    trials: list[Outcome] = [answer(n, "Nothing.") for n in range(1, 301)]
    return Run(settle([conclude("residue", trials, [])]), trials)
