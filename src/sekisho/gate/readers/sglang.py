"""SGLang: ``/server_info`` (``/get_server_info`` before), ``/v1/loads``, ``/v1/models``.

Pool and limits are what the schedulers report of themselves (``max_total_num_tokens``,
``max_req_input_len``); ``/v1/loads`` has the pool of every data-parallel rank, and where the two
differ the smaller one is believed. ``max_req_input_len`` is the context length or the pool, the
smaller of the two, less 1 and less 5 (``TpModelWorker`` in SGLang's ``managers/tp_worker.py``): a
pool of 1,024 takes prompts up to 1,018.

The same from ``/metrics`` saved to a file, where ``max_req_input_len`` is worked out instead.

A decode node hands out pages only while ``num_reserved_decode_tokens`` beyond the prompt stay
free (``DecodePreallocQueue.pop_preallocated`` in ``disaggregation/decode.py``): a longer request
is never scheduled there, so they count as reserved.
"""

import msgspec

from sekisho.gate.fetch import MissingError, clip
from sekisho.gate.model import PrefixScope, Rank, ReadError, Reading, Role
from sekisho.gate.readers.base import Ask, advertised, all_of, decode, models, tokens
from sekisho.gate.readers.prometheus import samples

_ROLES: dict[str, Role] = {
    "prefill": "prefill",
    "decode": "decode",
    "null": "both",
    "unified": "both",  # what /metrics calls it
}
_RESERVED = 512  # the default of num_reserved_decode_tokens, which /metrics does not show
_ANSWER = 1 + 5
"""What `max_req_input_len` leaves of the context."""
_POOL, _PAGE, _CONTEXT = "sglang:max_total_num_tokens", "sglang:page_size", "sglang:context_len"


class _Memory(msgspec.Struct):
    token_capacity: int | None = None


class _State(msgspec.Struct):
    memory_usage: _Memory | None = None


class ServerInfo(msgspec.Struct):
    """The fields used; the keys beside them are not decoded."""

    max_total_num_tokens: int
    max_req_input_len: int
    page_size: int
    internal_states: list[_State]
    version: str = ""
    context_length: int | None = None
    served_model_name: str | None = None
    model_path: str = ""
    dp_size: int = 1
    disaggregation_mode: str = "null"
    disable_radix_cache: bool = False
    disaggregation_decode_enable_radix_cache: bool = False
    num_reserved_decode_tokens: int = 0


class _Load(msgspec.Struct):
    dp_rank: int
    max_total_num_tokens: int


class _Loads(msgspec.Struct):
    loads: list[_Load]


async def read(ask: Ask) -> Reading:
    """Ask all three at once; only ``/v1/loads`` may be missing (it came with 0.5.x).

    Raises:
        ReadError: a rank is missing, or a number is none.
    """
    info, pools, listed = await all_of(_info(ask), _loads(ask), models(ask.get))
    role = _ROLES.get(info.disaggregation_mode)
    if role is None:
        raise ReadError("disaggregation_mode is neither prefill, decode nor null")
    return Reading(
        source=ask.source,
        engine="sglang",
        version=clip(info.version, 60),
        role=role,
        model=clip(info.served_model_name or info.model_path),
        ranks=_ranks(info, role, pools),
        advertised=advertised(listed),
        answer_min=_ANSWER,
        prefix_scope=_scope(info, role),
    )


