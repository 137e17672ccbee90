"""What a run is made from, and nothing else: cluster, requests, faults. JSON in and out.

A run draws nothing that is not in its `Scenario` or derived from the scenario's seed, so that the
same scenario on the same commit is the same run, byte for byte, and a smaller scenario is again a
run. That is what makes shrinking and `sekisho sim replay` possible.
"""

import msgspec


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster. Pools are in pages; ``wait_max`` in simulated seconds."""

    prefill: int
    decode: int
    prefill_pages: int
    decode_pages: int
    isolation: str
    batch_max: int
    chunk_tokens: int
    queue_max: int
    wait_max: float


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request: at second ``at``, ``count`` answer tokens; the client leaves ``leaves``
    seconds later unless it is answered by then, and asks again after a 503, ``retries`` times.
    ``fault`` names the fault that this request is part of, if any."""

    at: float
    tenant: str
    tokens: list[int]
    count: int
    temperature: float = 0.0
    leaves: float | None = None
    retries: int = 0
    fault: str = ""


class Strike(msgspec.Struct, frozen=True):
    """The ``n``-th opportunity (from 0) at a seam suffers ``fault``; ``amount`` is the fault's own
    measure (seconds, pages, tokens)."""

    fault: str
    n: int
    amount: float = 0.0


class Event(msgspec.Struct, frozen=True):
    """At second ``at`` something befalls the node in ``slot`` (``prefill-0``)."""

    fault: str
    at: float
    slot: str
    amount: float = 0.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``without`` names the defences that are removed."""

    seed: int
    shape: Shape
    asks: list[Ask]
    strikes: list[Strike] = []
    events: list[Event] = []
    without: list[str] = []


class Failure(msgspec.Struct, frozen=True):
    """What a checker saw: ``checker`` is its name; ``at`` in simulated seconds."""

    checker: str
    message: str
    at: float


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A failed run as it is kept in a file. ``shrunk_from`` counts asks, strikes and events of
    the first failure."""

    format: int
    version: str
    failure: Failure
    shrunk_from: int
    scenario: Scenario
