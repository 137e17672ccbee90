"""Small random models in every supported architecture, and batches to run them on."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.engine.batch import Batch, Runner
from sekisho.engine.reference import ReferenceRunner
from sekisho.engine.spec import ModelSpec
from sekisho.engine.weights import ModelWeights

VOCAB = 251
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 180,  # no multiple of a vector: its tail is computed another way
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# Three bands: with this window some frequencies stay, some are divided, some lie between.
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name -> (architecture, what differs from _SHAPE)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True}),
    "glm4-no-bias": ("Glm4", {"head_dim": 64, "attention_bias": False}),
}


def random_model(name: str, seed: int = 7) -> Any:
    """An fp32 model of `MODELS` in ``transformers``, with weights large enough that a wrong norm,
    bias or rotation shows in the logits."""
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(_SHAPE | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def layout_of(spec: ModelSpec, element_size: int, page_size: int = 16) -> PageLayout:
    return PageLayout(
        page_size, spec.layer_count, spec.kv_head_count, spec.head_size, element_size, "test"
    )


def make_runner(
    kind: str, spec: ModelSpec, weights: ModelWeights, page_count: int
) -> tuple[Runner, NDArray[np.uint8], PageLayout]:
    """A runner, its region and layout. Every byte of the region is 0xFF, so that an element that
    was never written is NaN. Skips the test if the kernels can't be built here."""
    layout = layout_of(spec, weights.embedding.element_size())
    region = np.full(page_count * layout.page_bytes, 0xFF, np.uint8)
    if kind == "reference":
        return ReferenceRunner(spec, weights, region, layout, page_count), region, layout
    from sekisho.engine.kernels.build import KernelUnavailable
    from sekisho.engine.native import NativeRunner

    try:
        return NativeRunner(spec, weights, region, layout, page_count, 2), region, layout
    except KernelUnavailable as error:
        pytest.skip(str(error))


def headers(region: NDArray[np.uint8], layout: PageLayout) -> NDArray[np.uint8]:
    """The header bytes of every page, [pages, 64]."""
    return region.reshape(-1, layout.page_bytes)[:, :HEADER_SIZE]


def make_batch(parts: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> Batch:
    """A batch of (tokens, position of the first of them, table of the sequence), with logits of
    every row wanted."""
    rows = [len(tokens) for tokens, _, _ in parts]
    width = max(len(table) for _, _, table in parts)
    return Batch(
        tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens, _, _ in parts]),
        positions=np.concatenate(
            [np.arange(first, first + len(tokens), dtype=np.int32) for tokens, first, _ in parts]
        ),
        sequence_starts=np.cumsum([0, *rows], dtype=np.int32),
        tables=np.asarray(
            [[*table, *[-1] * (width - len(table))] for _, _, table in parts], np.int32
        ),
        logit_rows=np.arange(sum(rows), dtype=np.int32),
    )


def scattered_tables(
    lengths: Sequence[int], page_size: int, rng: np.random.Generator
) -> tuple[list[list[int]], int]:
    """Tables for sequences of these lengths over pages in random order, and the page count, with
    a few pages that belong to nobody."""
    counts = [-(-length // page_size) for length in lengths]
    order = rng.permutation(sum(counts) + 3).tolist()
    ends = np.cumsum([0, *counts])
    return [order[a:b] for a, b in itertools.pairwise(ends)], len(order)
