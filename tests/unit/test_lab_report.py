"""The report of the lab: what stands in it, hostile text stays text, parts are optional."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lab_report_kit import DEFECTS, SECRET, cell, incident, matrix, prices, report
from sekisho.lab import figures
from sekisho.lab.figures import cases, excerpt, grid, heat, outcome_shares
from sekisho.lab.report import render, write_report
from sekisho.lab.results import Cell, Incident, LabReport, PageView, Side
from sekisho.report import page as house
from sekisho.report.page import Segment, clean, segments

VOID = {"meta", "link", "br", "img", "hr", "input"}
HOSTILE = "</blockquote></script><script>alert(1)</script><img src=x onerror=f()>&lt;\"' {{7*7}}"


class Page(HTMLParser):
    """The elements of a page; it fails on a wrong nesting."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.marks: list[str] = []
        self.answer = ""
        self.text = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "mark" and self._inside("answer-b"):
            self.marks.append("")
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._inside("answer-b"):
            self.answer += data
            if self._open[-1][0] == "mark":
                self.marks[-1] += data

    def _inside(self, name: str) -> bool:
        return any(found == name for _, found in self._open)

    def all(self, tag: str, style: str = "") -> list[dict[str, str | None]]:
        """Attributes of all elements of ``tag`` that have the class ``style``."""
        found = [attributes for name, attributes in self.elements if name == tag]
        return [a for a in found if not style or style in (a.get("class") or "").split()]


def side(text: str, marked: list[tuple[int, int]] | None = None, **more: object) -> Side:
    values = {"status": 200, "finish": "length", "evidence": [], **more}
    return Side(
        "tenant-b",
        prompt_tokens=1100,
        completion_tokens=9,
        latency_ms=10.0,
        text=text,
        marked=marked or [],
        **values,  # type: ignore[arg-type]
    )


def held() -> Incident:
    """B was refused: no pages, no text."""
    b = side("", status=400, finish="context_length_exceeded")
    return incident(b=b, before=[], after=[], leaked=False, defences=["admission"])


def test_every_page_is_drawn_once_and_every_row_is_there() -> None:
    page = Page(render(report()))
    assert len(page.all("g", "page-cell")) == 2 * 69
    assert len(page.all("tr", "combination")) == 32
    assert len(page.all("div", "case")) == 1 + 7 + 5
    assert len(page.all("ol", "steps")) == 1


def test_owners_are_told_apart_by_letter_and_pattern_as_well_as_colour() -> None:
    letters = [letter for _, letter, _ in figures.OWNERS.values()]
    assert len(set(letters)) == 4
    pages = [PageView(i, i, owner, 3, False) for i, owner in enumerate([*figures.OWNERS, "eve"])]
    drawn = grid("n", "w", pages, 16)
    assert [cell.letter for cell in drawn.cells] == [*letters, "?"]
    assert dict(drawn.counts) == {"B": 1, "A": 1, "empty": 1, "other": 2}
    css = (Path(figures.__file__).parent / "templates" / "report.css").read_text()
    fills = re.findall(r"^\.own\.(?:a|b|empty|other) \{ fill: (.*?);", css, re.MULTILINE)
    assert len(set(fills)) == 4


def test_the_marked_words_are_the_spans_and_the_text_is_whole() -> None:
    text = f'<b>Well</b>: "{SECRET}" & {SECRET}!'
    first = text.index(SECRET)
    second = text.index(SECRET, first + 1)
    spans = [(second, second + len(SECRET)), (first, first + len(SECRET))]
    page = Page(render(report(incident=incident(b=side(text, spans)))))
    assert page.answer == text
    assert page.marks == [SECRET, SECRET]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], [("abcdef", False)]),
        ([(0, 6)], [("abcdef", True)]),
        ([(4, 9), (-3, 1)], [("a", True), ("bcd", False), ("ef", True)]),
        ([(1, 3), (2, 4), (2, 3)], [("a", False), ("bcd", True), ("ef", False)]),
        ([(3, 3), (5, 2), (9, 12)], [("abcdef", False)]),
    ],
)
def test_spans_may_overlap_and_lie_outside(
    spans: list[tuple[int, int]], expected: list[tuple[str, bool]]
) -> None:
    assert segments("abcdef", spans) == [Segment(*piece) for piece in expected]


