"""Tokens per second, colocated and with all checks on, against ``transformers`` `generate`.

The peer is a static batch with the same prompts, greedy, on the same number of threads. It runs in
bf16 and in fp32, and the faster of the two is the peer of the target: without AVX-512, torch's
bf16 product is many times slower than its fp32 one, and then only fp32 is run.
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
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Slower than this over the rows of a decode step and of the prompts alike, bf16 cannot be the
# faster dtype, and a round of it takes minutes.
_HOPELESS = 1.5


def run(rounds: int | None) -> list[Row]:
    """Ours against transformers in both dtypes, in turns within each round."""
    demo = load_demo()
    torch.set_num_threads(THREADS)
    engine = Engine(demo, max(CONCURRENCIES))
    peers = {name: _load(demo, dtype) for name, dtype in _DTYPES.items()}
    agreement = _agreement(engine, peers["fp32"])
    if agreement < _AGREEMENT_MIN:
        raise BenchError(f"only {agreement:.0%} of first tokens agree with transformers")
    rows = []
    for count in CONCURRENCIES:
        slowdown = _bf16_slowdown(count)
        hopeless = slowdown > _HOPELESS
        models = {name: peers[name] for name in peers if name == "fp32" or not hopeless}
        ours: list[float] = []
        theirs: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds or ROUNDS):
            ours.append(_ours(engine, count, ANSWER_TOKENS)[0])
            for name, model in models.items():
                theirs[name].append(_theirs(model, demo, count, ANSWER_TOKENS)[0])
        best = max(theirs, key=lambda name: median(theirs[name]))
        for name, samples in theirs.items():
            note = f"transformers {name}"
            if hopeless:
                note += f"; its bf16 product is {slowdown:.0f}x slower here"
            elif name == best:
                note += ", the faster dtype"
            case = f"{count} x ({PROMPT_TOKENS} in, {ANSWER_TOKENS} out)"
            target = TARGET if name == best else None
            rows.append(rate_row("engine", case, "tok/s", ours, samples, target, note))
    first = f"{len(demo.prompts)} first tokens as transformers fp32 gives them"
    return [*rows, Row("engine", "agreement", "%", agreement * 100, note=first)]


def _bf16_slowdown(count: int) -> float:
    """How many times longer torch's bf16 product takes than its fp32 one, where it looks best:
    over the rows of a decode step or of the prompts."""
    weight = torch.randn(3072, 576)
    slowdowns = []
    for rows in (count, min(count * PROMPT_TOKENS, 512)):
        x = torch.randn(rows, 576)
        seconds = []
        for dtype in _DTYPES.values():
            a, b = x.to(dtype), weight.to(dtype)
            times = []
            for _ in range(5):
                start = time.perf_counter()
                torch.mm(a, b.t())
                times.append(time.perf_counter() - start)
            seconds.append(min(times))
        slowdowns.append(seconds[0] / seconds[1])
    return min(slowdowns)


def _load(demo: Demo, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
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
