"""``sekisho lab`` on the command line: bad input is one line and 2, before a model is loaded."""

from pathlib import Path

import pytest

from sekisho.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["incident", "--without", "luck"], "no defect is called 'luck'; there are: window, "),
        (["incident", "--with", "luck"], "no defence is called 'luck'; there are: admission, "),
        (["incident", "--trials", "0"], "--trials"),
        (["incident", "--seed", "-1"], "--seed"),
        (["matrix", "--trials", "many"], "--trials"),
        (["matrix", "--json", "no/such/folder/out.json"], "cannot be written"),
        (["matrix", "--report", "no/such/folder/out.html"], "cannot be written"),
        (["erase", "--rounds", "0"], "--rounds"),
        (["sleep"], "sleep"),
    ],
)
def test_bad_input_is_one_line_and_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    [line] = told.err.splitlines()
    assert line.startswith("sekisho: ") and said in line


def test_a_folder_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "incident", "--report", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["incident", "matrix", "erase"])
def test_help_says_what_the_exit_code_means_or_what_is_measured(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", verb, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("Exit code 0" in text) == (verb != "erase")
    assert "--report" in text and "--json" in text
