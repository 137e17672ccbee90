"""What the page's figures draw, as plain values in the units of a drawing 720 wide."""

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from sekisho.probe.model import TechniqueResult, Times
from sekisho.probe.rules import RULES

WIDTH = 720.0
LEFT, RIGHT = 104.0, 704.0
"""Of the part of a drawing that holds data."""
TOP, BOTTOM = 16.0, 216.0
LANES = ("leak", "answered", "refused", "inconclusive")
LANE_HEIGHT = 40.0
_BIN = 18.0
_STEPS_MAX = 400


class Tick(NamedTuple):
    """A mark of an axis: where, and what it says."""

    at: float
    label: str


class Mark(NamedTuple):
    """Questions of about one length with one outcome; ``title`` says which and how many."""

    x: float
    y: float
    lane: str
    questions: int
    title: str


class LeakMap(NamedTuple):
    """Outcomes by length of prompt, on a logarithmic axis.

    Attributes:
        limits: where answers end and where refusals begin.
        rows: tokens, how many of each of `LANES`, in the same order.
    """

    marks: list[Mark]
    ticks: list[Tick]
    limits: list[Tick]
    height: float
    rows: list[tuple[int, ...]]


class Curve(NamedTuple):
    """A line; ``path`` is that of an SVG element, ``style`` a class, ``dots`` its points."""

    label: str
    style: str
    path: str
    dots: list[tuple[float, float, str]]


