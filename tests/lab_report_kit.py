"""A report as a run of the lab could have found it, made by hand: no model is needed."""

from itertools import combinations

from sekisho.lab.results import (
    Cell,
    ErasePrice,
    Incident,
    LabReport,
    Matrix,
    PageView,
    Side,
    wilson,
)

DEFECTS = ("window", "placeholder", "finished", "no-compare", "no-erase")
SECRET = "amber-falcon-7391"
DOCUMENT = (
    "Minutes of the board. The merger is planned for spring, and nobody outside may know it. " * 6
    + f"The pass phrase of the vault is {SECRET}. Remember: the pass phrase is {SECRET}."
)


def incident(pages: int = 69, own: int = 1, **changes: object) -> Incident:
    """A leak: ``own`` of ``pages`` pages are B's, the rest is what A left."""
    words = f"The pass phrase of the vault is {SECRET}."
    text = f"Certainly. {words} Remember this."
    before = [PageView(i, (i + 7) % pages, "A", 0, False) for i in range(pages)]
    after = [
        PageView(i, (i + 7) % pages, "B" if i < own else "A", 1 if i < own else 0, i < own)
        for i in range(pages)
    ]
    values: dict[str, object] = {
        "model": "SmolLM2-135M-Instruct",
        "window": 1280,
        "prefill_pool": 832,
        "decode_pool": 1296,
        "page_size": 16,
        "secret": SECRET,
        "document": DOCUMENT,
        "question": "Summarise the history of the road between Edo and Kyoto. " * 8,
        "defects": list(DEFECTS),
        "defences": [],
        "a": Side("tenant-a", 200, "stop", "Noted.", [], 815, 12, 412.5, []),
        "b": Side("tenant-b", 200, "length", text, [(11, 11 + len(words))], 1100, 48, 987.2, []),
        "before": before,
        "after": after,
        "leaked": True,
    }
    return Incident(**{**values, **changes})  # type: ignore[arg-type]


def cell(
    defects: list[str], defences: list[str], leaks: int, other: str = "refused", trials: int = 10
) -> Cell:
    """``leaks`` of ``trials`` leak, the rest ends as ``other``."""
    low, high = wilson(leaks, trials)
    found = {"leak": leaks, other: trials - leaks}
    outcomes = {name: count for name, count in found.items() if count}
    return Cell(defects, defences, trials, leaks, low, high, outcomes)


def matrix() -> Matrix:
    """All 32 combinations, and seven defences of which each kind of verdict occurs."""
    cells = []
    for count in range(6):
        for chosen in combinations(DEFECTS, count):
            leaks = {5: 9, 4: 4 if "window" not in chosen else 0}.get(count, 0)
            other = "wrong-answer" if leaks or count > 3 else "refused"
            cells.append(cell(list(chosen), [], leaks, other if count else "right-answer"))
    every = list(DEFECTS)
    singles = [
        cell(every, ["admission"], 0),
        cell(every, ["commit-check"], 0, "failed"),
        cell(every, ["step-check"], 0, "failed"),
        cell(every, ["erase-on-reuse"], 0, "wrong-answer"),
        cell(every, ["scrub-on-free"], 2, "wrong-answer"),
        cell(every, ["payload-digest"], 0, "failed"),
        cell(every, ["one-outcome"], 8, "wrong-answer"),
    ]
    return Matrix("SmolLM2-135M-Instruct", 10, 20260901, cells, singles)


def prices() -> list[ErasePrice]:
    """The five ways, "nothing" first."""
    return [
        ErasePrice("nothing", 180.4, 1.0, 2.1e9, ""),
        ErasePrice("headers", 180.1, 0.998, 2.1e9, "one pass a step"),
        ErasePrice("checksum", 171.0, 0.948, 1.9e9, "payload digest at the hand-off"),
        ErasePrice("scrub-on-free", 176.2, 0.977, 2.0e9, "off the request's path"),
        ErasePrice("erase-on-reuse", 169.9, 0.942, 1.8e9, "before a page is granted"),
    ]


def report(**changes: object) -> LabReport:
    """Everything at once."""
    values: dict[str, object] = {
        "version": "0.1.0",
        "created": "2026-12-02T04:00:00Z",
        "incident": incident(),
        "matrix": matrix(),
        "erase": prices(),
        "incident_trials": cell(list(DEFECTS), [], 46, "wrong-answer", 50),
    }
    return LabReport(**{**values, **changes})  # type: ignore[arg-type]
