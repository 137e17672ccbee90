"""The probe's page in a real Chromium: quiet, without network, in both schemes and widths."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser_kit import HOSTILE, SCHEMES, WIDTHS, Visit, launched
from probe_report_kit import ABOUT, MINT, Run, leaking, quiet
from sekisho.probe.output import render

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as found:
        yield found


def hostile() -> Run:
    document = MINT.document(120)
    return leaking(f"{HOSTILE} {document.canaries[0].text} {HOSTILE}", document)


@pytest.fixture(scope="module", params=["leaking", "quiet", "hostile"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Path]:
    run = {"leaking": leaking, "quiet": quiet, "hostile": hostile}[request.param]()
    file = tmp_path_factory.mktemp("page") / "probe.html"
    file.write_text(render(run.result, ABOUT, run.exchanges, "html"), encoding="utf-8")
    return run, file


@pytest.fixture(params=[(s, w) for s in SCHEMES for w in WIDTHS], ids=lambda p: f"{p[0]}-{p[1]}")
def visit(
    request: pytest.FixtureRequest, browser: Browser, made: tuple[Run, Path]
) -> Iterator[Visit]:
    opened = Visit(browser, made[1], *request.param)
    yield opened
    opened.context.close()


def test_the_page_opens_quietly_whole_and_within_its_width(
    visit: Visit, made: tuple[Run, Path]
) -> None:
    run, file = made
    assert visit.asked == [file.as_uri()]
    assert not visit.said
    assert visit.ask("document.scripts.length") == 0
    findings = sum(len(one.findings) for one in run.result.techniques)
    assert visit.page.locator("article.finding").count() == findings
    drawn = sum(int(count) for count in visit.ask(
        "[...document.querySelectorAll('g.mark')].map(g => g.dataset.count)"))  # fmt: skip
    assert drawn == sum(len(one.points) for one in run.result.techniques)

    assert visit.ask("document.documentElement.scrollWidth <= window.innerWidth")
    wide = """[...document.body.querySelectorAll('*')]
        .filter(e => !e.parentElement.closest('.scroll'))
        .filter(e => e.getBoundingClientRect().right > window.innerWidth + 1)
        .map(e => e.tagName + '.' + (e.className.baseVal ?? e.className))"""
    assert visit.ask(wide) == []


def test_words_of_a_drawing_stay_in_it_and_apart(visit: Visit) -> None:
    """No label is cut off, and none of an axis runs into its neighbour."""
    outside = """[...document.querySelectorAll('svg[role=img] text')].filter(t => {
        const inner = t.getBoundingClientRect(), outer = t.closest('svg').getBoundingClientRect();
        return inner.left < outer.left || inner.right > outer.right + 1
            || inner.bottom > outer.bottom; }).map(t => t.textContent)"""
    assert visit.ask(outside) == []
    touching = """[...document.querySelectorAll('svg[role=img]')].flatMap(s => {
        const boxes = [...s.querySelectorAll('text.axis:not(.many)')]
            .map(t => [t.textContent, t.getBoundingClientRect()]);
        return boxes.flatMap(([a, p], i) => boxes.slice(i + 1)
            .filter(([, q]) => p.left < q.right && q.left < p.right
                && p.top < q.bottom - 2 && q.top < p.bottom - 2)
            .map(([b]) => a + ' / ' + b)); })"""
    assert visit.ask(touching) == []


def test_a_drawing_has_a_name_and_a_table(visit: Visit) -> None:
    for figure in visit.page.locator("figure").all():
        assert figure.get_by_role("img").first.get_attribute("aria-labelledby")
        figure.locator("summary").click()
        assert figure.locator("tbody tr").first.is_visible()
    assert not visit.said


def test_the_anchors_lead_to_the_parts(browser: Browser, made: tuple[Run, Path]) -> None:
    opened = Visit(browser, made[1], "light", 400)
    for link in opened.page.locator("nav a").all():
        link.click()
        target = (link.get_attribute("href") or "")[1:]
        assert opened.page.locator(f"#{target}").bounding_box() is not None
    assert not opened.said
    opened.context.close()


def test_both_colour_schemes_are_drawn(browser: Browser, made: tuple[Run, Path]) -> None:
    grounds = []
    for scheme in SCHEMES:
        opened = Visit(browser, made[1], scheme, 1280)
        colour = opened.ask("getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(int(part) for part in colour[4:-1].split(",")))
        opened.context.close()
    assert grounds[0] > 600 and grounds[1] < 150
