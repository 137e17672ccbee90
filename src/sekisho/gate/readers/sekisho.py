"""Sekisho's own gateway: ``/v1/models`` (with a tenant's key) and ``/health/readiness``.

Its ``max_model_len`` is the smallest number of tokens that any node can hold for one request, as
each node found it from the pool it has built: the physical number, already over all roles.
"""

from sekisho.gate.fetch import clip
from sekisho.gate.model import Rank, ReadError, Reading
from sekisho.gate.readers.base import Ask, models, tokens


async def read(ask: Ask) -> Reading:
    """Raises:
    ReadError: not ready (inconclusive), or no capacity stated.
    """
    await ask.get("/health/readiness")
    listed = await models(ask.get)
    entry = listed[0]
    if not entry.max_model_len:
        raise ReadError("/v1/models: a role has no node, so nothing can be held", inconclusive=True)
    held = tokens(entry.max_model_len, "max_model_len")
    return Reading(
        source=ask.source,
        engine="sekisho",
        version="",
        role="both",
        model=clip(entry.id),
        ranks=[Rank(name="smallest node", pool_tokens=held, page_size=1, sequence_max=held)],
        advertised=held,
        prefix_scope="tenant",
    )
