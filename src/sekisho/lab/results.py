"""What a run of the lab found: plain values, JSON both ways, read by the report.

Words used: a *defect* is one of the five faults that made the incident, a *defence* is one
mechanism of the production engine put back. A trial's outcome class is ``leak`` (A's secret stands
in B's answer), ``wrong-answer`` (200, and not the answer to B's prompt), ``refused`` (400, before
a page was written for it), ``failed`` (ended with an error afterwards) or ``right-answer``, which
no engine of the lab can give, because B's prompt fits no prefill pool of it.
"""

import msgspec

OUTCOMES = ("leak", "wrong-answer", "failed", "refused", "right-answer")


class PageView(msgspec.Struct, frozen=True):
    """One entry of B's block table as decode attended to it.

    ``owner`` is whose bytes are physically in the page: "B", "A", "empty" (zeros: never written, or
    erased) or "other". ``filled`` is the number of token slots its header names. ``expected``: the
    header is the one that the table expects.
    """

    ordinal: int
    page: int
    owner: str
    filled: int
    expected: bool


class Side(msgspec.Struct, frozen=True):
    """What the gateway saw of one request and returned for it.

    ``status`` is the HTTP status, ``finish`` the outcome code. ``marked`` are [start, end)
    character spans of ``text`` that are A's words. ``evidence`` is what the checks reported.
    """

    tenant: str
    status: int
    finish: str
    text: str
    marked: list[tuple[int, int]]
    prompt_tokens: int
    completion_tokens: int
    latency_ms: float
    evidence: list[str]


class Incident(msgspec.Struct, frozen=True):
    """One trial. Sizes are in tokens. ``before``: B's pages right after it reserved them;
    ``after``: at its first decode step; each is empty if it never got there."""

    model: str
    window: int
    prefill_pool: int
    decode_pool: int
    page_size: int
    secret: str
    document: str
    question: str
    defects: list[str]
    defences: list[str]
    a: Side
    b: Side
    before: list[PageView]
    after: list[PageView]
    leaked: bool


class Cell(msgspec.Struct, frozen=True):
    """The leak rate of one combination, with its 95 % Wilson interval, and all outcome classes."""

    defects: list[str]
    defences: list[str]
    trials: int
    leaks: int
    low: float
    high: float
    outcomes: dict[str, int]


class Matrix(msgspec.Struct, frozen=True):
    """Every combination of the defects, and every defence alone against all of them."""

    model: str
    trials: int
    seed: int
    combinations: list[Cell]
    single_defences: list[Cell]


class ErasePrice(msgspec.Struct, frozen=True):
    """What one way to be safe costs. ``name`` is nothing, headers, checksum, scrub-on-free or
    erase-on-reuse; ``ratio`` is its throughput against "nothing" in the same interleaved run."""

    name: str
    tokens_per_second: float
    ratio: float
    bytes_per_second: float
    note: str


class LabReport(msgspec.Struct, frozen=True):
    """Everything that one page of the report shows; parts that were not run are empty.

    ``created`` is a UTC time in ISO 8601. ``incident_trials`` counts all trials of the run that
    ``incident`` is one of.
    """

    version: str
    created: str
    incident: Incident | None
    matrix: Matrix | None
    erase: list[ErasePrice]
    incident_trials: Cell | None = None


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a rate (Wilson 1927); (0, 1) without a trial."""
    if trials == 0:
        return 0.0, 1.0
    z = 1.959964
    rate = hits / trials
    middle = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * ((rate * (1 - rate) + z * z / (4 * trials)) / trials) ** 0.5 / (1 + z * z / trials)
    return max(0.0, middle - half), min(1.0, middle + half)
