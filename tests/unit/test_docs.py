"""What the pages say exists, exists: commands, flags, links; and both readmes say the same."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

from sekisho.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(language: str) -> list[Block]:
    return [
        Block(page.name, name, text)
        for page in PAGES
        for name, text in FENCE.findall(read(page))
        if name == language
    ]


def cli_complaint(words: list[str]) -> str | None:
    """Why ``sekisho *words`` is not a command with such options; None if it is."""
    command = typer.main.get_command(app)
    rest = list(words)
    while rest and not rest[0].startswith("-") and hasattr(command, "commands"):
        name = rest.pop(0)
        if name not in command.commands:
            return f"no verb {name}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    unknown = [word for word in rest if word.startswith("--") and word not in known]
    return f"no option {unknown[0]}" if unknown else None


def complaint(line: str) -> str | None:
    """Why a shell line of a page cannot work; None if it can."""
    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:
        words.pop(0)
    if not words:
        return None
    program, rest = words[0], words[1:]
    if program == "make":
        for word in rest:
            if word.startswith("ARGS="):
                return cli_complaint(["serve", *shlex.split(word.removeprefix("ARGS="))])
            if "=" not in word and word not in TARGETS:
                return f"no target {word}"
        return None
    if program in {"sekisho", ".venv/bin/sekisho"}:
        return cli_complaint(rest)
    return f"{program} is no command of this project"


def test_pages_are_found() -> None:
    names = {page.name for page in PAGES}
    assert {"README.md", "README.ja.md", "threat-model.md", "structures.md"} <= names
    assert blocks("sh")
    assert blocks("python")


@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: block.page)
def test_shell_lines_name_targets_verbs_and_flags_that_exist(block: Block) -> None:
    for line in block.text.splitlines():
        assert complaint(line) is None, f"{line}: {complaint(line)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_exist(page: Path) -> None:
    inline = re.findall(r"(?<!`)`((?:make|sekisho) [^`]+)`(?!`)", FENCE.sub("", read(page)))
    for line in inline:
        assert complaint(line) is None, f"{line}: {complaint(line)}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("make server", "no target server"),
        ('make serve ARGS="--colocatd 1"', "no option --colocatd"),
        ("sekisho sereve", "no verb sereve"),
        ("sekisho config show --jason", "no option --jason"),
        ("frobnicate", "frobnicate is no command of this project"),
        ("SEKISHO_PORT=1 sekisho config show --json  # comment", None),
    ],
)
def test_a_wrong_line_is_seen(line: str, words: str | None) -> None:
    assert complaint(line) == words


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page)
def test_python_examples_parse_and_import_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            assert importlib.util.find_spec(module), f"{block.page}: no module {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for target in LINK.findall(read(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ +(.*)$", read(file), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


def test_both_readmes_have_the_same_shape_and_the_same_code() -> None:
    english, japanese = read(ROOT / "README.md"), read(ROOT / "README.ja.md")
    assert FENCE.findall(english) == FENCE.findall(japanese)

    def levels(text: str) -> list[int]:
        return [len(marks) for marks in re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)]

    def links(text: str) -> list[str]:
        return [link for link in LINK.findall(text) if not link.startswith("README")]

    def code(text: str) -> set[str]:
        return set(re.findall(r"`[^`\n]+`", FENCE.sub("", text)))

    assert levels(english) == levels(japanese)
    assert links(english) == links(japanese)
    assert code(english) == code(japanese)


def test_the_readme_names_each_promise_of_the_threat_model() -> None:
    promised = r"^- \*([^*]+)\*:"
    names = re.findall(promised, read(ROOT / "docs" / "threat-model.md"), re.MULTILINE)
    assert len(names) == 6
    readme = read(ROOT / "README.md")
    assert all(f"*{name.lower()}*" in readme for name in names)
