"""The probe's page: figures show the data and nothing else, and what is hostile stays text."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from probe_report_kit import ABOUT, MINT, Run, answer, leaking, planted, quiet, timed
from sekisho.probe.model import Point, Result, TechniqueResult, Times, conclude
from sekisho.probe.oracles import exact
from sekisho.probe.output import figures, render
from sekisho.probe.output.figures import BOTTOM, LEFT, RIGHT, TOP
from sekisho.probe.power import PowerPoint
from sekisho.probe.stats import Interval

VOID = {"meta", "link"}
HOSTILE = (
    "</blockquote></style></title><script>alert(1)</script><img src=x onerror=f()> {{7*7}}\u202e"
)


class Page(HTMLParser):
    """The elements of a page; it fails on a wrong nesting."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {"mark": [], "title": [], "td": []}
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
            self.words.get(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] in self.words:
            self.words[self._open[-1]][-1] += data

    def all(self, tag: str, style: str = "") -> list[dict[str, str | None]]:
        found = [attributes for name, attributes in self.elements if name == tag]
        return [a for a in found if not style or style in (a.get("class") or "").split()]


def page(run: Run) -> Page:
    return Page(render(run.result, ABOUT, run.exchanges, "html"))


def mapped(points: list[tuple[int, int, str]]) -> TechniqueResult:
    made = [Point(tokens=t, serial=s, outcome=o) for t, s, o in points]  # type: ignore[arg-type]
    return msgspec.structs.replace(conclude("boundary", [], []), points=tuple(made))


def test_the_page_has_every_part_and_names_each_technique() -> None:
    run = leaking()
    found = page(run)
    assert len(found.all("tr", "technique")) == 4
    assert len(found.all("article", "finding")) == 3
    assert len(found.all("figure", "leak-map")) == 1
    assert len(found.all("figure", "chart")) == 3
    for one in run.result.techniques:
        assert one.sentence() in found.words["td"]
    rates = found.words["td"][2:16:4]
    assert rates == ["none", "0.99% or more", "none", "none"]
    ids = [a["id"] for _, a in found.elements if "id" in a]
    assert len(set(ids)) == len(ids)
    targets = {(a["href"] or "").removeprefix("#") for a in found.all("a")}
    assert targets <= set(ids)
    named = {a["aria-labelledby"] for _, a in found.elements if "aria-labelledby" in a}
    assert named <= set(ids)
    assert "that this endpoint keeps its accounts apart" in found.text
    assert ABOUT.authorised_by in found.text and "120 requests" in found.text


def test_parts_without_data_leave_no_trace() -> None:
    found = page(quiet())
    assert not found.all("figure") and not found.all("article")
    assert "NO LEAK SEEN" in found.text
    nothing = page(Run(Result(techniques=(), not_run=("abort", "ids")), []))
    assert "No technique was run" in nothing.text and "abort, ids" in nothing.text
    assert "UNCLEAR" in nothing.text


def test_the_marked_words_are_the_secret_in_both_requests() -> None:
    document = MINT.document(120)
    secret = document.canaries[0].text
    found = page(leaking(f"it is {secret.lower()}", document))
    assert found.words["mark"][:2] == [secret, secret.lower()]


def test_hostile_text_in_every_field_stays_text() -> None:
    document = MINT.document(120)
    trials = [answer(2, HOSTILE + document.canaries[0].text, HOSTILE, account=HOSTILE)]
    found = exact("boundary", trials, {1: document.canaries}, report=HOSTILE)
    one = conclude("boundary", trials, found, unplanted={HOSTILE: 2})
    hostile = msgspec.structs.replace(
        one, technique=HOSTILE, notes=(HOSTILE,), points=mapped([(9, 2, "answered")]).points,
        times=timed().times, power=timed().power,
    )  # fmt: skip
    about = msgspec.structs.replace(
        ABOUT, base_url=HOSTILE, model=HOSTILE, authorised_by=HOSTILE, self_test=HOSTILE,
        version=HOSTILE, started=HOSTILE,
    )  # fmt: skip
    exchanges = {1: planted(1, document), 2: trials[0]}
    text = render(Result(techniques=(hostile,)), about, exchanges, "html")
    made, plain = Page(text), page(leaking())
    assert not made.all("script") and not made.all("img") and "<script" not in text
    assert {tag for tag, _ in made.elements} <= {tag for tag, _ in plain.elements}
    attributes = {name for _, given in made.elements for name in given}
    assert not [name for name in attributes if name.startswith("on")]
    assert "\u202e" not in text and "{{7*7}}" in made.text
    assert re.findall(r"Content-Security-Policy\" content=\"default-src 'none'", text)


