"""Encoding of `messages`: a frame is a msgpack list, so that one step is one frame."""

from collections.abc import Sequence

import msgspec

from sekisho.core.handoff import AbortOffer, Answer, Complete, Drained, Failed, Offer, Reject
from sekisho.node.messages import Join, ToDecode, ToGateway, ToNode, ToPrefill

encode = msgspec.msgpack.Encoder().encode
decode_to_node = msgspec.msgpack.Decoder(list[ToNode]).decode
decode_to_gateway = msgspec.msgpack.Decoder(list[ToGateway]).decode
_decode_to_prefill = msgspec.msgpack.Decoder(ToPrefill).decode
_decode_to_decode = msgspec.msgpack.Decoder(ToDecode).decode


def encode_to_node(messages: Sequence[ToNode]) -> bytes:
    """Frame for a node; the types are checked statically."""
    return encode(list(messages))


def encode_to_prefill(message: Join | Offer | AbortOffer) -> bytes:
    """Frame for a prefill node."""
    match message:
        case Join():
            return encode(ToPrefill(join=message))
        case Offer():
            return encode(ToPrefill(offer=message))
        case AbortOffer():
            return encode(ToPrefill(abort=message))


def decode_to_prefill(frame: bytes) -> Join | Offer | AbortOffer:
    """Raises `msgspec.DecodeError` (or its child ValidationError) for anything else."""
    envelope = _decode_to_prefill(frame)
    for message in (envelope.join, envelope.offer, envelope.abort):
        if message is not None:
            return message
    raise msgspec.ValidationError("an empty envelope")


def encode_to_decode(message: Answer) -> bytes:
    """Frame for a decode node."""
    match message:
        case Reject():
            return encode(ToDecode(reject=message))
        case Complete():
            return encode(ToDecode(complete=message))
        case Failed():
            return encode(ToDecode(failed=message))
        case Drained():
            return encode(ToDecode(drained=message))


def decode_to_decode(frame: bytes) -> Answer:
    """Raises `msgspec.DecodeError` (or its child ValidationError) for anything else."""
    envelope = _decode_to_decode(frame)
    for message in (envelope.reject, envelope.complete, envelope.failed, envelope.drained):
        if message is not None:
            return message
    raise msgspec.ValidationError("an empty envelope")
