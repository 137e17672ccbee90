"""What the figures of the report show, as plain values: spans, page grids, verdicts, words."""

from collections import Counter
from typing import NamedTuple

from sekisho.lab.results import OUTCOMES, Cell, Incident, PageView

COLUMNS = 16
_CELL = 32
_LABELS = 44
_EXCERPT = 150


class Defect(NamedTuple):
    """A defect in the report's words; ``report`` is the public report of it."""

    title: str
    broken: str
    sound: str
    report: str


DEFECTS = {
    "window": Defect(
        "The promise is larger than the pool",
        "The advertised window is set by hand and never compared with what prefill can hold.",
        "The limit of a request is the smallest that every role can hold.",
        "sglang PR#30326",
    ),
    "placeholder": Defect(
        "Rejected by rewriting it",
        "The over-long prompt becomes one placeholder token. The verdict goes to another field.",
        "A rejection never edits the request: its length stays what it was.",
        "sglang#30233",
    ),
    "finished": Defect(
        "Admission asks the wrong field",
        "finished() knows nothing of the verdict and says no: the request goes on.",
        "One outcome, set once, read by every queue.",
        "sglang PR#30325",
    ),
    "no-compare": Defect(
        "Nobody counts what arrived",
        "Prefill sends one page. Decode reserved many, and compares nothing.",
        "Decode compares counts and the header of every page before it goes on.",
        "sglang PR#38704",
    ),
    "no-erase": Defect(
        "Pages are reused unerased",
        "The other pages still hold what the tenant before wrote, and attention reads them all.",
        "A page is erased before it is granted again.",
        "vllm PR#35219",
    ),
}

# class of the swatch, letter in the cell, words of the legend
OWNERS = {
    "B": ("b", "B", "written for this request of tenant B"),
    "A": ("a", "A", "still the bytes of tenant A"),
    "empty": ("empty", "–", "empty: never written, or erased"),
    "other": ("other", "?", "bytes of somebody else"),
}

# class, letter, words
OUTCOME_WORDS = {
    "leak": ("leak", "L", "leak: A's secret is in B's answer"),
    "wrong-answer": ("wrong", "W", "wrong answer, served as success"),
    "failed": ("failed", "F", "ended with an error after it began"),
    "refused": ("refused", "R", "refused before a page was written"),
    "right-answer": ("right", "✓", "right answer"),
}


class GridCell(NamedTuple):
    """One page in the grid: where it is drawn, and what is said of it."""

    x: int
    y: int
    style: str
    letter: str
    bar: float
    expected: bool
    title: str


class Grid(NamedTuple):
    """A block table drawn page by page; ``labels`` are (y, first ordinal) of each row."""

    name: str
    when: str
    width: int
    height: int
    cells: list[GridCell]
    labels: list[tuple[int, int]]
    counts: list[tuple[str, int]]
    unexpected: int


class Case(NamedTuple):
    """One row of a bar chart of cells."""

    name: str
    cell: Cell
    verdict: str
    """baseline, suffices, narrows or no effect seen."""
    reason: str


class Step(NamedTuple):
    """One of the five steps of the story; ``active``: this run has the defect."""

    name: str
    defect: Defect
    active: bool
    number: str


def occurrences(text: str, secret: str) -> list[tuple[int, int]]:
    """Spans of ``secret`` in ``text``, left to right, not overlapping."""
    spans: list[tuple[int, int]] = []
    start = text.find(secret) if secret else -1
    while start >= 0:
        spans.append((start, start + len(secret)))
        start = text.find(secret, start + len(secret))
    return spans


def excerpt(text: str, around: int) -> str:
    """Some words before and after one place of ``text``, with dots where it was cut."""
    start, end = max(0, around - _EXCERPT), min(len(text), around + _EXCERPT)
    if start:  # at a word, unless one word is all there is
        start = max(start, text.find(" ", start, around) + 1)
    if end < len(text):
        space = text.rfind(" ", around, end)
        end = space if space > 0 else end
    return ("… " if start else "") + text[start:end].strip() + (" …" if end < len(text) else "")


