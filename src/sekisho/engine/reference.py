"""The model in plain torch: what the native kernels are tested against, and what serves where
there is no compiler.

The bits of a row depend on its own sequence alone. Two rules make that so:

* a matrix product always has the same number of rows (`BLOCK_ROWS`, the last block padded):
  with one fixed shape torch does the same arithmetic for a row, whatever stands in the others;
* everything else is either exact elementwise arithmetic, or is done for one row at a time, on
  tensors whose shape depends on that row's position only.

Activations are fp32. Matrices in bf16 are copied to fp32 once, when the runner is made: that is
4 bytes a weight on top of the 2, and it is three times as fast as converting at every step.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from numpy.typing import NDArray

from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.engine.batch import Batch, validate_batch
from sekisho.engine.spec import ModelSpec
from sekisho.engine.weights import LayerWeights, ModelWeights

BLOCK_ROWS = 16
_PAGE_DTYPES = {2: torch.bfloat16, 4: torch.float32}


class ReferenceRunner:
    """A `Runner` over the pages in ``region``, uint8 [page_count * page_bytes].

    On ``device="cpu"`` K and V live in ``region`` itself. On another device (untested here) they
    live in a tensor of that device, [page_count, payload elements], and ``region`` carries the
    headers only: nothing can then be sent to another node, so only a colocated node can use it.

    Raises:
        ValueError: the layout is not that of the model, or ``region`` is too small.
    """

    name = "reference"

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        region: NDArray[np.uint8],
        layout: PageLayout,
        page_count: int,
        device: str = "cpu",
    ) -> None:
        _check_layout(spec, layout, region, page_count)
        self._spec = spec
        self._layout = layout
        self._page_count = page_count
        self._device = torch.device(device)
        self._keys, self._values = self._page_views(region)
        self._embedding = self._on_device(weights.embedding)
        tied = weights.lm_head is weights.embedding
        self._lm_head = self._embedding if tied else self._on_device(weights.lm_head)
        self._final_norm = self._on_device(weights.final_norm)
        self._layers = tuple(self._layer_on_device(layer) for layer in weights.layers)
        self._inv_freq = torch.from_numpy(spec.inv_freq).to(self._device)
        first = self._layers[0]
        matrices = (first.qkv, first.o, first.gate_up, first.down, self._lm_head)
        fixed = all(_block_is_row_independent(matrix) for matrix in matrices)
        self._block_rows = BLOCK_ROWS if fixed else 1

    @torch.inference_mode()
    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """See `Runner.forward`.

        Raises:
            ValueError: a field of the batch is out of range; nothing was written.
        """
        validate_batch(batch, self._spec.vocab_size, self._layout.page_size, self._page_count)
        rows = _Rows(batch, self._layout.page_size, self._device)
        cos, sin = self._rope_angles(batch.positions)
        hidden = self._embedding[torch.from_numpy(batch.tokens).long().to(self._device)]
        for index, layer in enumerate(self._layers):
            hidden = self._attention_block(index, layer, hidden, rows, cos, sin)
            hidden = self._mlp_block(layer, hidden)
        if len(batch.logit_rows) == 0:
            return np.empty((0, self._spec.vocab_size), np.float32)
        wanted = hidden[torch.from_numpy(batch.logit_rows).long().to(self._device)]
        logits = self._product(self._norm(wanted, self._final_norm), self._lm_head)
        result: NDArray[np.float32] = logits.cpu().numpy()
        return result

    def _attention_block(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        rows: "_Rows",
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        spec = self._spec
        qkv = self._product(self._norm(hidden, layer.input_norm), layer.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        heads = qkv.view(len(qkv), spec.head_count + 2 * spec.kv_head_count, spec.head_size)
        counts = [spec.head_count, spec.kv_head_count, spec.kv_head_count]
        query, key, value = torch.split(heads, counts, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = self._norm(query, layer.q_norm)
            key = self._norm(key, layer.k_norm)
        query, key = self._rotate(query, cos, sin), self._rotate(key, cos, sin)
        # All rows are written before any reads; a row reads no further than its own position.
        self._keys[:, index][rows.pages, :, :, rows.slots] = key.to(self._keys.dtype)
        self._values[:, index][rows.pages, :, rows.slots] = value.to(self._values.dtype)
        attended = torch.stack(
            [
                self._attend(index, query[row], table, position)
                for row, (table, position) in enumerate(rows.reads)
            ]
        )
        out = self._product(attended.view(len(qkv), -1), layer.o)
        if layer.attention_out_norm is not None:
            out = self._norm(out, layer.attention_out_norm)
        return hidden + out

    def _attend(
        self, index: int, query: torch.Tensor, table: torch.Tensor, position: int
    ) -> torch.Tensor:
        """Attention of one row over positions 0 to ``position``: [heads, head_size].

        ``table`` holds the pages of those positions. Slots beyond ``position`` are replaced, not
        multiplied by zero: they may hold anything, NaN included.
        """
        kv_heads, size = self._spec.kv_head_count, self._spec.head_size
        keys = self._keys[table, index].float()  # [pages, kv_head, head_size, page_size]
        values = self._values[table, index].float()  # [pages, kv_head, page_size, head_size]
        slots = len(table) * self._layout.page_size
        keys = keys.permute(1, 2, 0, 3).reshape(kv_heads, size, slots)
        values = values.transpose(0, 1).reshape(kv_heads, slots, size)
        live = torch.arange(slots, device=self._device) <= position
        grouped = query.reshape(kv_heads, -1, size) * size**-0.5
        scores = torch.where(live, grouped @ keys, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        attended = weights @ torch.where(live[:, None], values, 0.0)
        return attended.view(-1, size)

    def _mlp_block(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self._product(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=1)
        # A vector exp and the scalar one used at a tensor's end differ in bits: row by row, then.
        activated = _per_row(F.silu, gate) * up
        out = self._product(activated, layer.down)
        if layer.mlp_out_norm is not None:
            out = self._norm(out, layer.mlp_out_norm)
        return hidden + out

    def _product(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """``rows @ matrix.T``, in blocks of one fixed number of rows."""
        out = rows.new_empty(len(rows), len(matrix))
        for start in range(0, len(rows), self._block_rows):
            part = rows[start : start + self._block_rows]
            block = rows.new_zeros(self._block_rows, rows.shape[1])
            block[: len(part)] = part
            out[start : start + len(part)] = F.linear(block, matrix)[: len(part)]
        return out

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension (Zhang and Sennrich, 2019)."""
        square_mean = _per_row(lambda row: row.square().mean(-1, keepdim=True), rows)
        # rsqrt is an estimate plus a step on some machines; sqrt and division are exact.
        return weight * (rows / torch.sqrt(square_mean + self._spec.rms_norm_eps))

    def _rope_angles(self, positions: NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every row, each [rows, 1, rotary_dim / 2]."""
        angles = torch.from_numpy(positions).to(self._device).float()[:, None] * self._inv_freq
        factor = self._spec.rope_attention_factor
        cos = _per_row(torch.cos, angles) * factor
        sin = _per_row(torch.sin, angles) * factor
        return cos[:, None], sin[:, None]

    def _rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of [rows, heads, head_size], which rotates the first rotary_dim."""
        dim = self._spec.rotary_dim
        rotated = heads.clone()
        if self._spec.rope_interleaved:
            first, second = rotated[..., 0:dim:2], rotated[..., 1:dim:2]
        else:
            first, second = rotated[..., : dim // 2], rotated[..., dim // 2 : dim]
        turned = first * cos - second * sin, second * cos + first * sin
        first.copy_(turned[0])
        second.copy_(turned[1])
        return rotated

    def _page_views(self, region: NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
        """K [pages, layers, kv_head, head_size, page_size] and V [..., page_size, head_size]."""
        layout = self._layout
        dtype = _PAGE_DTYPES[layout.element_size]
        half = layout.half_layer_elements
        if self._device.type == "cpu":
            storage = torch.from_numpy(region).view(dtype)
            page_stride = layout.page_bytes // layout.element_size
            first = HEADER_SIZE // layout.element_size
        else:
            page_stride, first = 2 * half * layout.layer_count, 0
            storage = torch.zeros(self._page_count * page_stride, dtype=dtype, device=self._device)
        slots, size = layout.page_size, layout.head_size
        lead = (self._page_count, layout.layer_count, layout.kv_head_count)
        strides = (page_stride, 2 * half, size * slots)
        keys = storage.as_strided((*lead, size, slots), (*strides, slots, 1), first)
        values = storage.as_strided((*lead, slots, size), (*strides, size, 1), first + half)
        return keys, values

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, torch.float32)

    def _layer_on_device(self, layer: LayerWeights) -> LayerWeights:
        tensors = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return replace(
            layer, **{name: self._on_device(t) for name, t in tensors.items() if t is not None}
        )


class _Rows:
    """Where the rows of a batch write, and what each of them reads."""

    def __init__(self, batch: Batch, page_size: int, device: torch.device) -> None:
        lengths = np.diff(batch.sequence_starts)
        sequence_of = np.repeat(np.arange(len(lengths)), lengths)
        ordinals = batch.positions // page_size
        pages = batch.tables[sequence_of, ordinals]
        self.pages = torch.from_numpy(pages).long().to(device)
        self.slots = torch.from_numpy(batch.positions % page_size).long().to(device)
        tables = torch.from_numpy(batch.tables).long().to(device)
        self.reads = [
            (tables[sequence, : ordinal + 1], int(position))
            for sequence, ordinal, position in zip(
                sequence_of, ordinals, batch.positions, strict=True
            )
        ]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_layout(
    spec: ModelSpec, layout: PageLayout, region: NDArray[np.uint8], page_count: int
) -> None:
    for name in ("layer_count", "kv_head_count", "head_size"):
        expected, found = getattr(spec, name), getattr(layout, name)
        _require(expected == found, f"layout.{name} is {found}, the model has {expected}")
    _require(layout.element_size in _PAGE_DTYPES, "layout.element_size is neither 2 nor 4")
    _require(region.nbytes >= page_count * layout.page_bytes, "region: smaller than its pages")


def _per_row(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([function(row) for row in rows])


def _block_is_row_independent(matrix: torch.Tensor) -> bool:
    """Whether a row of a product has the same bits at each place of a block, as it has with the
    libraries known to us; where it has not, products are made of single rows."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(matrix.shape[1], generator=generator).to(matrix.device)
    product = F.linear(row.expand(BLOCK_ROWS, -1).contiguous(), matrix)
    return torch.equal(product, product[:1].expand_as(product))
