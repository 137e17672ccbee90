"""Everything that gateway and nodes say to each other: msgspec structs over ZeroMQ."""

import msgspec

from sekisho.engine.params import SamplingParams, TokenInfo


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the tagged union; the tag is the class name."""


# gateway -> decode (or colocated) node


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


# decode -> gateway


class Delta(Message, frozen=True):
    """New text of a request. ``index`` counts its output tokens before this delta, so that a
    gap, a repeat or a foreign delta shows. ``infos`` has one entry a token if asked for."""

    request: int
    index: int
    tokens: list[int]
    text: str
    infos: list[TokenInfo]


class Ended(Message, frozen=True):
    """The request's one outcome; nothing follows. ``code`` and ``message`` make an `Outcome`."""

    request: int
    code: str
    message: str
    output_tokens: int
    cached_tokens: int
