"""What a model is, read from the ``config.json`` of a Hugging Face folder.

Supported: LlamaForCausalLM (SmolLM2, Llama 3), MistralForCausalLM, Qwen2ForCausalLM,
Qwen3ForCausalLM, Glm4ForCausalLM (dense GLM-4-0414). Whatever would change the meaning and is not
supported refuses the folder: a model that answers wrongly is worse than none. The meaning of every
field, and of one left out, is that of ``transformers`` 5.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray


class ModelError(Exception):
    """A model folder is missing, broken, or holds a model that is not supported; one line."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """A dense decoder-only transformer of the Llama family.

    ``inv_freq`` is fp32 [rotary_dim / 2], any scaling (Llama 3) already applied, and
    ``rope_interleaved`` says whether rotated pairs are (2i, 2i+1), as GLM-4 has them, or
    (i, i + rotary_dim/2), as the others do. ``sandwich_norm`` adds GLM-4's norms after attention
    and after the MLP, before each is added to the residual. ``context_size`` is the window in
    tokens that the model was made for.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    vocab_size: int
    rms_norm_eps: float
    context_size: int
    rotary_dim: int
    rope_interleaved: bool
    inv_freq: NDArray[np.float32]
    rope_attention_factor: float
    qkv_bias: bool
    qk_norm: bool
    sandwich_norm: bool
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]


_ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Glm4ForCausalLM",
)
# Fields that change what is computed, with the values under which they don't.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (None, False),
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_ROPE_FIELDS: Final = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
}