class Chart(NamedTuple):
    """Lines over two axes; ``beyond`` says what lies outside, ``head`` and ``rows`` hold the
    same as a table."""

    curves: list[Curve]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    x_label: str
    beyond: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def leak_map(result: TechniqueResult) -> LeakMap | None:
    """Of a technique that has points."""
    if not result.points:
        return None
    leaking = {f.seen_in for f in result.findings if RULES[f.rule].is_leak and f.seen_in}
    counted: dict[int, list[int]] = defaultdict(lambda: [0] * len(LANES))
    for one in result.points:
        place = LANES.index("leak" if one.serial in leaking else one.outcome)
        counted[one.tokens][place] += 1
    low, high = max(1, min(counted)), max(2, *counted)
    span = math.log2(max(high / low, 1.05))

    def x(tokens: int) -> float:
        return LEFT + 12 + (RIGHT - LEFT - 24) * math.log2(max(tokens, low) / low) / span

    marks = []
    for place, lane in enumerate(LANES):
        bins: dict[int, list[int]] = defaultdict(list)
        for tokens in sorted(counted):
            bins[int(x(tokens) // _BIN)] += [tokens] * counted[tokens][place]
        for tokens_of in filter(None, bins.values()):
            first, last = tokens_of[0], tokens_of[-1]
            lengths = f"{first:,}" if first == last else f"{first:,} to {last:,}"
            title = f"{lengths} tokens: {len(tokens_of)} {lane}"
            middle = (x(first) + x(last)) / 2
            y = TOP + LANE_HEIGHT * (place + 0.5)
            marks.append(Mark(round(middle, 1), y, lane, len(tokens_of), title))
    answered = [one.tokens for one in result.points if one.outcome == "answered"]
    refused = [one.tokens for one in result.points if one.outcome == "refused"]
    limits = [Tick(x(max(answered)), f"answered up to {max(answered):,}")] if answered else []
    limits += [Tick(x(min(refused)), f"refused from {min(refused):,}")] if refused else []
    return LeakMap(
        marks=marks,
        ticks=[Tick(x(n), f"{n:,}") for n in _doublings(low, high)],
        limits=[Tick(round(limit.at, 1), limit.label) for limit in limits],
        height=TOP + LANE_HEIGHT * len(LANES),
        rows=[(tokens, *counted[tokens]) for tokens in sorted(counted)],
    )


def time_chart(times: Times) -> Chart | None:
    """The share of first tokens that had come by each moment (ECDF), after hits and misses.

    The axis ends at the 98th percentile of both, as one request that took ages would make all
    others one line.
    """
    kinds = {
        "could be hit": [t * 1000 for t in times.hits_s if math.isfinite(t)],
        "could not": [t * 1000 for t in times.misses_s if math.isfinite(t)],
    }
    every = sorted(value for values in kinds.values() for value in values)
    if not every:
        return None
    low, high = every[0], _quantile(every, 0.98)
    high = high if high > low else low + 1.0
    outside = sum(value > high for value in every)

    def x(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (min(value, high) - low) / (high - low)

    curves, rows = [], []
    for (label, values), style in zip(kinds.items(), ("hit", "miss"), strict=True):
        if values:
            curves.append(Curve(label, style, _steps(sorted(values), low, high), []))
            shown = (0.0, 0.1, 0.5, 0.9, 1.0)
            quantiles = [f"{_quantile(sorted(values), share):,.1f}" for share in shown]
            rows.append((label, f"{len(values):,}", *quantiles))
    return Chart(
        curves=curves,
        x_ticks=[Tick(x(value), _number(value)) for value in _round_steps(low, high)],
        y_ticks=_shares(),
        x_label="milliseconds to the first token",
        beyond=f"{outside} of {len(every)} times lie beyond the right edge" if outside else "",
        head=("prefix", "times", "least", "10 %", "median", "90 %", "most"),
        rows=rows,
    )


def power_chart(result: TechniqueResult) -> Chart | None:
    """How likely a shift would have been seen, by the number of times of each kind."""
    by_shift: dict[float, list[tuple[int, float, float]]] = defaultdict(list)
    for one in result.power:
        by_shift[one.shift_s].append((one.count, one.power.low, one.power.high))
    if not by_shift:
        return None
    counts = sorted({count for points in by_shift.values() for count, _, _ in points})
    span = math.log2(max(counts[-1] / counts[0], 2))

    def at(count: int, share: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * math.log2(count / counts[0]) / span
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * share, 1)

    curves: list[Curve] = []
    rows: list[tuple[str, ...]] = []
    styles = ("first", "second", "third")
    for place, (shift, points) in enumerate(sorted(by_shift.items(), reverse=True)):
        label = f"{shift * 1000:.3g} ms"
        dots, low_ends, high_ends = [], [], []
        for count, low, high in sorted(points):
            title = f"{label} sooner, {count} of each kind: {low:.0%} to {high:.0%} would be seen"
            dots.append((*at(count, (low + high) / 2), title))
            low_ends.append(at(count, low))
            high_ends.append(at(count, high))
            rows.append((label, f"{count:,}", f"{low:.0%}", f"{high:.0%}"))
        line = " ".join(f"{'L' if i else 'M'}{x} {y}" for i, (x, y, _) in enumerate(dots))
        whiskers = zip(low_ends, high_ends, strict=True)
        line += "".join(f" M{x} {below}V{above}" for (x, below), (_, above) in whiskers)
        curves.append(Curve(label, styles[min(place, 2)], line, dots))
    return Chart(
        curves=curves,
        x_ticks=_apart([Tick(at(count, 0)[0], f"{count:,}") for count in counts]),
        y_ticks=_shares(),
        x_label="times of each kind",
        beyond="",
        head=("sooner by", "times of each kind", "seen at least", "seen at most"),
        rows=rows,
    )


def _steps(values: Sequence[float], low: float, high: float) -> str:
    """The path of an ECDF; of many values, at so many places that the eye sees no difference."""
    places = sorted(set(values))
    if len(places) > _STEPS_MAX:
        places = [places[i * (len(places) - 1) // (_STEPS_MAX - 1)] for i in range(_STEPS_MAX)]
    path = [f"M{LEFT} {BOTTOM}"]
    for value in places:
        if value > high:
            break
        share = bisect.bisect_right(values, value) / len(values)
        x = LEFT + (RIGHT - LEFT) * (value - low) / (high - low)
        path.append(f"H{x:.1f}V{BOTTOM - (BOTTOM - TOP) * share:.1f}")
    return "".join([*path, f"H{RIGHT}"])


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the smallest that so many do not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def _shares() -> list[Tick]:
    return [Tick(BOTTOM - (BOTTOM - TOP) * share, f"{share:.0%}") for share in (0, 0.5, 1)]


def _doublings(low: int, high: int) -> list[int]:
    """Powers of two between both ends; at least the ends themselves."""
    found = [2**n for n in range(low.bit_length() - 1, high.bit_length() + 1)]
    inside = [n for n in found if low <= n <= high]
    step = math.ceil(len(inside) / 8) or 1
    return inside[::step] if len(inside) > 1 else [low, high]


def _round_steps(low: float, high: float) -> list[float]:
    """About five round numbers between both ends."""
    step = 10.0 ** math.floor(math.log10((high - low) / 5))
    step *= next(n for n in (1, 2, 5, 10) if (high - low) / (step * n) <= 6)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:.4g}"


def _apart(ticks: list[Tick]) -> list[Tick]:
    """Without those that would run into the one before."""
    found: list[Tick] = []
    for tick in ticks:
        if not found or tick.at - found[-1].at >= 7.0 * len(tick.label) + 18:
            found.append(tick)
    return found
