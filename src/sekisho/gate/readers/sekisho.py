"""Sekisho's own gateway: ``/health/capacity``, which needs no key and shows the pool of every node.

A node's ``tokens_max`` is its pool or the model's context, whichever is less. An older server has
no such path: there ``/v1/models`` (with a tenant's key) and ``/health/readiness`` tell what its
smallest node holds.
"""

import msgspec

from sekisho.gate.fetch import MissingError, clip
from sekisho.gate.model import Rank, ReadError, Reading, Role
from sekisho.gate.readers.base import Ask, decode, models, tokens

_ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


class _Node(msgspec.Struct):
    name: str
    role: Role
    pool_tokens: int
    page_size: int
    tokens_max: int


class _Capacity(msgspec.Struct):
    model: str
    ready: bool
    window: int | None
    missing: list[str]
    nodes: list[_Node]


async def read(ask: Ask) -> list[Reading]:
    """One reading for each role that has nodes.

    Raises:
        ReadError: a role has no node, or it is not ready for another reason than a pool below its
            window (both inconclusive); or a number is none.
    """
    try:
        body = await ask.get("/health/capacity")
    except MissingError:
        return [await _smallest(ask)]
    told = decode(body, _Capacity, "/health/capacity")
    if told.missing or not told.nodes:
        gone = clip(", ".join(told.missing)) or "any role"
        raise ReadError(f"/health/capacity: no node of {gone} is there", inconclusive=True)
    held = min(tokens(node.tokens_max, "tokens_max") for node in told.nodes)
    window = held if told.window is None else tokens(told.window, "window")
    if not told.ready and held >= window:
        raise ReadError("/health/capacity: not ready", inconclusive=True)
    return [
        Reading(
            # Two readings of one address: rule, model and source name a finding.
            source=ask.source if role == "both" else f"{ask.source}#{role}",
            engine="sekisho",
            version="",
            role=role,
            model=clip(told.model),
            ranks=[_rank(node) for node in told.nodes if node.role == role],
            advertised=window,
            prefix_scope="tenant",
        )
        for role in _ROLES
        if any(node.role == role for node in told.nodes)
    ]


def _rank(node: _Node) -> Rank:
    return Rank(
        name=clip(node.name, 80),
        pool_tokens=tokens(node.pool_tokens, "pool_tokens"),
        page_size=tokens(node.page_size, "page_size"),
        sequence_max=node.tokens_max,
    )


async def _smallest(ask: Ask) -> Reading:
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