def test_the_leak_map_holds_every_point_once() -> None:
    points = [(100 + n % 7, n, "answered") for n in range(40)]
    points += [(900, 50, "refused"), (900, 51, "refused"), (4000, 52, "inconclusive")]
    points += [(500, 53, "inconclusive")]
    drawn = figures.leak_map(mapped(points))
    assert drawn is not None
    assert sum(mark.questions for mark in drawn.marks) == len(points)
    assert sum(sum(row[1:]) for row in drawn.rows) == len(points)
    assert (900, 0, 0, 2, 0) in drawn.rows and (4000, 0, 0, 0, 1) in drawn.rows
    assert [limit.label for limit in drawn.limits] == ["answered up to 106", "refused from 900"]
    by_x = sorted(drawn.marks, key=lambda mark: mark.x)
    assert LEFT < by_x[0].x < by_x[-1].x < RIGHT
    lanes = {mark.lane: mark.y for mark in drawn.marks}
    assert lanes["answered"] < lanes["refused"] < lanes["inconclusive"]
    found = page(Run(Result(techniques=(mapped(points),)), []))
    counts = [int(a["data-count"] or 0) for a in found.all("g", "mark")]
    assert sum(counts) == len(points)


def test_only_a_leak_seen_in_a_question_is_drawn_as_one() -> None:
    result = leaking().result.techniques[0]
    drawn = figures.leak_map(result)
    assert drawn is not None
    assert [row for row in drawn.rows if row[1]] == [(4000, 1, 0, 1, 0)]
    assert "answered up to 4,000" in [limit.label for limit in drawn.limits]
    unharmed = msgspec.structs.replace(result, findings=result.findings[1:])
    assert unharmed.findings[0].rule == "PROBE005"
    again = figures.leak_map(unharmed)
    assert again is not None and not any(row[1] for row in again.rows)


@pytest.mark.parametrize("tokens", [[7], [1, 1], [0, 3], [1000, 1001], [3, 10**6]])
def test_a_map_of_any_lengths_stays_within_its_frame(tokens: list[int]) -> None:
    drawn = figures.leak_map(mapped([(n, i, "answered") for i, n in enumerate(tokens)]))
    assert drawn is not None
    for at in [*[m.x for m in drawn.marks], *[t.at for t in (*drawn.ticks, *drawn.limits)]]:
        assert LEFT <= at <= RIGHT


def corners(path: str) -> list[tuple[float, float]]:
    """The steps of an ECDF's path: where it rises, and to where."""
    return [(float(x), float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", path)]


def test_the_lines_of_times_are_their_distributions() -> None:
    hits, misses = (0.010, 0.020, 0.020, 0.040), (0.020, 0.030, 0.040, 0.050)
    drawn = figures.time_chart(Times(hits_s=hits, misses_s=misses))
    assert drawn is not None and not drawn.beyond
    low, high = 10.0, 50.0
    for curve, values in zip(drawn.curves, (hits, misses), strict=True):
        expected = []
        for value in sorted(set(values)):
            share = sum(other <= value for other in values) / len(values)
            x = LEFT + (RIGHT - LEFT) * (value * 1000 - low) / (high - low)
            expected.append((x, BOTTOM - (BOTTOM - TOP) * share))
        assert corners(curve.path) == [pytest.approx(pair, abs=0.06) for pair in expected]
    assert drawn.rows[0] == ("could be hit", "4", "10.0", "10.0", "20.0", "40.0", "40.0")
    assert drawn.rows[1][:2] == ("could not", "4")


def test_one_time_that_took_ages_is_told_and_not_drawn() -> None:
    misses = (*[0.1 + n / 1000 for n in range(99)], 600.0)
    drawn = figures.time_chart(Times(hits_s=misses, misses_s=misses))
    assert drawn is not None and "4 of 200" in drawn.beyond
    assert max(tick.at for tick in drawn.x_ticks) <= RIGHT
    assert drawn.rows[0][-1] == "600,000.0"


@pytest.mark.parametrize("times", [(), (0.1,), (0.0, 0.0), (float("nan"),), (float("inf"), 1.0)])
def test_few_or_odd_times_are_no_error(times: tuple[float, ...]) -> None:
    drawn = figures.time_chart(Times(hits_s=times, misses_s=times))
    assert (drawn is None) == (not any(t < 1e9 for t in times))


def test_thousands_of_times_make_a_short_path() -> None:
    times = tuple(n / 1e6 for n in range(50_000))
    drawn = figures.time_chart(Times(hits_s=times, misses_s=times))
    assert drawn is not None and all(len(curve.path) < 10_000 for curve in drawn.curves)


def test_the_power_curve_holds_every_interval() -> None:
    points = [
        PowerPoint(count=count, shift_s=shift, power=Interval(low, high))
        for shift, low, high in ((0.02, 0.8, 0.9), (0.01, 0.1, 0.3))
        for count in (5, 20, 80)
    ]
    result = msgspec.structs.replace(timed(), power=tuple(points))
    drawn = figures.power_chart(result)
    assert drawn is not None
    assert [curve.label for curve in drawn.curves] == ["20 ms", "10 ms"]
    xs = [x for x, _, _ in drawn.curves[0].dots]
    assert xs == [LEFT, (LEFT + RIGHT) / 2, RIGHT]
    assert drawn.curves[1].dots[0][1] == pytest.approx(BOTTOM - 0.2 * (BOTTOM - TOP), abs=0.1)
    assert drawn.rows[0] == ("20 ms", "5", "80%", "90%") and len(drawn.rows) == 6
    assert figures.power_chart(msgspec.structs.replace(timed(), power=())) is None