def grid(name: str, when: str, pages: list[PageView], page_size: int) -> Grid:
    """The block table ``pages`` in rows of `COLUMNS`, in the order given."""
    cells, labels = [], []
    for index, page in enumerate(pages):
        row, column = divmod(index, COLUMNS)
        if column == 0:
            labels.append((row * _CELL, page.ordinal))
        style, letter, words = OWNERS.get(page.owner, OWNERS["other"])
        header = "the header is the expected one" if page.expected else "not the expected header"
        title = f"entry {page.ordinal}, page {page.page}: {words}; {page.filled} slots, {header}"
        bar = min(1.0, max(0.0, page.filled / page_size)) if page_size > 0 else 0.0
        x = _LABELS + column * _CELL
        cells.append(GridCell(x, row * _CELL, style, letter, bar, page.expected, title))
    found = Counter(page.owner if page.owner in OWNERS else "other" for page in pages)
    return Grid(
        name=name,
        when=when,
        width=_LABELS + COLUMNS * _CELL,
        height=max(1, len(labels)) * _CELL,
        cells=cells,
        labels=labels,
        counts=[(owner, found[owner]) for owner in OWNERS if found[owner]],
        unexpected=sum(not page.expected for page in pages),
    )


def story(incident: Incident) -> list[Step]:
    """The five steps, each with what this run's numbers say of it."""
    read = len(incident.after)
    refused = not incident.before or incident.b.status == 400
    owners = Counter(page.owner for page in incident.after)
    unseen = "not reached"
    numbers = {
        "window": f"{incident.window:,} promised, {incident.prefill_pool:,} there",
        "placeholder": unseen if refused else f"{incident.b.prompt_tokens:,} tokens become 1",
        "finished": unseen if refused else "finished()? no",
        "no-compare": f"{owners['B']:,} of {read:,} pages arrived" if read else unseen,
        "no-erase": f"{owners['A']:,} pages of A read" if read else unseen,
    }
    return [
        Step(name, defect, name in incident.defects, numbers[name])
        for name, defect in DEFECTS.items()
    ]


def lead(incident: Incident) -> tuple[str, str, str, str]:
    """Tone (bad, doubt or good), stamp, headline and sentence, from the incident's values alone."""
    b = incident.b
    seen = f"HTTP {b.status}, {b.latency_ms:,.0f} ms, {b.completion_tokens:,} tokens"
    if incident.leaked:
        quiet = b.status == 200 and not b.evidence
        end = ", no evidence: nothing looks wrong." if quiet else "."
        return "bad", "LEAKED", "Tenant B reads tenant A's secret", seen + end
    if b.status != 200:
        end = "." if b.text else ": it ended before a token left."
        return (
            "good",
            "HELD",
            "Tenant B gets an error, not A's secret",
            f"HTTP {b.status}, {b.finish}{end}",
        )
    foreign = sum(not page.expected for page in incident.after)
    if foreign:
        return (
            "doubt",
            "NO LEAK",
            "No secret in B's answer, but no right answer",
            f"{seen}, built on {foreign:,} of {len(incident.after):,} pages not written for B.",
        )
    return "good", "NO LEAK", "B's answer does not hold A's secret", seen + "."


def cases(baseline: Cell | None, singles: list[Cell]) -> list[Case]:
    """The single defences beside the full set of defects, judged by what was measured alone."""
    rows = []
    if baseline is not None:
        rows.append(Case("no defence", baseline, "baseline", "all five defects"))
    for cell in singles:
        verdict, reason = _judge(baseline, cell)
        rows.append(Case(", ".join(cell.defences), cell, verdict, reason))
    return rows


def _judge(baseline: Cell | None, cell: Cell) -> tuple[str, str]:
    wrong = cell.outcomes.get("wrong-answer", 0)
    if cell.leaks == 0 and wrong == 0:
        return "suffices", f"no leak and no wrong answer in {cell.trials}"
    if cell.leaks == 0:
        return "narrows", f"no leak, but {wrong} of {cell.trials} answers are wrong, served as 200"
    if baseline is not None and cell.high < baseline.low:
        return "narrows", f"fewer leaks, still {cell.leaks} of {cell.trials}"
    return "no effect seen", f"{cell.leaks} of {cell.trials} leak"


def outcome_shares(cell: Cell) -> list[tuple[str, float, float, int]]:
    """(outcome, left edge, width, count) of each class that occurred, as shares of all trials."""
    known = [(name, cell.outcomes.get(name, 0)) for name in OUTCOMES]
    rest = [item for item in sorted(cell.outcomes.items()) if item[0] not in OUTCOMES]
    total = sum(count for _, count in known + rest)
    shares, left = [], 0.0
    for name, count in known + rest:
        if count > 0:
            shares.append((name, left, count / total, count))
            left += count / total
    return shares


def heat(rate: float) -> int:
    """The shade of a rate, 0 (none at all) to 4; each has a text colour of enough contrast."""
    return 0 if rate <= 0 else min(4, 1 + int(rate * 4))
