"""The lab's report in a real Chromium: quiet, without network, in both schemes and widths."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser

from browser_kit import HOSTILE, SCHEMES, WIDTHS, Visit, launched
from lab_report_kit import incident, report
from sekisho.cli import main
from sekisho.lab.report import write_report
from sekisho.lab.results import LabReport, Side

SEED = 20260908

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as found:
        yield found


def hostile() -> LabReport:
    b = Side("tenant-b", 200, "length", HOSTILE, [(0, 50)], 9, 9, 1.0, [HOSTILE])
    return report(incident=incident(b=b, model=HOSTILE, secret=HOSTILE, defences=[HOSTILE]))


@pytest.fixture(scope="module", params=["real", "whole", "hostile"])
def made(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    demo_model_folder: Path,
    browser: Browser,
) -> Any:
    """A report and the file that holds it: of a run with the real model, or made by hand."""
    assert demo_model_folder.is_dir()
    assert browser.is_connected()  # the run takes a minute: not for a test that is skipped
    folder = tmp_path_factory.mktemp("report")
    file, data = folder / "out.html", folder / "out.json"
    if request.param == "real":
        run = ["lab", "incident", "--seed", str(SEED), "--report", str(file), "--json", str(data)]
        assert main(run) == 0
        return msgspec.json.decode(data.read_bytes(), type=LabReport), file
    values = {"whole": report, "hostile": hostile}[request.param]()
    write_report(values, file)
    return values, file


@pytest.fixture(params=[(s, w) for s in SCHEMES for w in WIDTHS], ids=lambda p: f"{p[0]}-{p[1]}")
def visit(request: pytest.FixtureRequest, browser: Browser, made: Any) -> Iterator[Visit]:
    opened = Visit(browser, made[1], *request.param)
    yield opened
    opened.context.close()


def test_the_report_opens_quietly_whole_and_within_its_width(visit: Visit, made: Any) -> None:
    values: LabReport = made[0]
    assert values.incident
    assert visit.asked == [made[1].as_uri()]
    assert not visit.said
    assert visit.ask("document.scripts.length") == 0

    pages = len(values.incident.before) + len(values.incident.after)
    assert visit.page.locator(".page-cell").count() == pages
    widths = (
        "[...document.querySelectorAll('.page-cell')].map(c => c.getBoundingClientRect().width)"
    )
    assert min(visit.ask(widths)) > 8
    text, spans = values.incident.b.text, values.incident.b.marked
    marked = [text[start:end].replace("\u202e", "\ufffd") for start, end in spans]
    assert visit.texts("#answer-b mark") == marked
    assert visit.texts("#answer-b") == [text.replace("\u202e", "\ufffd")]
    rows = len(values.matrix.combinations) if values.matrix else 0
    assert visit.page.locator("tr.combination").count() == rows

    assert visit.ask("document.documentElement.scrollWidth <= window.innerWidth")
    wide = """[...document.body.querySelectorAll('*')].filter(e => !e.closest('.patterns'))
        .filter(e => e.getBoundingClientRect().right > window.innerWidth + 1)
        .map(e => e.tagName + '.' + (e.className.baseVal ?? e.className))"""
    assert visit.ask(wide) == []


def test_letters_stay_within_their_bars(visit: Visit, made: Any) -> None:
    outside = """[...document.querySelectorAll('text.on')].filter(t => {
        const inner = t.getBoundingClientRect(), outer = t.previousElementSibling
            .getBoundingClientRect();
        return inner.left < outer.left || inner.right > outer.right; }).length"""
    if made[0].matrix:
        assert visit.page.locator("text.on").count() > 32
    assert visit.ask(outside) == 0


def test_both_colour_schemes_are_drawn(browser: Browser, made: Any) -> None:
    grounds = []
    for scheme in SCHEMES:
        opened = Visit(browser, made[1], scheme, 1280)
        colour = opened.ask("getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(int(part) for part in colour[4:-1].split(",")))
        opened.context.close()
    light, dark = grounds
    assert light > 600
    assert dark < 150


def test_the_pages_own_policy_stops_a_script_and_a_request(browser: Browser, made: Any) -> None:
    """What escaping missed would still not run."""
    opened = Visit(browser, made[1], "light", 1280)
    opened.ask("""() => {
        window.stopped = 0;
        document.addEventListener('securitypolicyviolation', () => { window.stopped += 1; });
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        const image = document.createElement('img');
        image.src = 'http://127.0.0.1:9/';
        document.body.append(script, image);
    }""")
    opened.page.wait_for_function("window.stopped === 2")
    assert opened.ask("window.ran") is None
    assert len(opened.said) >= 2 and all("Content Security Policy" in line for line in opened.said)
    opened.context.close()


def test_the_anchors_lead_to_the_parts(browser: Browser, made: Any) -> None:
    opened = Visit(browser, made[1], "light", 400)
    for link in opened.page.locator("nav a").all():
        link.click()
        target = (link.get_attribute("href") or "")[1:]
        assert opened.page.locator(f"#{target}").bounding_box() is not None
    opened.page.locator("summary").click()
    assert opened.page.locator("details[open] blockquote").first.is_visible()
    assert not opened.said
    opened.context.close()