def load_spec(folder: Path) -> ModelSpec:
    """Read ``config.json``, and ``generation_config.json`` where there is one, in ``folder``.

    Where the model attends through a sliding window, ``context_size`` is no more than that
    window: within it a sliding window is full attention, and beyond it no request is started.

    Raises:
        ModelError: the folder or file is missing or broken, or the model is not supported; names
            the field and its value.
    """
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist")
    config = _Fields(read_json(folder / "config.json"))
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    glm4 = architecture == "Glm4ForCausalLM"
    hidden_size = config.integer("hidden_size")
    head_count = config.integer("num_attention_heads")
    kv_head_count = _kv_head_count(config, architecture, head_count)
    head_size = _head_size(config, architecture, hidden_size, head_count)
    inv_freq = _inv_freq(config, head_size, glm4)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        layer_count=config.integer("num_hidden_layers"),
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_size=head_size,
        vocab_size=config.integer("vocab_size"),
        rms_norm_eps=config.number("rms_norm_eps"),
        context_size=_context_size(config, architecture),
        rotary_dim=2 * len(inv_freq),
        rope_interleaved=glm4,
        inv_freq=inv_freq,
        rope_attention_factor=1.0,  # only rope types that are refused here have another
        qkv_bias=architecture == "Qwen2ForCausalLM"
        or (glm4 and config.flag("attention_bias", True)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sandwich_norm=glm4,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ModelError: the file is missing or unreadable, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


class _Fields:
    """Typed access to a JSON object; a bad value is a `ModelError` that names its field."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self._prefix = prefix

    def refuse(self, name: str, why: str) -> ModelError:
        return ModelError(f"config.json: {self._prefix}{name} is {self.values.get(name)!r}: {why}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; null counts as left out."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refuse(name, "must be a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; null counts as left out."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, "must be a number")
        if not 0 < value < math.inf:
            raise self.refuse(name, "must be a finite number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise self.refuse(name, "must be true or false")
        return value


def _architecture(config: _Fields) -> str:
    names = config.values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in _ARCHITECTURES:
        return str(names[0])
    raise config.refuse("architectures", f"supported are {', '.join(_ARCHITECTURES)}")


def _refuse_unsupported(config: _Fields, architecture: str) -> None:
    for name, neutral in _NEUTRAL.items():
        if config.values.get(name, neutral[0]) not in neutral:
            raise config.refuse(name, "not supported")
    # In these two the field adds a bias to the output projection as well; Qwen2 and GLM-4 have
    # one on q, k and v only, and Mistral knows no such field.
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and config.flag(
        "attention_bias", False
    ):
        raise config.refuse("attention_bias", f"not supported for {architecture}")
    kinds = config.values.get("layer_types")
    supported = ("full_attention", "sliding_attention")
    if kinds is not None and not (
        isinstance(kinds, list) and all(kind in supported for kind in kinds)
    ):
        raise config.refuse("layer_types", "not supported")


def _kv_head_count(config: _Fields, architecture: str, head_count: int) -> int:
    # Llama checkpoints older than grouped heads leave the field out.
    default = head_count if architecture == "LlamaForCausalLM" else None
    count = config.integer("num_key_value_heads", default)
    if head_count % count:
        raise config.refuse("num_key_value_heads", f"must divide the {head_count} heads")
    return count


def _head_size(config: _Fields, architecture: str, hidden_size: int, head_count: int) -> int:
    if architecture in ("Qwen3ForCausalLM", "Glm4ForCausalLM"):
        return config.integer("head_dim", 128)
    if config.values.get("head_dim") is None and hidden_size % head_count:
        raise config.refuse("hidden_size", f"must be a multiple of the {head_count} heads")
    return config.integer("head_dim", hidden_size // head_count)


def _context_size(config: _Fields, architecture: str) -> int:
    size = config.integer("max_position_embeddings")
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        kinds = config.values.get("layer_types") or ["sliding_attention"]
        slides = config.flag("use_sliding_window", False) and "sliding_attention" in kinds
    else:
        # Left out, it means 4096 for Mistral; null means none for every architecture.
        default = 4096 if architecture == "MistralForCausalLM" else None
        slides = config.values.get("sliding_window", default) is not None
    return min(size, config.integer("sliding_window", 4096)) if slides else size


def _inv_freq(config: _Fields, head_size: int, glm4: bool) -> NDArray[np.float32]:
    """Inverse frequencies fp32 [rotary_dim / 2]: Su et al., "RoFormer"; linear scaling as in
    "Extending context window via position interpolation"; llama3 as in Meta's Llama 3.1 code.

    Computed by torch, in the order of ``transformers``: at position 100,000 an ulp more or less
    here is a different angle.
    """
    rope = _rope_fields(config)
    base = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    partial = rope.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", 0.5 if glm4 else 1.0)
    )
    rotary_dim = int(head_size * partial)
    if rotary_dim % 2 or not (0 < rotary_dim <= head_size if glm4 else rotary_dim == head_size):
        raise ModelError(
            f"config.json: partial_rotary_factor is {partial:g}, head_dim {head_size}: "
            "not supported for this architecture"
        )
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = 1.0 / (base**exponent)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "linear":
        inv_freq = inv_freq / rope.number("factor")
    elif kind == "llama3":
        inv_freq = _llama3_scaled(inv_freq, config, rope)
    elif kind != "default":
        raise rope.refuse("rope_type", f"{kind!r} is not one of default, linear, llama3")
    scaled: NDArray[np.float32] = inv_freq.numpy()
    return scaled


def _rope_fields(config: _Fields) -> _Fields:
    """``rope_parameters`` (transformers 5) or ``rope_scaling`` (before it)."""
    for name in ("rope_scaling", "rope_parameters"):
        values = config.values.get(name)
        if values is None or values == {}:
            continue
        if not isinstance(values, dict):
            raise config.refuse(name, "must be an object")
        rope = _Fields(values, f"{name}.")
        for field, value in values.items():
            if field not in _ROPE_FIELDS and value is not None:
                raise rope.refuse(field, "not supported")
        return rope
    return _Fields({}, "rope_parameters.")


def _llama3_scaled(inv_freq: torch.Tensor, config: _Fields, rope: _Fields) -> torch.Tensor:
    factor = rope.number("factor")
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    if high <= low:
        raise rope.refuse("high_freq_factor", f"must be above low_freq_factor {low:g}")
    window = config.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", config.integer("max_position_embeddings")),
    )
    wavelength = 2 * math.pi / inv_freq
    smooth = (window / wavelength - low) / (high - low)
    medium = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength < window / high, inv_freq, medium)
    return torch.where(wavelength > window / low, inv_freq / factor, scaled)


def _eos_token_ids(folder: Path, config: _Fields) -> tuple[int, ...]:
    """Of ``generation_config.json`` if it names any, else of ``config.json``; perhaps none."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    value = generation.get("eos_token_id")
    value = config.values.get("eos_token_id") if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(f"eos_token_id is {value!r}: must be token ids")
    return tuple(ids)