def test_hostile_text_in_every_field_stays_text() -> None:
    names = [HOSTILE, *DEFECTS]
    hostile = report(
        version=HOSTILE,
        created=HOSTILE,
        incident=incident(
            model=HOSTILE,
            secret=HOSTILE,
            document=HOSTILE * 3,
            question=HOSTILE,
            defects=names,
            defences=[HOSTILE],
            a=side(HOSTILE, [(3, 9)], finish=HOSTILE),
            b=side(HOSTILE, [(0, 40)], evidence=[HOSTILE]),
            after=[PageView(0, 0, HOSTILE, 1, False)],
        ),
        matrix=type(matrix())(
            HOSTILE, 1, 1, [cell(names, [], 1, HOSTILE, 2)], [cell(names, [HOSTILE], 1, HOSTILE, 2)]
        ),
        erase=[type(prices()[0])(HOSTILE, 1.0, 1.0, 1.0, HOSTILE)],
    )
    text = render(hostile)
    plain, page = Page(render(report())), Page(text)
    assert not page.all("script") and not page.all("img")
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {"ul"}
    attributes = {name for _, found in page.elements for name in found}
    assert not [name for name in attributes if name.startswith("on")]
    assert page.answer == HOSTILE
    assert text.count("<script") == 0 and "{{7*7}}" in page.text and "49" not in page.answer


def test_control_characters_are_shown_and_spans_keep_their_meaning() -> None:
    text = "a\x00b\x1b[2J\u202egnp.exe\u2066\ud800\x9f\n\t."
    assert clean(text) == "a␀b␛[2J\ufffdgnp.exe\ufffd\ufffd\ufffd\n\t."
    assert len(clean(text)) == len(text)
    assert Page(render(report(incident=incident(b=side(text))))).answer == clean(text)


@pytest.mark.parametrize("kept", ["incident", "matrix", "erase", "nothing"])
def test_a_part_that_was_not_run_leaves_no_trace(kept: str) -> None:
    parts: dict[str, object] = {"incident": None, "matrix": None, "erase": []}
    parts.pop(kept, None)
    page = Page(render(report(**parts)))
    ids = {attributes.get("id") for _, attributes in page.elements}
    sections = {"incident": "incident", "matrix": "matrix", "erase": "price"}
    assert {name for name, anchor in sections.items() if anchor in ids} == {kept} - {"nothing"}
    targets = {(a["href"] or "").removeprefix("#") for a in page.all("a")}
    assert targets <= ids
    assert ("Nothing was run" in page.text) == (kept == "nothing")


def test_what_never_began_claims_nothing() -> None:
    page = Page(render(report(incident=held(), matrix=None, erase=[])))
    assert not page.all("g", "page-cell")
    assert "Tenant B gets an error" in page.text and "HTTP 400" in page.text
    assert page.text.count("not reached") == 4
    assert "held what tenant A had left" not in page.text
    at_prefill = incident(after=[], leaked=False, b=side("", status=400))
    assert Page(render(report(incident=at_prefill))).text.count("not reached") == 4
    empty = incident(after=[], leaked=False, b=side("", status=500, finish="ownership_violation"))
    page = Page(render(report(incident=empty)))
    assert page.text.count("not reached") == 2
    assert len(page.all("g", "page-cell")) == 69
    assert "B never got this far" in page.text


def test_the_verdict_follows_the_values() -> None:
    assert figures.lead(incident())[:2] == ("bad", "LEAKED")
    assert "nothing looks wrong" in figures.lead(incident())[3]
    noticed = incident(b=side("x", evidence=["e"]))
    assert "nothing looks wrong" not in figures.lead(noticed)[3]
    assert figures.lead(held())[:2] == ("good", "HELD")
    assert "before a token" in figures.lead(held())[3]
    begun = incident(b=side("some", status=500), leaked=False)
    assert "before a token" not in figures.lead(begun)[3]
    tone, stamp, _, sentence = figures.lead(incident(leaked=False))
    assert (tone, stamp) == ("doubt", "NO LEAK")
    assert "68 of 69 pages" in sentence
    assert figures.lead(incident(own=69, leaked=False))[:2] == ("good", "NO LEAK")


