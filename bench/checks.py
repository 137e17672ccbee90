"""What verify before release costs: isolation ``standard`` against ``off``.

Two engines stand side by side in one process and step in turns, so that whatever else the machine
does meets both; the order changes with every step and the engines change sides with every round.
Both compute the same bits, so step i of one is step i of the other.
"""

import time
from statistics import median

from bench.demo import ANSWER_TOKENS, CONCURRENCIES, Engine, add_requests, collect, load_demo
from bench.report import BenchError, Row

ROUNDS = 5
TARGET = 0.99


def run(rounds: int | None) -> list[Row]:
    """Tokens per second of a run in which every step takes its median over the rounds. The ratio
    is the median over pairs of neighbouring steps, which have the same noise."""
    demo = load_demo()
    engines = [Engine(demo, max(CONCURRENCIES)) for _ in range(2)]
    _round(engines, 1, 4)
    return [_case(engines, count, rounds or ROUNDS) for count in CONCURRENCIES]


def _case(engines: list[Engine], count: int, rounds: int) -> Row:
    steps: dict[str, list[list[float]]] = {"standard": [], "off": []}
    pairs: list[float] = []
    verify = total = 0.0
    for _ in range(rounds):
        engines.reverse()
        found, seconds = _round(engines, count, ANSWER_TOKENS)
        for isolation, times in found.items():
            steps[isolation].append(times)
        pairs += [off / on for on, off in zip(*found.values(), strict=True)]
        verify += seconds
        total += sum(found["standard"])
    tokens = count * ANSWER_TOKENS
    rates = {
        isolation: tokens / sum(median(times) for times in zip(*runs, strict=True))
        for isolation, runs in steps.items()
    }
    return Row(
        "checks",
        f"{count} concurrent",
        "tok/s",
        rates["standard"],
        rates["off"],
        median(pairs),
        TARGET,
        f"isolation off; verify is {verify / total:.2%} of the time of all steps",
        {name: [tokens / sum(times) for times in runs] for name, runs in steps.items()},
    )


def _round(engines: list[Engine], count: int, answer: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of every step by isolation, and those of all calls of verify."""
    made = {name: engines[i].scheduler(name) for i, name in enumerate(("standard", "off"))}
    for scheduler, _ in made.values():
        add_requests(scheduler, engines[0].demo, count, answer)
    times: dict[str, list[float]] = {name: [] for name in made}
    order = list(made)
    while not all(scheduler.idle for scheduler, _ in made.values()):
        order.reverse()
        for name in order:
            start = time.perf_counter()
            made[name][0].step(0.0)
            times[name].append(time.perf_counter() - start)
    texts = [collect(scheduler, count, answer) for scheduler, _ in made.values()]
    if texts[0] != texts[1]:
        raise BenchError("isolation changed the answer")
    return times, made["standard"][1].seconds
