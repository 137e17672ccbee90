"""Bytes of KV cache per token, from a model's ``config.json``.

Formulae, with B the bytes of an element, as vLLM (``vllm/v1/kv_cache_interface.py``,
``real_page_size_bytes``) and SGLang (``python/sglang/srt/mem_cache/memory_pool.py``) have them:

- heads: ``layers * 2 * kv_heads_per_rank * head_size * B`` (a key and a value);
- MLA: ``layers * (kv_lora_rank + qk_rope_head_dim) * B``, one latent for all heads, so that every
  rank keeps all of it;
- MLA with a sparse indexer: ``layers * (index_head_dim + 4 * index_head_dim / 128)`` more, one byte
  an element and a float scale for 128 of them. Its fp8 latent is ``kv_lora_rank + 4 *
  kv_lora_rank / 128`` bytes and ``qk_rope_head_dim`` of two bytes: 656 for the usual sizes.

A layer with a sliding window counts like any other, as with the hybrid allocator off: never more
room than there is. Draft (multi-token prediction) layers are not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sekisho.gate.model import ClaimError

Kind = Literal["heads", "latent", "latent and index"]

FAMILIES: dict[str, Kind] = {
    "llama": "heads",
    "mistral": "heads",
    "mixtral": "heads",
    "qwen2": "heads",
    "qwen2_moe": "heads",
    "qwen3": "heads",
    "qwen3_moe": "heads",
    "glm": "heads",
    "glm4": "heads",
    "glm4_moe": "heads",
    "glm4_moe_lite": "latent",
    "glm_moe_dsa": "latent and index",
    "deepseek_v2": "latent",
    "deepseek_v3": "latent",
    "deepseek_v32": "latent and index",
}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_LARGEST = 2**24
_SCALED_TOGETHER = 128


@dataclass(frozen=True, kw_only=True)
class KvShape:
    """What one token takes on one rank.

    Attributes:
        dtype: of an element, a key of `_BYTES`.
        bytes_per_token: over all layers, on each rank.
        formula: with the numbers in it.
        notes: what the number counts conservatively, or leaves out.
    """

    family: str
    layers: int
    dtype: str
    bytes_per_token: int
    formula: str
    notes: tuple[str, ...]


def kv_shape(config: Mapping[str, Any], ranks: int, dtype: str = "auto") -> KvShape:
    """The shape of ``config`` over ``ranks`` tensor-parallel ranks.

    ``dtype`` ``auto``: the model's own.

    Raises:
        ClaimError: the family is not known, or a field is missing or impossible; it is named.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ClaimError(f"model_type: {family!r} is not one of {', '.join(sorted(FAMILIES))}")
    kind = FAMILIES[family]
    layers = _whole(config, "num_hidden_layers")
    name, size = _element(config, dtype)
    notes = []
    if kind == "heads":
        per_layer, formula = _heads(config, ranks, size)
        slides = config.get("use_sliding_window", True) is not False
        if config.get("sliding_window") and slides:
            notes.append("layers with a sliding window are counted as full ones")
    else:
        per_layer, formula = _latent(config, size, kind == "latent and index")
        notes.append("a latent is not divided over ranks: each keeps all of it")
    if config.get("num_nextn_predict_layers"):
        notes.append("layers of multi-token prediction are not counted")
    return KvShape(
        family=family,
        layers=layers,
        dtype=name,
        bytes_per_token=layers * per_layer,
        formula=f"{layers} layers x {formula}",
        notes=tuple(notes),
    )


def _heads(config: Mapping[str, Any], ranks: int, size: int) -> tuple[int, str]:
    heads = _whole(config, "num_attention_heads")
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _whole(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ClaimError(f"num_key_value_heads: {kv_heads} does not divide {heads} heads")
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ClaimError(f"num_key_value_heads: {kv_heads} of {heads} heads on {ranks} ranks")
    if config.get("head_dim") is not None:
        head_size = _whole(config, "head_dim")
    else:
        head_size, rest = divmod(_whole(config, "hidden_size"), heads)
        if rest or not head_size:
            raise ClaimError("head_dim: missing, and hidden_size is no multiple of the heads")
    # With more ranks than KV heads each head is kept more than once.
    own = max(1, kv_heads // ranks)
    return 2 * own * head_size * size, f"2 x {own} KV heads x {head_size} x {size} B"


def _latent(config: Mapping[str, Any], size: int, indexed: bool) -> tuple[int, str]:
    rank, rope = _whole(config, "kv_lora_rank"), _whole(config, "qk_rope_head_dim")
    if not indexed:
        return (rank + rope) * size, f"({rank} + {rope}) x {size} B"
    index_size = _whole(config, "index_head_dim")
    for name, value in (("kv_lora_rank", rank), ("index_head_dim", index_size)):
        if value % _SCALED_TOGETHER:
            raise ClaimError(f"{name}: {value} is no multiple of {_SCALED_TOGETHER}")
    index = index_size + index_size // _SCALED_TOGETHER * 4
    if size == 1:
        latent = rank + rank // _SCALED_TOGETHER * 4 + 2 * rope
        return latent + index, f"({latent} + {index}) B"
    return (rank + rope) * size + index, f"(({rank} + {rope}) x {size} + {index}) B"


def _element(config: Mapping[str, Any], dtype: str) -> tuple[str, int]:
    name: object = dtype
    if dtype == "auto":
        name = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(name, str) or name not in _BYTES:
        field = "torch_dtype" if dtype == "auto" else "--dtype"
        raise ClaimError(f"{field}: {name!r} is not one of {', '.join(_BYTES)}")
    return name, _BYTES[name]


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
        raise ClaimError(f"{name}: {value!r} is no whole number from 1 to {_LARGEST}")
    return value
