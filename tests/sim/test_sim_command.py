"""``sekisho sim`` as a user calls it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sekisho.sim.atlas import ATLAS
from sekisho.sim.tables import faults_document

ROOT = Path(__file__).parents[2]
SEKISHO = Path(sys.executable).with_name("sekisho")


def sim(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [SEKISHO, "sim", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


def test_some_seeds_end_clean_with_a_table_and_a_summary(tmp_path: Path) -> None:
    command = ("--seeds", "30", "--faults", "lost-notice,rebound", "--summary", "summary.jsonl")
    for _ in range(2):
        ended = sim(tmp_path, *command)
        assert ended.returncode == 0, ended.stderr
    rows = {line.split()[0]: line for line in ended.stdout.splitlines() if line}
    assert int(rows["lost-notice"].split()[1]) > 0
    assert "commit-check" in rows["lost-notice"] and "unwritten" in rows["lost-notice"]
    assert "30 seeds" in ended.stdout
    lines = [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]
    assert [(line["seeds"], line["failed_seed"]) for line in lines] == [(30, None)] * 2
    assert lines[0]["handoffs"] == lines[1]["handoffs"] > 0
    assert lines[0]["seeds_per_hour"] > 0


def test_a_failure_is_shrunk_saved_and_replayed(tmp_path: Path) -> None:
    ended = sim(
        tmp_path, "--seed", "0", "--faults", "claimed-unwritten", "--without", "commit-check"
    )
    assert ended.returncode == 1, ended.stderr
    assert "seed 0: ownership: request" in ended.stdout
    assert "sekisho sim replay sim-0.json" in ended.stdout
    again = [sim(tmp_path, "replay", "sim-0.json") for _ in range(2)]
    assert [each.returncode for each in again] == [1, 1]
    assert again[0].stdout == again[1].stdout
    assert "hears Complete" in again[0].stdout and "ownership: request" in again[0].stdout


def test_it_runs_until_it_is_stopped_and_then_says_how_fast_it_was(tmp_path: Path) -> None:
    command = [str(SEKISHO), "sim", "--faults", "lost-notice", "--summary", "summary.jsonl"]
    running = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline().startswith("seeds from ")
    time.sleep(8)  # for some seeds; none would be right too
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    output, errors = running.communicate(timeout=120)
    assert (running.returncode, errors) == (0, "stopped\n")
    assert "seeds an hour" in output
    assert json.loads((tmp_path / "summary.jsonl").read_text())["failed_seed"] is None


def test_known_answers_name_who_noticed(tmp_path: Path) -> None:
    ended = sim(tmp_path, "known-answers", "--without", "quarantine,distrust")
    assert ended.returncode == 0, ended.stdout
    for line, name in zip(ended.stdout.splitlines(), ("quarantine", "distrust"), strict=True):
        assert line.startswith(f"without {name}") and "conservation:" in line


def test_an_absence_that_nobody_notices_is_a_finding(tmp_path: Path) -> None:
    ended = sim(tmp_path, "known-answers", "--without", "protocol", "--seeds", "1")
    assert ended.returncode == 1
    assert "nobody noticed the absence of: protocol" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--faults", "nonsense"], "--faults: 'nonsense' is none of abort-reuse,"),
        (["--without", "luck"], "--without: 'luck' is none of admission,"),
        (["--seeds", "0"], "--seeds"),
        (["--minutes", "-1"], "--minutes"),
        (["replay", "absent.json"], "absent.json: No such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    ended = sim(tmp_path, *arguments)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("sekisho: ") and told in line


def test_the_document_of_faults_is_what_the_code_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    assert text == faults_document(), "run: sekisho sim atlas > docs/faults.md"
    assert sim(tmp_path, "atlas").stdout == text


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_the_pages_count_the_faults_right(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert f"{len(ATLAS)} faults" in text
