"""Weights of a `ModelSpec`, fused for the runners, from safetensors (sharded too)."""

from dataclasses import dataclass

import torch


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
    fp32), norms in fp32."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: torch.Tensor
