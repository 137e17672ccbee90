"""One self-contained HTML page: the house style, and the escaping of what strangers wrote.

A page needs no network and no script, and forbids itself every source by its policy. Its template
includes ``house.css`` and then a stylesheet of its own.
"""

import unicodedata
from pathlib import Path
from typing import NamedTuple

import jinja2

_TEMPLATES = Path(__file__).parent / "templates"


class Segment(NamedTuple):
    """A piece of text that is marked or not."""

    text: str
    marked: bool


def environment(templates: Path) -> jinja2.Environment:
    """For the pages in the folder ``templates``: every value is escaped and `clean`."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([templates, _TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Of plain strings only: what a macro returns is markup, already made.
        finalize=lambda value: clean(value) if type(value) is str else value,
    )


def clean(text: str) -> str:
    """``text`` with every character that could act on the page or its reader made visible.

    One character stays one character, so that spans keep their meaning: control characters become
    their control pictures, bidirectional controls, other format characters and lone surrogates the
    replacement character. Newline and tab stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char in "\n\t":
        return char
    if ord(char) < 32:
        return chr(0x2400 + ord(char))
    return "\ufffd" if unicodedata.category(char) in {"Cc", "Cf", "Cs"} else char


def segments(text: str, spans: list[tuple[int, int]]) -> list[Segment]:
    """``text`` cut at ``spans``, which may overlap, touch, be in any order or lie outside."""
    pieces: list[Segment] = []
    done = 0
    for start, end in sorted(spans):
        first, last = max(start, done), min(end, len(text))
        if first >= last:
            continue
        if first > done:
            pieces.append(Segment(text[done:first], False))
        if first == done and pieces and pieces[-1].marked:
            pieces[-1] = Segment(pieces[-1].text + text[first:last], True)
        else:
            pieces.append(Segment(text[first:last], True))
        done = last
    if done < len(text):
        pieces.append(Segment(text[done:], False))
    return pieces
