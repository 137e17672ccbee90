"""vLLM: ``/metrics`` for the pool, ``/v1/models`` for the limit, ``/version``.

``vllm:cache_config_info`` is one sample for each engine (data-parallel rank):
``num_gpu_blocks`` blocks of ``block_size`` tokens, of which one, the null block, is never given to
a request (vllm PR#47272). With several KV cache groups a request needs blocks of each, so that the
product is too high; ``kv_cache_size_tokens`` (newer versions) counts groups in (vllm#54662), and
the smaller of the two is believed.

The role of a node behind a KV connector is not visible there; it has to be named.
"""

import re

import msgspec

from sekisho.gate.fetch import MissingError, clip
from sekisho.gate.model import PrefixScope, Rank, ReadError, Reading
from sekisho.gate.readers.base import (
    Ask,
    ModelEntry,
    advertised,
    all_of,
    decode,
    models,
    tokens,
    whole,
)
from sekisho.gate.readers.prometheus import samples

_INFO = "vllm:cache_config_info"
_ENGINE = re.compile(r'^vllm:[a-z_:]+\{(?:[^}]*,)?engine="(\d{1,9})"', re.MULTILINE)
_MODEL = re.compile(r'^vllm:[a-z_:]+\{(?:[^}]*,)?model_name="([^"\\]{1,200})"', re.MULTILINE)


class _Version(msgspec.Struct):
    version: str


async def read(ask: Ask) -> Reading:
    """Ask all three at once; only ``/version`` may be missing.

    Raises:
        ReadError: an engine without its pool, or a number that is none.
    """
    body, listed, version = await all_of(ask.get("/metrics"), models(ask.get), _version(ask))
    return _reading(ask, body, listed, version)


def read_file(ask: Ask, body: bytes) -> Reading:
    """From ``/metrics`` saved to a file: pool and model, but neither limit nor version.

    Raises:
        ReadError: as `read`.
    """
    return _reading(ask, body, [], "")


async def _version(ask: Ask) -> str:
    try:
        return decode(await ask.get("/version"), _Version, "/version").version
    except MissingError:
        return ""


def _reading(ask: Ask, body: bytes, listed: list[ModelEntry], version: str) -> Reading:
    found = [sample.labels for sample in samples(body, _INFO)]
    if not found:
        raise ReadError(f"/metrics has no {_INFO}")
    text = body.decode()
    window = advertised(listed)
    ranks = [_rank(labels, window) for labels in found]
    # A text that lost lines must not lose ranks: every engine that counts anything has a pool.
    silent = set(_ENGINE.findall(text)) - {labels.get("engine", "0") for labels in found}
    if silent:
        raise ReadError(f"/metrics has no pool for engine {', '.join(sorted(silent)[:8])}")
    name = _MODEL.search(text)
    return Reading(
        source=ask.source,
        engine="vllm",
        version=clip(version, 60),
        role=ask.role or "both",
        model=clip(listed[0].id if listed else name[1] if name else ""),
        ranks=ranks,
        advertised=window,
        prefix_scope=_scope(found),
    )


def _rank(labels: dict[str, str], window: int | None) -> Rank:
    block = tokens(whole(labels.get("block_size", ""), "block_size"), "block_size")
    blocks = whole(labels.get("num_gpu_blocks", ""), "num_gpu_blocks")
    pool = tokens(blocks * block, "num_gpu_blocks x block_size")
    stated = labels.get("kv_cache_size_tokens", "None")
    if stated != "None":
        size = whole(stated, "kv_cache_size_tokens")
        pool = min(pool, tokens(size, "kv_cache_size_tokens"))
    return Rank(
        name=f"engine {clip(labels.get('engine', '0'), 20)}",
        pool_tokens=pool,
        page_size=block,
        sequence_max=window,
        reserved_tokens=block,
    )


def _scope(found: list[dict[str, str]]) -> PrefixScope:
    """Shared, as a salt is each request's own choice and no boundary (vllm#53347)."""
    stated = {labels.get("enable_prefix_caching") for labels in found}
    if "True" in stated:
        return "shared"
    return "off" if stated == {"False"} else "unknown"
