"""What an engine says about a request: text as it is released, and the one end."""

import msgspec

from sekisho.engine.params import TokenInfo


class Delta(msgspec.Struct, frozen=True, tag=True):
    """New text of a request. ``index`` counts its output tokens before this delta, so that a
    gap, a repeat or a foreign delta shows. ``infos`` has one entry a token if asked for."""

    request: int
    index: int
    tokens: list[int]
    text: str
    infos: list[TokenInfo]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The request's one outcome; nothing follows. ``code`` and ``message`` make an `Outcome`;
    ``output_tokens`` counts an end-of-sequence token too, which no delta shows."""

    request: int
    code: str
    message: str
    output_tokens: int
    cached_tokens: int
