"""The forward pass on the native kernels."""

import numpy as np
import torch
from numpy.typing import NDArray

from sekisho.core.page import PageLayout
from sekisho.engine.batch import Batch, validate_batch
from sekisho.engine.kernels.binding import (
    ALIGNMENT,
    GROUP_MAX,
    LANES,
    Kernels,
    LayerStruct,
    ModelStruct,
    aligned_bytes,
    packed_bytes,
    pages_struct,
)
from sekisho.engine.spec import ModelSpec
from sekisho.engine.weights import LayerWeights, ModelWeights


class NativeRunner:
    """A `Runner` in C++: fp32 activations and sums, weights and pages in bf16 or fp32.

    Keeps packed copies of the matrices and, of ``weights``, the embedding; ``region`` is borrowed.
    Calls from several threads take turns.

    Args:
        region: uint8, ``page_count`` pages of ``layout``; the headers are never touched.
        threads: how many share a forward pass, the caller's included.
        variant: as for `Kernels`.

    Raises:
        KernelUnavailable: the kernels cannot run on this machine.
        ValueError: spec, weights, region and layout do not agree; or a shape has no kernel.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        region: NDArray[np.uint8],
        layout: PageLayout,
        page_count: int,
        threads: int,
        variant: str | None = None,
    ) -> None:
        _check_model(spec, weights, region, layout, page_count)
        self._kernels = Kernels(threads, variant)
        self.name = f"native-{self._kernels.variant}"
        self._spec = spec
        self._layout = layout
        self._page_count = page_count
        self._kept: list[object] = [region]
        self._arena = aligned_bytes(_arena_bytes(spec, weights.embedding.dtype))
        self._arena_used = 0
        self._model = self._build(weights, region)

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Write K and V of every row into its page, return fp32 logits [outputs, vocab].

        Raises:
            ValueError: a field of ``batch`` is out of range or malformed; nothing was written.
        """
        validate_batch(batch, self._spec.vocab_size, self._layout.page_size, self._page_count)
        return self._kernels.forward(self._model, batch)

    def _build(self, weights: ModelWeights, region: NDArray[np.uint8]) -> ModelStruct:
        spec = self._spec
        layers = (LayerStruct * spec.layer_count)(*[self._layer(w) for w in weights.layers])
        embedding = weights.embedding.detach().contiguous()
        self._kept += [layers, embedding]
        return ModelStruct(
            pages_struct(region, self._layout, spec.head_count),
            spec.hidden_size,
            spec.intermediate_size,
            spec.layer_count,
            spec.vocab_size,
            spec.rotary_dim,
            int(spec.rope_interleaved),
            spec.rms_norm_eps,
            spec.rope_attention_factor,
            self._vector(torch.from_numpy(spec.inv_freq)),
            embedding.data_ptr(),
            layers,
            self._vector(weights.final_norm),
            self._matrix(weights.lm_head),
        )

    def _layer(self, w: LayerWeights) -> LayerStruct:
        return LayerStruct(
            self._vector(w.input_norm),
            self._matrix(w.qkv),
            self._vector(w.qkv_bias),
            self._vector(w.q_norm),
            self._vector(w.k_norm),
            self._matrix(w.o),
            self._vector(w.attention_out_norm),
            self._vector(w.mlp_norm),
            self._gate_up(w.gate_up),
            self._matrix(w.down),
            self._vector(w.mlp_out_norm),
        )

    def _vector(self, vector: torch.Tensor | None) -> int | None:
        """Address of an fp32 copy, padded to whole lanes; None stays None."""
        if vector is None:
            return None
        padded = np.zeros(-(-len(vector) // LANES) * LANES, np.float32)
        padded[: len(vector)] = vector.detach().float().numpy()
        self._kept.append(padded)
        return int(padded.ctypes.data)

    def _take(self, size: int) -> NDArray[np.uint8]:
        room = self._arena[self._arena_used :][:size]
        self._arena_used += _aligned(size)
        return room

    def _matrix(self, matrix: torch.Tensor) -> int:
        rows, columns = matrix.shape
        room = self._take(packed_bytes(rows, columns, matrix.dtype))
        self._kernels.pack(matrix, room)
        return int(room.ctypes.data)

    def _gate_up(self, matrix: torch.Tensor) -> int:
        """Gate and up panel by panel in turn, so that one task has both halves of a column."""
        half, columns = self._spec.intermediate_size, self._spec.hidden_size
        size = packed_bytes(half, columns, matrix.dtype)
        room = self._take(2 * size)
        panel = LANES * columns * matrix.dtype.itemsize
        self._kernels.pack(matrix[:half], room, stride=2)
        self._kernels.pack(matrix[half:], room[panel:], stride=2)
        return int(room.ctypes.data)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _arena_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Room for every packed matrix of the model."""
    heads = spec.head_count * spec.head_size
    qkv = heads + 2 * spec.kv_head_count * spec.head_size
    half = -(-spec.intermediate_size // LANES) * LANES
    layer = (
        (qkv, spec.hidden_size),
        (spec.hidden_size, heads),
        (2 * half, spec.hidden_size),
        (spec.hidden_size, spec.intermediate_size),
    )
    matrices = (*layer * spec.layer_count, (spec.vocab_size, spec.hidden_size))
    return sum(_aligned(packed_bytes(rows, columns, dtype)) for rows, columns in matrices)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_model(
    spec: ModelSpec,
    weights: ModelWeights,
    region: NDArray[np.uint8],
    layout: PageLayout,
    page_count: int,
) -> None:
    """C++ reads through these sizes, so each is compared with what is there."""
    dtype = weights.embedding.dtype
    _check(dtype in {torch.float32, torch.bfloat16}, f"weights: {dtype} is not fp32 or bf16")
    _check(spec.head_size % LANES == 0, f"head_size {spec.head_size} must be a multiple of 16")
    _check(spec.head_count % spec.kv_head_count == 0, "head_count must be whole groups of kv heads")
    _check(spec.head_count <= GROUP_MAX * spec.kv_head_count, f"groups are above {GROUP_MAX}")
    _check(
        spec.rotary_dim % 2 == 0 and spec.rotary_dim <= spec.head_size,
        f"rotary_dim {spec.rotary_dim} must be even and within the head",
    )
    _check(spec.inv_freq.shape == (spec.rotary_dim // 2,), "inv_freq: wrong shape")
    expected = (spec.layer_count, spec.kv_head_count, spec.head_size, dtype.itemsize)
    found = (layout.layer_count, layout.kv_head_count, layout.head_size, layout.element_size)
    _check(expected == found, f"layout: {found} is not the model's {expected}")
    _check(
        region.dtype == np.uint8 and region.flags.c_contiguous and region.flags.writeable,
        "region: must be uint8, contiguous and writable",
    )
    _check(region.nbytes >= page_count * layout.page_bytes, "region: smaller than its pages")
    _check(len(weights.layers) == spec.layer_count, "weights: wrong number of layers")
    hidden, vocab = spec.hidden_size, spec.vocab_size
    _check_tensor("embedding", weights.embedding, (vocab, hidden), dtype)
    _check_tensor("lm_head", weights.lm_head, (vocab, hidden), dtype)
    _check_tensor("final_norm", weights.final_norm, (hidden,), None)
    for layer in weights.layers:
        _check_layer(spec, layer, dtype)


def _check_layer(spec: ModelSpec, w: LayerWeights, dtype: torch.dtype) -> None:
    hidden, heads = spec.hidden_size, spec.head_count * spec.head_size
    qkv = heads + 2 * spec.kv_head_count * spec.head_size
    _check_tensor("qkv", w.qkv, (qkv, hidden), dtype)
    _check_tensor("o", w.o, (hidden, heads), dtype)
    _check_tensor("gate_up", w.gate_up, (2 * spec.intermediate_size, hidden), dtype)
    _check_tensor("down", w.down, (hidden, spec.intermediate_size), dtype)
    for name, size, present in (
        ("input_norm", hidden, True),
        ("mlp_norm", hidden, True),
        ("qkv_bias", qkv, spec.qkv_bias),
        ("q_norm", spec.head_size, spec.qk_norm),
        ("k_norm", spec.head_size, spec.qk_norm),
        ("attention_out_norm", hidden, spec.sandwich_norm),
        ("mlp_out_norm", hidden, spec.sandwich_norm),
    ):
        vector = getattr(w, name)
        _check((vector is not None) == present, f"{name}: spec and weights disagree")
        if vector is not None:
            _check_tensor(name, vector, (size,), None)


def _check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    _check(tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)} is not {shape}")
    _check(dtype is None or tensor.dtype == dtype, f"{name}: {tensor.dtype} is not {dtype}")
    _check(tensor.device.type == "cpu", f"{name}: must be on the CPU")
