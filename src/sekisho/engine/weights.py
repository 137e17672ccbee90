"""Weights of a `ModelSpec`, fused for the runners, from safetensors (sharded too)."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sekisho.engine.spec import ModelError, ModelSpec, read_json

_DTYPES = ("F64", "F32", "F16", "BF16")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are [out, in] as in the checkpoint, fused along ``out``.

    qkv [(heads + 2 * kv_heads) * head_size, hidden] · qkv_bias [same rows] or None ·
    q_norm, k_norm [head_size] or None · o [hidden, heads * head_size] ·
    gate_up [2 * intermediate, hidden], gate first · down [hidden, intermediate] ·
    input_norm, mlp_norm (before the MLP) [hidden] ·
    attention_out_norm, mlp_out_norm [hidden] or None (GLM-4)
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    mlp_out_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding [vocab, hidden] · layers · final_norm [hidden] · lm_head [vocab, hidden], which
    is the embedding itself where the model ties them. Matrices in the serving dtype (bf16 or
    fp32), norms and biases in fp32."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: torch.Tensor


def load_weights(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Read ``model.safetensors``, or the shards of ``model.safetensors.index.json``.

    Every name and shape is checked before anything is read. Each tensor is copied once, from the
    mapped file to its place in the fused matrix, so that memory holds one copy and nothing later
    depends on the file. ``progress`` gets (layers done, layers in all).

    Raises:
        ModelError: files are missing or broken; a tensor is missing, surplus, of another shape,
            or not of a floating dtype. Names the tensor, and both shapes.
        ValueError: ``dtype`` is neither bfloat16 nor float32.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype {dtype} must be torch.bfloat16 or torch.float32")
    try:
        with ExitStack() as stack:
            files = {path: stack.enter_context(safe_open(path, "pt")) for path in _files(folder)}
            checkpoint = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
            _check_tensors(checkpoint, spec)
            return _read(checkpoint, spec, dtype, progress)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {folder}: {error}") from error


def _files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if not (folder / _INDEX).exists():
        raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / _INDEX} has no weight_map")
    paths = []
    for name in sorted({str(shard) for shard in weight_map.values()}):
        # A plain file name, so that an index can't make us open files elsewhere.
        if name != Path(name).name or "\\" in name or not name.endswith(".safetensors"):
            raise ModelError(f"{_INDEX}: shard name {name!r} is not a file of the folder")
        if not (folder / name).is_file():
            raise ModelError(f"{_INDEX}: shard {name} does not exist in {folder}")
        paths.append(folder / name)
    return paths


def _layer_shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of one layer, as ``transformers`` writes them."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.head_count * spec.head_size, spec.kv_head_count * spec.head_size
    prefix = f"model.layers.{layer}."
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if spec.qkv_bias:
        shapes["self_attn.q_proj.bias"] = (q_rows,)
        shapes["self_attn.k_proj.bias"] = (kv_rows,)
        shapes["self_attn.v_proj.bias"] = (kv_rows,)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = (spec.head_size,)
        shapes["self_attn.k_norm.weight"] = (spec.head_size,)
    if spec.sandwich_norm:
        shapes["post_self_attn_layernorm.weight"] = (hidden,)
        shapes["post_mlp_layernorm.weight"] = (hidden,)
        shapes["mlp.gate_up_proj.weight"] = (2 * inner, hidden)  # GLM-4 comes fused
    else:
        shapes["mlp.gate_proj.weight"] = (inner, hidden)
        shapes["mlp.up_proj.weight"] = (inner, hidden)
    return {prefix + name: shape for name, shape in shapes.items()}


def _check_tensors(checkpoint: dict[str, Any], spec: ModelSpec) -> None:
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        expected["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.layer_count):
        expected |= _layer_shapes(spec, layer)
    for name, shape in expected.items():
        if name not in checkpoint:
            raise ModelError(f"tensor {name}: expected shape {shape}, found none")
        tensor = checkpoint[name].get_slice(name)
        found = tuple(tensor.get_shape())
        if found != shape:
            raise ModelError(f"tensor {name}: expected shape {shape}, found {found}")
        if tensor.get_dtype() not in _DTYPES:
            raise ModelError(f"tensor {name}: dtype {tensor.get_dtype()} is not supported")
    for name in sorted(checkpoint.keys() - expected.keys()):
        # Old checkpoints carry the rope table; tied ones may carry the embedding a second time.
        if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight":
            continue
        found = tuple(checkpoint[name].get_slice(name).get_shape())
        raise ModelError(f"tensor {name}: expected none, found shape {found}")


def _read(
    checkpoint: dict[str, Any],
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None,
) -> ModelWeights:
    def fused(into: torch.dtype, names: list[str]) -> torch.Tensor:
        rows = [checkpoint[name].get_slice(name).get_shape()[0] for name in names]
        rest = checkpoint[names[0]].get_slice(names[0]).get_shape()[1:]
        whole = torch.empty(sum(rows), *rest, dtype=into)
        for name, part in zip(names, torch.split(whole, rows), strict=True):
            part.copy_(checkpoint[name].get_tensor(name))
        return whole

    embedding = fused(dtype, ["model.embed_tokens.weight"])
    layers = []
    for layer in range(spec.layer_count):
        layers.append(_read_layer(fused, spec, f"model.layers.{layer}.", dtype))
        if progress is not None:
            progress(layer + 1, spec.layer_count)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=fused(torch.float32, ["model.norm.weight"]),
        lm_head=embedding if spec.tied_embeddings else fused(dtype, ["lm_head.weight"]),
    )


def _read_layer(
    fused: Callable[[torch.dtype, list[str]], torch.Tensor],
    spec: ModelSpec,
    prefix: str,
    dtype: torch.dtype,
) -> LayerWeights:
    def matrix(*names: str) -> torch.Tensor:
        return fused(dtype, [f"{prefix}{name}.weight" for name in names])

    def vector(*names: str) -> torch.Tensor:
        return fused(torch.float32, [prefix + name for name in names])

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    sandwich = spec.sandwich_norm
    return LayerWeights(
        input_norm=vector("input_layernorm.weight"),
        qkv=matrix(*qkv),
        qkv_bias=vector(*(f"{name}.bias" for name in qkv)) if spec.qkv_bias else None,
        q_norm=vector("self_attn.q_norm.weight") if spec.qk_norm else None,
        k_norm=vector("self_attn.k_norm.weight") if spec.qk_norm else None,
        o=matrix("self_attn.o_proj"),
        attention_out_norm=vector("post_self_attn_layernorm.weight") if sandwich else None,
        mlp_norm=vector("post_attention_layernorm.weight"),
        gate_up=matrix("mlp.gate_up_proj") if sandwich else matrix("mlp.gate_proj", "mlp.up_proj"),
        down=matrix("mlp.down_proj"),
        mlp_out_norm=vector("post_mlp_layernorm.weight") if sandwich else None,
    )
