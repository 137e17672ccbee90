"""Small random models and pools of scattered pages for the runners' tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sekisho.core.page import PageLayout
from sekisho.engine.batch import Batch, Runner
from sekisho.engine.native import NativeRunner
from sekisho.engine.reference import ReferenceRunner
from sekisho.engine.spec import ModelSpec
from sekisho.engine.weights import LayerWeights, ModelWeights

VOCAB = 83  # not a multiple of 16


@dataclass(frozen=True)
class Shape:
    """What a random model looks like; the default is a small Llama."""

    dtype: torch.dtype = torch.float32
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    hidden: int = 40
    intermediate: int = 72
    rotary_dim: int = 16
    interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norm: bool = False
    tied: bool = True
    page_size: int = 16
    rope_factor: float = 1.0


# One of each architecture, with what sets it apart from the others.
MODELS = {
    "llama": Shape(),
    "llama-bf16": Shape(dtype=torch.bfloat16),
    "qwen2": Shape(qkv_bias=True, heads=6, kv_heads=2, intermediate=70),
    "qwen3-bf16": Shape(dtype=torch.bfloat16, qk_norm=True, tied=False, head_size=32, hidden=48),
    "glm4": Shape(
        heads=8, kv_heads=1, rotary_dim=8, interleaved=True, sandwich_norm=True, qkv_bias=True
    ),
    "glm4-bf16": Shape(
        dtype=torch.bfloat16, rotary_dim=8, interleaved=True, sandwich_norm=True, page_size=32
    ),
    "scaled-rope": Shape(rope_factor=1.2, heads=3, kv_heads=3, hidden=33, page_size=32),
}


def random_model(shape: Shape, layers: int = 2) -> tuple[ModelSpec, ModelWeights]:
    """A model whose activations stay near 1; the same for equal arguments."""
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator)
        return values.mul(columns**-0.5).to(shape.dtype)

    def vector(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    def layer() -> LayerWeights:
        qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        return LayerWeights(
            input_norm=vector(shape.hidden),
            qkv=matrix(qkv_rows, shape.hidden) * 2,
            qkv_bias=vector(qkv_rows) if shape.qkv_bias else None,
            q_norm=vector(shape.head_size) if shape.qk_norm else None,
            k_norm=vector(shape.head_size) if shape.qk_norm else None,
            o=matrix(shape.hidden, shape.heads * shape.head_size),
            attention_out_norm=vector(shape.hidden) if shape.sandwich_norm else None,
            mlp_norm=vector(shape.hidden),
            gate_up=matrix(2 * shape.intermediate, shape.hidden),
            down=matrix(shape.hidden, shape.intermediate),
            mlp_out_norm=vector(shape.hidden) if shape.sandwich_norm else None,
        )

    half = np.arange(0, shape.rotary_dim, 2) / shape.rotary_dim
    spec = ModelSpec(
        architecture="llama",
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        layer_count=layers,
        head_count=shape.heads,
        kv_head_count=shape.kv_heads,
        head_size=shape.head_size,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        context_size=4096,
        rotary_dim=shape.rotary_dim,
        rope_interleaved=shape.interleaved,
        inv_freq=(1 / 10000**half).astype(np.float32),
        rope_attention_factor=shape.rope_factor,
        qkv_bias=shape.qkv_bias,
        qk_norm=shape.qk_norm,
        sandwich_norm=shape.sandwich_norm,
        tied_embeddings=shape.tied,
        eos_token_ids=(0,),
    )
    embedding = matrix(VOCAB, shape.hidden) * 5
    return spec, ModelWeights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(layers)),
        final_norm=vector(shape.hidden),
        lm_head=embedding if shape.tied else matrix(VOCAB, shape.hidden),
    )


class Pool:
    """A region of pages, filled with one byte, that a runner works on; ``page_count`` pages of
    which each sequence of ``lengths`` (in tokens) owns enough, scattered."""

    def __init__(
        self, shape: Shape, lengths: Sequence[int], fill: int = 0, layers: int = 2
    ) -> None:
        self.spec, self.weights = random_model(shape, layers)
        self.layout = PageLayout(
            shape.page_size,
            layers,
            shape.kv_heads,
            shape.head_size,
            shape.dtype.itemsize,
            "random",
        )
        rng = np.random.default_rng(11)
        counts = [self.layout.pages_for(length) for length in lengths]
        self.page_count = sum(counts) + 3
        self.region = np.full(self.page_count * self.layout.page_bytes, fill, np.uint8)
        self.tokens = [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
        pages = rng.permutation(self.page_count)
        self.tables: list[NDArray[np.int32]] = []
        for count in counts:
            self.tables.append(pages[:count].astype(np.int32))
            pages = pages[count:]

    def native(self, threads: int = 1, variant: str | None = None) -> NativeRunner:
        """A native runner on this pool."""
        return NativeRunner(
            self.spec,
            self.weights,
            self.region,
            self.layout,
            self.page_count,
            threads,
            variant=variant,
        )

    def reference(self) -> ReferenceRunner:
        """A reference runner on this pool."""
        return ReferenceRunner(self.spec, self.weights, self.region, self.layout, self.page_count)

    def batch(
        self, parts: Sequence[tuple[int, int, int]], wanted: Sequence[int] | None = None
    ) -> Batch:
        """Rows ``start..end`` of each ``(sequence, start, end)``; all logits unless ``wanted``."""
        starts = np.cumsum([0] + [end - start for _, start, end in parts]).astype(np.int32)
        tables = np.full((len(parts), max(map(len, self.tables))), -1, np.int32)
        for row, (sequence, _, end) in zip(tables, parts, strict=True):
            used = self.layout.pages_for(end)
            row[:used] = self.tables[sequence][:used]
        rows = range(starts[-1]) if wanted is None else wanted
        return Batch(
            tokens=np.concatenate([self.tokens[s][start:end] for s, start, end in parts]),
            positions=np.concatenate(
                [np.arange(start, end, dtype=np.int32) for _, start, end in parts]
            ),
            sequence_starts=starts,
            tables=tables,
            logit_rows=np.asarray(rows, np.int32),
        )

    def run(
        self, runner: Runner, steps: Sequence[Sequence[tuple[int, int, int]]]
    ) -> dict[int, NDArray[np.float32]]:
        """Run one batch a step; the logits of every row so computed, by sequence, in order."""
        parts: dict[int, list[NDArray[np.float32]]] = {}
        for step in steps:
            batch = self.batch(step)
            logits = runner.forward(batch)
            for index, (sequence, _, _) in enumerate(step):
                low, high = batch.sequence_starts[index : index + 2]
                parts.setdefault(sequence, []).append(logits[low:high])
        return {sequence: np.concatenate(logits) for sequence, logits in parts.items()}
