"""The whole command against toy endpoints: exit codes, keys, folders, and what it never sends."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probe_kit import KEY_A, KEY_B, MODEL, Request, Server
from probe_thread import threaded
from probe_toy import Toy
from sekisho.cli import main
from sekisho.cli import probe as command
from sekisho.probe.output import FORMATS
from sekisho.probe.sizes import SIZES

URL = "http://127.0.0.1:9/v1"
REMOTE = ["--base-url", "http://198.51.100.7/v1", "--model", MODEL]
ASKED = ["--technique", "crossed", "--size", "quick", "--seed", "7"]


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both are in the environment, and the folder is empty."""
    monkeypatch.setenv("SEKISHO_PROBE_KEY_A", KEY_A)
    monkeypatch.setenv("SEKISHO_PROBE_KEY_B", KEY_B)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def clean() -> Iterator[Server]:
    with threaded(Toy().speak) as server:
        yield server


def probe(server: Server, *more: str) -> int:
    return main(["probe", "--base-url", server.url, "--model", MODEL, *ASKED, *more])


def posts(server: Server) -> list[Request]:
    return [request for request in server.requests if request.method == "POST"]


def run_folder(path: Path) -> Path:
    [found] = path.glob("sekisho-probe-*")
    return found


def test_nothing_seen_exits_0_and_the_folder_is_named(
    clean: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe(clean) == 0
    said = capsys.readouterr()
    assert "no leak seen" in said.out
    assert run_folder(tmp_path).name in said.err
    assert stat.S_IMODE(run_folder(tmp_path).stat().st_mode) == 0o700
    assert {request.account for request in posts(clean)} == {"A", "B"}


def test_a_leak_exits_1_and_a_page_exits_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with threaded(Toy("swap").speak) as server:
        assert probe(server, "--run-folder", str(tmp_path / "a")) == 1
    assert "PROBE008" in capsys.readouterr().out
    with threaded(Toy("html").speak) as server:
        assert probe(server, "--run-folder", str(tmp_path / "b")) == 3
    assert "HTML" in capsys.readouterr().out


@pytest.mark.parametrize("form", FORMATS)
def test_no_format_and_no_file_shows_a_key(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with threaded(Toy("swap").speak) as server:
        code = probe(server, "--format", form, "--output", "out", "--run-folder", "run")
    assert code == 1
    said = capsys.readouterr()
    assert said.out == ""
    kept = [one.read_text() for one in tmp_path.rglob("*") if one.is_file()]
    assert len(kept) == 6
    assert not any(key in text for key in (KEY_A, KEY_B) for text in [*kept, said.err])


def test_a_report_is_the_same_again_in_any_format(
    clean: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe(clean, "--format", "json", "--run-folder", "run") == 0
    first = capsys.readouterr().out
    count = len(clean.requests)
    assert main(["probe", "report", "run", "--format", "json"]) == 0
    assert capsys.readouterr().out == first
    assert json.loads(first)["about"]["seed"] == 7
    assert main(["probe", "report", "run", "--format", "html", "--output", "page.html"]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert len(clean.requests) == count


def test_a_dry_run_sends_nothing_and_makes_no_folder(
    clean: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    price = ["--price-prompt", "1", "--price-answer", "4", "--money-max", "50"]
    assert main(["probe", "--base-url", clean.url, "--model", MODEL, "--dry-run", *price]) == 0
    said = capsys.readouterr().out
    assert all(f"{name}: to " in said for name in ("boundary", "timing", "response-cache"))
    assert "sglang#30233" in said
    assert "in money" in said
    assert clean.requests == []
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_that_the_budget_does_not_hold_exits_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["probe", *REMOTE, "--dry-run", "--requests-max", "5"]) == 2
    said = capsys.readouterr()
    assert "together at most" in said.out
    assert "the budget of 5 requests" in said.err
    assert main(["probe", *REMOTE, "--dry-run", "--window", "1048576"]) == 2
    assert "boundary: to" in capsys.readouterr().out


BASE = ["--base-url", URL, "--model", MODEL]
BAD: list[tuple[list[str], str]] = [
    ([], "--base-url is missing"),
    (["--base-url", URL], "--model is missing"),
    (REMOTE, "who allows it"),
    ([*REMOTE, "--authorised-by", "me"], "who, when"),
    (["--base-url", "http://u:secret@h/v1", "--model", MODEL], "credentials"),
    ([*BASE, "--technique", "nothing"], "no technique 'nothing'"),
    ([*BASE, "--technique", "ids", "--technique", "ids"], "named twice"),
    ([*BASE, "--money-max", "1"], "--price-prompt"),
    ([*BASE, "--price-prompt", "nan", "--price-answer", "1"], "--price-prompt"),
    ([*BASE, "--window", "1048576"], "a budget that is meant"),
    ([*BASE, "--format", "pdf"], "'pdf'"),
    ([*BASE, "--output", "absent/x"], "absent/x cannot be written"),
    ([*BASE, "--key-a", "sk-me"], "a key on the command line"),
    ([*BASE, "--key-b=sk-me"], "a key on the command line"),
    ([*BASE, "--key-a-env", "sk-me"], "--key-a-env names nothing that holds a key"),
    ([*BASE, "--key-b-file", "sk-me"], "--key-b-file names nothing that holds a key"),
    ([*BASE, "--key-a-env", "X", "--key-a-file", "y"], "give one of them"),
    (["--resume", "absent"], "no folder of a run"),
    (["--resume", "absent", "--seed", "1"], "--seed has no effect here"),
    (["--resume", "absent", "--format", "json"], "no folder of a run"),
    (["--self-test", "--model", "x"], "--model has no effect here"),
    (["--self-test", "--technique", "nothing"], "no technique 'nothing'"),
    (["report", "absent"], "no folder of a run"),
    (["replay", "absent"], "no folder of a run"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD, ids=str)
def test_what_cannot_run_is_one_line_and_exits_2(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert told in said.err
    assert "sk-me" not in said.err
    assert "secret" not in said.err
    assert list(tmp_path.iterdir()) == []


def test_keys_come_from_files_and_from_variables(
    clean: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SEKISHO_PROBE_KEY_A")
    monkeypatch.delenv("SEKISHO_PROBE_KEY_B")
    monkeypatch.setenv("OTHER", KEY_A)
    (tmp_path / "b").write_text(f"{KEY_B}\n")
    assert probe(clean, "--key-a-env", "OTHER", "--key-b-file", "b") == 0
    assert {request.account for request in posts(clean)} == {"A", "B"}


def test_one_key_of_two_is_refused_and_a_short_one_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEKISHO_PROBE_KEY_A", "abc")
    assert main(["probe", *BASE]) == 2
    assert "account A is shorter than 4 characters" in capsys.readouterr().err
    monkeypatch.delenv("SEKISHO_PROBE_KEY_A")
    assert main(["probe", *BASE]) == 2
    assert "a key of account B, and none of account A" in capsys.readouterr().err


def test_without_keys_both_accounts_are_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SEKISHO_PROBE_KEY_A")
    monkeypatch.delenv("SEKISHO_PROBE_KEY_B")
    assert main(["probe", *BASE, *ASKED, "--run-folder", "run"]) == 3  # nobody listens there
    said = capsys.readouterr()
    assert "no key: both accounts are one here" in said.err
    assert "both accounts are one here" in said.out
    monkeypatch.setenv("SEKISHO_PROBE_KEY_A", KEY_A)
    monkeypatch.setenv("SEKISHO_PROBE_KEY_B", KEY_A)
    assert main(["probe", *BASE, *ASKED, "--run-folder", "same"]) == 3
    assert "one key: both accounts are one here" in capsys.readouterr().err
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("run", "same")]
    assert [plan["accounts"] for plan in plans] == ["no key", "one key"]


def test_a_full_folder_is_refused(
    clean: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    assert probe(clean, "--run-folder", "full") == 2
    assert "not empty" in capsys.readouterr().err
    assert clean.requests == []


def test_it_stops_at_the_first_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with threaded(Toy("swap").speak) as server:
        more = ["--technique", "residue", "--stop-at-first", "--format", "json"]
        assert probe(server, *more) == 1
    assert json.loads(capsys.readouterr().out)["not_run"] == ["residue"]


def test_a_replay_asks_as_much_with_other_secrets(clean: Server, tmp_path: Path) -> None:
    assert probe(clean, "--run-folder", "run") == 0
    first = [request.prompt for request in posts(clean)]
    assert main(["probe", "replay", "run", "--run-folder", "again"]) == 0
    second = [request.prompt for request in posts(clean)][len(first) :]
    assert len(second) == len(first)
    assert not set(first) & set(second)
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("run", "again")]
    assert plans[0] | {"started": ""} == plans[1] | {"started": ""}


def test_ctrl_c_leaves_a_folder_with_which_it_goes_on(tmp_path: Path) -> None:
    toy, enough = Toy(), threading.Event()
    seen: list[Request] = []

    async def speak(request: Request, writer: Any) -> None:
        seen.append(request)
        if len(seen) > 20:
            enough.set()
        await toy.speak(request, writer)

    with threaded(speak) as server:
        more = ["--technique", "crossed", "--technique", "residue", "--size", "standard"]
        arguments = [*BASE[:1], server.url, *BASE[2:], *more, "--run-folder", "run"]
        script = "import sys; from sekisho.cli import main; sys.exit(main())"
        with subprocess.Popen(
            [sys.executable, "-c", script, "probe", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ,
            text=True,
        ) as process:
            assert enough.wait(120)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        assert process.returncode == 130
        assert out == ""
        assert "go on with --resume run" in err
        assert "Traceback" not in err
        assert not (tmp_path / "run" / "result.json").exists()
        assert main(["probe", "report", "run"]) == 3
        assert main(["probe", "--resume", "run"]) == 0
    lines = (tmp_path / "run" / "exchanges.jsonl").read_text().splitlines()
    serials = [json.loads(line)["serial"] for line in lines]
    assert len(serials) == len(set(serials))


def test_going_on_needs_the_accounts_of_the_beginning(
    clean: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe(clean, "--run-folder", "run") == 0
    assert main(["probe", "--resume", "run"]) == 0
    monkeypatch.setenv("SEKISHO_PROBE_KEY_B", KEY_A)
    capsys.readouterr()
    assert main(["probe", "--resume", "run"]) == 2
    assert "the run began with two keys" in capsys.readouterr().err


def test_the_command_knows_every_format_and_size() -> None:
    assert {one.value for one in command.Format} == set(FORMATS)
    assert tuple(one.value for one in command.SizeName) == SIZES