def test_a_defence_suffices_only_if_nothing_leaked_and_nothing_wrong_was_served() -> None:
    every = list(DEFECTS)
    full = cell(every, [], 50, "wrong-answer", 50)
    singles = [
        cell(every, ["none-left"], 0, "refused", 50),
        cell(every, ["nonsense"], 0, "wrong-answer", 50),
        cell(every, ["fewer"], 10, "failed", 50),
        cell(every, ["luck"], 48, "failed", 50),
    ]
    found = {case.name: case.verdict for case in cases(full, singles)}
    assert found == {
        "no defence": "baseline",
        "none-left": "suffices",
        "nonsense": "narrows",
        "fewer": "narrows",
        "luck": "no effect seen",
    }
    assert [case.verdict for case in cases(None, singles)][2] == "no effect seen"


def test_the_trials_of_the_run_are_counted_beside_the_one_that_is_shown() -> None:
    found = Page(render(report())).text
    assert "This trial is one of 50" in found
    alone = report(incident_trials=cell(list(DEFECTS), [], 1, "refused", 1))
    assert "This trial is one of" not in Page(render(alone)).text
    assert "This trial is one of" not in Page(render(report(incident_trials=None))).text


def test_no_trial_is_no_division_by_zero() -> None:
    none = Cell(list(DEFECTS), [], 0, 0, 0.0, 1.0, {})
    assert outcome_shares(none) == []
    values = matrix()
    text = render(report(matrix=type(values)("m", 0, 1, [none], [none])))
    assert "no trial" in text


def test_shares_add_up_and_keep_unknown_classes() -> None:
    found = Cell([], [], 10, 4, 0, 1, {"odd": 1, "leak": 4, "right-answer": 5, "failed": 0})
    shares = outcome_shares(found)
    assert [(name, count) for name, _, _, count in shares] == [
        ("leak", 4),
        ("right-answer", 5),
        ("odd", 1),
    ]
    assert sum(width for _, _, width, _ in shares) == pytest.approx(1)


def test_shades_grow_with_the_rate() -> None:
    assert [heat(rate) for rate in (0, 0.01, 0.3, 0.6, 0.9, 1)] == [0, 1, 2, 3, 4, 4]


def test_an_excerpt_is_cut_at_words_and_says_where() -> None:
    text = "word " * 100 + "here " + "tail " * 100
    found = excerpt(text, 500)
    assert found.startswith("… word ") and found.endswith(" tail …") and "here" in found
    assert excerpt("short", 0) == "short"
    assert excerpt("x" * 1000, 500) == "… " + "x" * 300 + " …"


def test_the_page_forbids_itself_the_network_and_scripts() -> None:
    text = render(report())
    page = Page(text)
    policy = next(a for a in page.all("meta") if a.get("http-equiv"))["content"] or ""
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert "script-src" not in policy
    assert not re.search(r"(?:src|href)=[\"'](?!#|data:)", text)
    assert not re.search(r"url\((?!#)|@import|https?:", text)


def test_every_drawing_is_named_or_hidden_and_the_page_has_a_language() -> None:
    text = render(report())
    assert Page(text).all("html")[0]["lang"] == "en"
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        start = drawing.partition(">")[0]
        named = 'role="img"' in start and re.search(r"^<svg[^>]*>\s*<title", drawing)
        assert named or 'aria-hidden="true"' in start, start


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(scheme: str) -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1 for text; 1.4.11: 3 to 1 for what carries meaning."""
    css = (Path(house.__file__).parent / "templates" / "house.css").read_text()
    both = re.findall(r":root \{(.*?)\n *\}", css, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", both[scheme == "dark"]))

    def contrast(one: str, other: str) -> float:
        low, high = sorted([luminance(colours[one]), luminance(colours[other])])
        return (high + 0.05) / (low + 0.05)

    for ink in ("ink", "quiet", "a", "b", "right"):
        for ground in ("bg", "surface"):
            assert contrast(ink, ground) >= 4.5, (ink, ground)
    fills = ["a", "b", "other", "wrong", "failed", "refused", "right"]
    for fill in fills:
        assert contrast(f"on-{fill}", fill) >= 4.5, fill
    for step in range(1, 5):
        assert contrast(f"t{step}", f"h{step}") >= 4.5, step
    assert contrast("ink", "a-soft") >= 4.5
    for fill in set(fills) - {"wrong"}:
        assert contrast(fill, "surface") >= 3, fill


def test_equal_values_give_equal_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    write_report(report(), first)
    write_report(report(), second)
    assert first.read_bytes() == second.read_bytes()


def test_the_least_report_is_a_page() -> None:
    assert "Nothing was run" in render(LabReport("0", "now", None, None, []))
