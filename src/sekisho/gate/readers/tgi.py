"""Text Generation Inference: ``/info``, as its OpenAPI description (``Info``) has it.

``max_batch_total_tokens`` is what the shards found room for; ``max_input_tokens`` (before 2.0
``max_input_length``) and ``max_total_tokens`` are the limits of one request.
"""

import msgspec

from sekisho.gate.fetch import clip
from sekisho.gate.model import Rank, ReadError, Reading
from sekisho.gate.readers.base import Ask, decode, tokens


class _Info(msgspec.Struct):
    model_id: str
    version: str
    max_total_tokens: int
    max_batch_total_tokens: int | None = None
    max_input_tokens: int | None = None
    max_input_length: int | None = None


async def read(ask: Ask) -> Reading:
    """Raises:
    ReadError: a number is missing or none.
    """
    info = decode(await ask.get("/info"), _Info, "/info")
    if info.max_batch_total_tokens is None:
        raise ReadError("/info does not state max_batch_total_tokens, which is its pool")
    prompt = info.max_input_tokens if info.max_input_tokens is not None else info.max_input_length
    window = tokens(info.max_total_tokens, "max_total_tokens")
    return Reading(
        source=ask.source,
        engine="tgi",
        version=clip(info.version, 60),
        role="both",
        model=clip(info.model_id),
        ranks=[
            Rank(
                name="all shards",
                pool_tokens=tokens(info.max_batch_total_tokens, "max_batch_total_tokens"),
                page_size=1,
                request_max=None if prompt is None else tokens(prompt, "max_input_tokens"),
                sequence_max=window,
            )
        ],
        advertised=window,
    )
