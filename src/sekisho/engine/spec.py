"""What a model is, read from the ``config.json`` of a Hugging Face folder."""

from dataclasses import dataclass

import numpy as np
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
