"""The unsafe engine over the stand-in model: what each combination of defects and defences does.

A leak is judged here without words: B's answer changes when A's document does.
"""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lab_kit import stand_in_lab
from sekisho.config import ConfigError, load_settings
from sekisho.core.handoff import TakeHandoff
from sekisho.core.page import HEADER_SIZE
from sekisho.core.pool import Pool
from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.engine.policy import POLICIES
from sekisho.gateway.roster import Roster
from sekisho.lab.incident import TENANT_A, TENANT_B, Lab, outcome_of
from sekisho.lab.machine import DECODE_PAGES, PREFILL_TOKENS, WINDOW
from sekisho.lab.results import Incident
from sekisho.lab.story import Story
from sekisho.lab.switches import DEFECTS, DEFENCES, Switches, switches
from sekisho.lab.unsafe import LabError, LabMemory, LabPages, lab_policy
from stand_in import LAYOUT, answer

ROOT = Path(__file__).parents[2]
COMBINATIONS = [
    frozenset(chosen)
    for count in range(len(DEFECTS) + 1)
    for chosen in itertools.combinations(DEFECTS, count)
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = stand_in_lab()
    yield made
    made.machine.close()


def with_two_documents(lab: Lab, engine: Switches) -> tuple[Incident, Incident]:
    """Two trials that differ in nothing but the words of A's document; their number stays."""
    story = lab.story(0)
    other = Story(story.secret, story.document.replace("e", "u"), story.question)
    found = []
    for at, each in enumerate((story, other)):
        lab._stories[at] = each
        found.append(lab.play(at, engine))
    assert [each.a.status for each in found] == [200, 200]
    assert found[0].a.text != found[1].a.text
    return found[0], found[1]


def expected_status(defects: frozenset[str]) -> int:
    """What the five reports say of a prompt above the prefill pool, defect by defect."""
    if not {"window", "placeholder", "finished"} <= defects:
        return 400
    return 200 if "no-compare" in defects else 500


@pytest.mark.parametrize("defects", COMBINATIONS, ids=lambda chosen: "+".join(sorted(chosen)))
def test_b_depends_on_a_under_all_five_defects_and_under_no_fewer(
    lab: Lab, defects: frozenset[str]
) -> None:
    first, second = with_two_documents(lab, switches(set(DEFECTS) - defects))
    assert (first.b.status, second.b.status) == (expected_status(defects),) * 2
    assert (first.b.text != second.b.text) == (defects == set(DEFECTS))
    assert bool(first.b.text) == (first.b.status == 200)


@pytest.mark.parametrize(
    ("defence", "status", "depends"),
    [
        ("admission", 400, False),
        ("one-outcome", 400, False),
        ("commit-check", 500, False),
        ("step-check", 500, False),
        ("erase-on-reuse", 200, False),
        ("scrub-on-free", 200, False),
        ("payload-digest", 200, True),
    ],
)
def test_one_defence_against_all_five_defects(
    lab: Lab, defence: str, status: int, depends: bool
) -> None:
    first, second = with_two_documents(lab, switches((), [defence]))
    assert (first.b.status, second.b.status) == (status, status)
    assert (first.b.text != second.b.text) == depends
    verdict = "fails" if depends else "narrows" if status == 200 else "suffices"
    assert DEFENCES[defence].verdict == verdict
    assert bool(first.b.evidence) == (status == 500)


def test_two_defences_do_not_disturb_a_request_that_fits(lab: Lab) -> None:
    for pair in itertools.combinations(DEFENCES, 2):
        played = lab.play(0, switches((), pair))
        assert (played.a.status, played.a.finish) == (200, "length")
        assert outcome_of(played) != "leak"


def test_what_fits_is_answered_as_by_the_plain_model(lab: Lab) -> None:
    encode = lab.machine._model.tokenizer.encode
    for engine in (switches(), switches(DEFECTS), switches((), DEFENCES)):
        played = lab.play(0, engine)
        alone = answer(encode(lab.story(0).document), played.a.completion_tokens)
        assert played.a.text == "".join(f"<{token}>" for token in alone)


def test_b_is_given_the_pages_that_a_left_at_the_same_ordinals(lab: Lab) -> None:
    played = lab.play(0, switches())
    of_a = -(-(played.a.prompt_tokens + played.a.completion_tokens - 1) // LAYOUT.page_size)
    assert PREFILL_TOKENS < played.b.prompt_tokens <= WINDOW
    assert played.a.prompt_tokens <= PREFILL_TOKENS
    for ordinal, view in enumerate(played.before):
        assert (view.ordinal, view.page, view.expected) == (ordinal, ordinal, False)
        assert view.owner == ("A" if ordinal < of_a else "other")
    [own, *rest] = played.after
    assert (own.owner, own.filled, own.expected) == ("B", 1, False)
    assert [view.owner for view in rest] == [view.owner for view in played.before[1:]]


def test_an_engine_that_erases_gives_b_empty_pages(lab: Lab) -> None:
    for engine in (switches(["no-erase"]), switches((), ["scrub-on-free"])):
        played = lab.play(0, engine)
        assert {view.owner for view in played.before} == {"empty"}
        assert [view.owner for view in played.after][1:] == ["empty"] * (len(played.after) - 1)


def test_admission_refuses_b_before_a_page_is_reserved_and_prefill_after_it(lab: Lab) -> None:
    for engine in (switches(["window"]), switches((), ["admission"])):
        played = lab.play(0, engine)
        assert (outcome_of(played), played.before, played.after) == ("refused", [], [])
        assert played.b.finish == "context_length_exceeded"
    for engine in (switches(["placeholder"]), switches((), ["one-outcome"])):
        played = lab.play(0, engine)
        assert (outcome_of(played), len(played.before) > 26, played.after) == ("refused", True, [])


def test_a_defence_that_catches_it_keeps_the_evidence(lab: Lab) -> None:
    commit = lab.play(0, switches((), ["commit-check"])).b.evidence
    assert [line.split(":")[0] for line in commit] == ["count"]
    step = lab.play(0, switches((), ["step-check"])).b.evidence
    assert [line.split(":")[0] for line in step[:2]] == ["short", "foreign"]


def test_the_headers_alone_catch_it_where_the_counts_lie(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TakeHandoff, "_compare", lambda *_: ())
    played = lab.play(0, switches((), ["commit-check"]))
    assert (outcome_of(played), played.after) == ("failed", [])
    assert [line.split(":")[0] for line in played.b.evidence[:2]] == ["short", "foreign"]


@pytest.mark.parametrize("isolation", ["strict", "standard"])
def test_an_engine_with_a_policy_for_tenants_cannot_be_made(isolation: str) -> None:
    region = np.zeros(2 * LAYOUT.page_bytes, np.uint8)
    memory = LabMemory(region, LAYOUT, 2, switches())
    LabPages(memory, Pool(2, 1), lab_policy(switches()), switches())
    with pytest.raises(LabError, match="never serves tenants"):
        LabPages(memory, Pool(2, 1), POLICIES[isolation], switches())


@pytest.mark.parametrize("engine", [switches(), switches(DEFECTS, DEFENCES)])
def test_a_production_gateway_gives_its_nodes_no_request(lab: Lab, engine: Switches) -> None:
    """Not even with every defence and no defect."""
    sent: list[str] = []
    heard: list[Delta | Ended] = []
    lab.machine.start(engine)
    word = lab.machine.ready()
    assert not word.tenants
    roster = Roster(["decode", "prefill"], lambda name, _: sent.append(name), lambda _: None)
    roster.joined("decode-0.1", word)
    roster.joined("prefill-0.1", word)
    sent.clear()  # the introduction
    assert not roster.ready()
    roster.open(TENANT_B, [1, 2], SamplingParams(max_tokens=1), heard.append)
    assert [event.code for event in heard if isinstance(event, Ended)] == ["not_ready"]
    assert sent == []


def test_no_setting_names_the_lab_and_no_other_code_imports_it() -> None:
    for isolation in ("lab", "unsafe", "incident"):
        with pytest.raises(ConfigError):
            load_settings({"isolation": isolation}, {}, None)
    importing = {
        path.relative_to(ROOT / "src" / "sekisho").as_posix()
        for path in (ROOT / "src" / "sekisho").rglob("*.py")
        if "sekisho.lab" in path.read_text(encoding="utf-8")
    }
    others = {path for path in importing if not path.startswith("lab/")}
    # The probe's self-test, which starts an engine that it must catch, is no part of `serve`.
    assert others - {"cli/probe_run.py"} == {"cli/lab.py"}


def test_what_serves_tenants_loads_nothing_of_the_lab() -> None:
    code = (
        "import sys, sekisho.cli, sekisho.gateway.serve, sekisho.node.process\n"
        "sys.exit(any(name.startswith('sekisho.lab') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pages_of_the_lab_keep_their_headers_only_where_nothing_is_erased() -> None:
    for engine, kept in ((switches(), True), (switches(["no-erase"]), False)):
        region = np.full(2 * LAYOUT.page_bytes, 7, np.uint8)
        memory = LabMemory(region, LAYOUT, 2, engine)
        pages = LabPages(memory, Pool(2, 1), lab_policy(engine), engine)
        table = pages.reserve(1, TENANT_A, pages.text(TENANT_A, [1] * 17), remote=True)
        assert table is not None
        assert bool((region[:HEADER_SIZE] == 7).all()) == kept
        assert bool(memory.payload(1).any()) == kept
        assert len(pages.before[1]) == 2 < DECODE_PAGES
