"""The two requests of a finding, cut to what can be read, with what they share marked in both."""

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import NamedTuple

from sekisho.probe.exchange import Answer, Outcome, Refused
from sekisho.probe.match import normalise
from sekisho.probe.model import Finding, Span
from sekisho.report.page import Segment, segments

AROUND = 240
"""Characters that are shown on each side of a mark."""
_MARK_MAX = 400
_MARKS_MAX = 40
_PLACES = {
    Answer: ("the answer", "reasoning and tool arguments", "the raw body"),
    Refused: ("the raw body",),
}
_BROKEN = "what came before it broke", "the raw body"


class Excerpt(NamedTuple):
    """Part of a text: ``before`` and ``after`` characters of it are left out."""

    pieces: tuple[Segment, ...]
    before: int
    after: int


class Shown(NamedTuple):
    """One exchange. ``place`` says which of its texts ``received`` is of."""

    serial: int
    account: str
    outcome: str
    prompt: Excerpt
    received: Excerpt
    place: str


class Evidence(NamedTuple):
    """Of a finding; None where there is no such exchange, or the log does not hold it."""

    seen: Shown | None
    planted: Shown | None


def evidence(finding: Finding, exchanges: Mapping[int, Outcome]) -> Evidence:
    """What ``exchanges``, by serial, hold of ``finding``."""
    seen, planted = exchanges.get(finding.seen_in), exchanges.get(finding.planted_in)
    matched = ""
    if seen is not None and finding.span is not None:
        matched = _text(seen, finding.span)[finding.span.start : finding.span.end]
    return Evidence(
        seen=None if seen is None else _shown(seen, finding.span, ""),
        planted=None if planted is None else _shown(planted, None, matched),
    )


def plain(cut: Excerpt) -> str:
    """In one string, with marks as ⟦ ⟧; the newlines of the text are still in it."""
    text = "".join(f"⟦{piece.text}⟧" if piece.marked else piece.text for piece in cut.pieces)
    before = f"[{cut.before:,} characters] " if cut.before else ""
    after = f" [{cut.after:,} characters]" if cut.after else ""
    return before + text + after


def excerpt(text: str, spans: list[tuple[int, int]]) -> Excerpt:
    """``text`` around the first of ``spans``, or its beginning where there is none.

    A mark that is longer than can be read, since what lies between its letters may be anything,
    is cut in its middle.
    """
    if not spans:
        shown = text[: 2 * AROUND]
        return Excerpt(tuple(segments(shown, [])), 0, len(text) - len(shown))
    first, last = spans[0]
    start, end = max(0, first - AROUND), min(len(text), last + AROUND)
    near = [(max(a, start) - start, min(b, end) - start) for a, b in spans if a < end]
    pieces = tuple(_short(piece) for piece in segments(text[start:end], near))
    return Excerpt(pieces, start, len(text) - end)


def _short(piece: Segment) -> Segment:
    if len(piece.text) <= _MARK_MAX:
        return piece
    half = _MARK_MAX // 2
    left_out = len(piece.text) - 2 * half
    text = f"{piece.text[:half]} [{left_out:,} characters] {piece.text[-half:]}"
    return Segment(text, piece.marked)


def _shown(outcome: Outcome, span: Span | None, matched: str) -> Shown:
    texts = outcome.texts()
    index = 0 if span is None else span.text
    if span is None:  # the first that holds anything
        index = next((i for i, text in enumerate(texts) if text), 0)
    places = _PLACES.get(type(outcome), _BROKEN)
    return Shown(
        serial=outcome.serial,
        account=outcome.account,
        outcome=_told(outcome),
        prompt=excerpt(outcome.ask.prompt, _places(matched, outcome.ask.prompt)),
        received=excerpt(
            texts[index] if index < len(texts) else "", [(span.start, span.end)] if span else []
        ),
        place=places[min(index, len(places) - 1)],
    )


def _text(outcome: Outcome, span: Span) -> str:
    texts = outcome.texts()
    return texts[span.text] if span.text < len(texts) else ""


def _told(outcome: Outcome) -> str:
    """One sentence; of what came only its numbers."""
    if isinstance(outcome, Answer):
        whole = outcome.whole
        counts = [
            f"{count:,} {name} tokens"
            for count, name in (
                (whole.prompt_tokens, "prompt"),
                (whole.completion_tokens, "answer"),
            )
            if count is not None
        ]
        return ", ".join([f"answered with {outcome.status}", *counts])
    if isinstance(outcome, Refused):
        return f"refused with {outcome.status}"
    status = f" after status {outcome.status}" if outcome.status else ""
    return f"inconclusive{status}: {outcome.reason}"


def _places(matched: str, prompt: str) -> list[tuple[int, int]]:
    """Where ``prompt`` holds what was matched, in other case, with other spaces and signs."""
    wanted = normalise(matched)[0]
    normal, places = normalise(prompt)
    if not wanted or not normal:
        return []
    if wanted not in normal:
        # One sign, such as a ligature, can be several letters and bring in too much at an end.
        found = SequenceMatcher(None, normal, wanted, autojunk=False).find_longest_match()
        wanted = normal[found.a : found.a + found.size] if 2 * found.size > len(wanted) else ""
    spans: list[tuple[int, int]] = []
    at = normal.find(wanted) if wanted else -1
    while at >= 0 and len(spans) < _MARKS_MAX:
        spans.append((places[at], places[at + len(wanted) - 1] + 1))
        at = normal.find(wanted, at + len(wanted))
    return spans
