"""Tokens per second, colocated and with all checks on, against ``transformers`` `generate`.

The peer is a static batch with the same prompts, greedy, on the same number of threads. It runs in
bf16 and in fp32, and the faster of the two is the peer of the target: without AVX-512, torch's
bf16 product is slower than its fp32 one.
"""

import time
from statistics import median
from typing import Any

import torch

from bench.demo import (
    ANSWER_TOKENS,
    CONCURRENCIES,
    PROMPT_TOKENS,
    THREADS,
    Demo,
    Engine,
    add_requests,
    collect,
    load_demo,
)
from bench.report import BenchError, Row, rate_row

ROUNDS = 3
TARGET = 1.5
# Greedy first tokens of fp32 sums over bf16 weights, here and there: rounding may part a few.
_AGREEMENT_MIN = 0.9


def run(rounds: int | None) -> list[Row]:
    """Three sides a round: ours, transformers in bf16 and in fp32."""
    demo = load_demo()
    torch.set_num_threads(THREADS)
    engine = Engine(demo, max(CONCURRENCIES))
    peers = {"bf16": _load(demo, torch.bfloat16), "fp32": _load(demo, torch.float32)}
    agreement = _agreement(engine, peers["fp32"])
    if agreement < _AGREEMENT_MIN:
        raise BenchError(f"only {agreement:.0%} of first tokens agree with transformers")
    for model in peers.values():
        _theirs(model, demo, 1, 4)
    rows = []
    for count in CONCURRENCIES:
        ours: list[float] = []
        theirs: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(rounds or ROUNDS):
            ours.append(_ours(engine, count, ANSWER_TOKENS)[0])
            for name, model in peers.items():
                theirs[name].append(_theirs(model, demo, count, ANSWER_TOKENS)[0])
        best = max(theirs, key=lambda name: median(theirs[name]))
        for name, samples in theirs.items():
            faster = f", the faster; {agreement:.0%} of first tokens agree"
            rows.append(
                rate_row(
                    "engine",
                    f"{count} x ({PROMPT_TOKENS} in, {ANSWER_TOKENS} out)",
                    "tok/s",
                    ours,
                    samples,
                    target=TARGET if name == best else None,
                    note=f"transformers {name}" + (faster if name == best else ""),
                )
            )
    return rows


def _load(demo: Demo, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(demo.folder), dtype=dtype).eval()


def _agreement(engine: Engine, model: Any) -> float:
    count = len(engine.demo.prompts)
    ours, theirs = _ours(engine, count, 1)[1], _theirs(model, engine.demo, count, 1)[1]
    return sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True)) / count


def _ours(engine: Engine, count: int, answer: int) -> tuple[float, list[list[int]]]:
    """Tokens per second from the first `add` to the last release, and the tokens."""
    start = time.perf_counter()
    scheduler, _ = engine.scheduler("standard")
    add_requests(scheduler, engine.demo, count, answer)
    while scheduler.step(0.0):
        pass
    seconds = time.perf_counter() - start
    return count * answer / seconds, collect(scheduler, count, answer)


def _theirs(model: Any, demo: Demo, count: int, answer: int) -> tuple[float, list[list[int]]]:
    ids = torch.tensor(demo.prompts[:count])
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=answer,
            min_new_tokens=answer,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - start
    tokens: list[list[int]] = out[:, PROMPT_TOKENS:].tolist()
    return count * answer / seconds, tokens
