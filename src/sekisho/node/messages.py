"""Everything that gateway and nodes say to each other: msgspec structs over ZeroMQ.

What decode and prefill say about a hand-off is in `core.handoff`; here is its wire form too.
"""

from typing import TypeAlias

import msgspec

from sekisho.core.handoff import AbortOffer, Complete, Drained, Failed, Offer, Reject
from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the tagged unions; the tag is the class name."""


# ---- gateway -> node


class Generate(Message, frozen=True):
    """Answer ``tokens`` for the tenant ``scope``. ``prefill`` names the prefill node to use; it
    is empty for a colocated node. ``request`` never repeats for the life of a gateway."""

    request: int
    scope: str
    tokens: list[int]
    params: SamplingParams
    prefill: str


class Abort(Message, frozen=True):
    """The client is gone, or the gateway gives up."""

    request: int


class PeerUp(Message, frozen=True):
    """To decode: a prefill node is ready at this ZeroMQ address."""

    name: str
    address: str


class PeerDead(Message, frozen=True):
    """The process of that node has ended, as its parent saw; it writes no more."""

    name: str


class Inspect(Message, frozen=True):
    """Recount the pool and answer with `Report`."""


ToNode: TypeAlias = Generate | Abort | PeerUp | PeerDead | Inspect

# ---- node -> gateway


class Loading(Message, frozen=True):
    """How far the node's start has come, for the person who waits: ``done`` of ``total``."""

    stage: str
    done: int
    total: int


class Ready(Message, frozen=True):
    """The node can work. ``tokens_max`` is what one request may hold there, in tokens: its pool of
    ``page_count`` pages of ``page_size`` tokens, or the model's context, if that is less.
    ``notes`` are one-line warnings (a fallback that was taken)."""

    tokens_max: int
    address: str
    transport: str
    runner: str
    tenants: bool
    notes: list[str]
    page_count: int
    page_size: int


class Report(Message, frozen=True):
    """Pages by state (they add up to the pool), and requests by phase."""

    pages: dict[str, int]
    requests: dict[str, int]


class Distrust(Message, frozen=True):
    """Decode caught this prefill node in a false `Complete`: replace its process."""

    name: str


class Condemned(Message, frozen=True):
    """Somebody unknown has written pages of this node, which are never granted again: replace the
    node, and with it the pool, when its requests have ended."""


ToGateway: TypeAlias = Delta | Ended | Loading | Ready | Report | Distrust | Condemned

# ---- decode <-> prefill


class Join(Message, frozen=True):
    """First word of a decode node: where its region is, and which layout its pages have."""

    endpoint: str
    layout: int


class ToPrefill(msgspec.Struct, frozen=True):
    """One of these is set. (The core's messages carry no tags: they know no wire.)"""

    join: Join | None = None
    offer: Offer | None = None
    abort: AbortOffer | None = None


class ToDecode(msgspec.Struct, frozen=True):
    """One of these is set."""

    reject: Reject | None = None
    complete: Complete | None = None
    failed: Failed | None = None
    drained: Drained | None = None