def read_file(ask: Ask, body: bytes) -> Reading:
    """From ``/metrics`` saved to a file: no version and no window that it states to clients.

    Raises:
        ReadError: as `read`.
    """
    by_rank: dict[tuple[tuple[str, str], ...], dict[str, int]] = {}
    for sample in samples(body, _POOL, _PAGE, _CONTEXT):
        value = float(sample.value)
        if not value.is_integer():
            raise ReadError(f"{sample.name} is not a whole number")
        labels = tuple(sorted(sample.labels.items()))
        by_rank.setdefault(labels, {})[sample.name] = tokens(int(value), sample.name)
    modes = {dict(labels).get("engine_type", "") for labels in by_rank}
    role = _ROLES.get(modes.pop()) if len(modes) == 1 else None
    if role is None:
        raise ReadError("/metrics does not state one engine_type")
    return Reading(
        source=ask.source,
        engine="sglang",
        version="",
        role=role,
        model=clip(dict(next(iter(by_rank))).get("model_name", "")),
        ranks=[_rank_of(labels, values, role) for labels, values in by_rank.items()],
        prefix_scope="unknown",
    )


def _rank_of(labels: tuple[tuple[str, str], ...], values: dict[str, int], role: Role) -> Rank:
    if len(values) != 3:
        raise ReadError(f"/metrics lacks one of {_POOL}, {_PAGE} and {_CONTEXT} of a rank")
    pool, context = values[_POOL], values[_CONTEXT]
    return Rank(
        name=clip(" ".join(f"{k}={v}" for k, v in labels if k.endswith("_rank")), 80),
        pool_tokens=pool,
        page_size=values[_PAGE],
        request_max=max(0, min(context, pool) - _ANSWER),
        sequence_max=context,
        reserved_tokens=_RESERVED if role == "decode" else 0,
    )


async def _info(ask: Ask) -> ServerInfo:
    try:
        return decode(await ask.get("/server_info"), ServerInfo, "/server_info")
    except MissingError:
        return decode(await ask.get("/get_server_info"), ServerInfo, "/get_server_info")


async def _loads(ask: Ask) -> dict[int, int]:
    """Pool by data-parallel rank; empty where this version has no such path."""
    try:
        loads = decode(await ask.get("/v1/loads"), _Loads, "/v1/loads").loads
    except MissingError:
        return {}
    pools: dict[int, int] = {}
    for load in loads:
        pool = tokens(load.max_total_num_tokens, "max_total_num_tokens of /v1/loads")
        pools[load.dp_rank] = min(pool, pools.get(load.dp_rank, pool))
    return pools


def _ranks(info: ServerInfo, role: Role, pools: dict[int, int]) -> list[Rank]:
    count = info.dp_size
    if count < 1 or len(info.internal_states) != count:
        raise ReadError(f"{len(info.internal_states)} of dp_size {count} ranks answered")
    if pools and set(pools) != set(range(count)):
        raise ReadError(f"/v1/loads has {len(pools)} of dp_size {count} ranks")
    stated = tokens(info.max_total_num_tokens, "max_total_num_tokens")
    sequence = info.context_length
    return [
        Rank(
            name=f"dp{number}",
            pool_tokens=_smallest(stated, state, pools.get(number)),
            page_size=tokens(info.page_size, "page_size"),
            request_max=tokens(info.max_req_input_len, "max_req_input_len"),
            sequence_max=None if sequence is None else tokens(sequence, "context_length"),
            reserved_tokens=(
                tokens(info.num_reserved_decode_tokens, "num_reserved_decode_tokens", 0)
                if role == "decode"
                else 0
            ),
        )
        for number, state in enumerate(info.internal_states)
    ]


def _smallest(stated: int, state: _State, loaded: int | None) -> int:
    """Three places state the pool of a rank. One that disagrees upwards is not believed."""
    memory = state.memory_usage
    capacity = None if memory is None else memory.token_capacity
    if capacity is not None:
        tokens(capacity, "token_capacity")
    return min(pool for pool in (stated, capacity, loaded) if pool is not None)


def _scope(info: ServerInfo, role: Role) -> PrefixScope:
    """Its radix cache knows no tenant; a decode node has none unless it is switched on."""
    used = info.disaggregation_decode_enable_radix_cache or not info.disable_radix_cache
    if role == "decode":
        used = info.disaggregation_decode_enable_radix_cache
    return "shared" if used else "off"
