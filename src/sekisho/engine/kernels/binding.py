"""The C functions of kernels.cpp as Python objects. Structs mirror abi.h."""

import ctypes
import platform
import threading
import weakref
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sekisho.core.page import PageLayout
from sekisho.engine.batch import Batch
from sekisho.engine.kernels.build import KernelUnavailable, load_library

LANES = 16  # columns of a panel
GROUP_MAX = 64  # query heads per kv head, QUERIES_MAX in context.h
VARIANTS = {"generic": 0, "avx2": 1, "avx512": 2}
ALIGNMENT = 64


class PagesStruct(ctypes.Structure):
    """SkPages."""

    _fields_ = [
        ("region", c_void_p),
        ("page_bytes", c_int64),
        ("page_size", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("bf16", c_int64),
    ]


class LayerStruct(ctypes.Structure):
    """SkLayer."""

    _fields_ = [
        (name, c_void_p)
        for name in (
            "input_norm",
            "qkv",
            "qkv_bias",
            "q_norm",
            "k_norm",
            "o",
            "attention_out_norm",
            "mlp_norm",
            "gate_up",
            "down",
            "mlp_out_norm",
        )
    ]


class ModelStruct(ctypes.Structure):
    """SkModel."""

    _fields_ = [
        ("pages", PagesStruct),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("layers", c_int64),
        ("vocab", c_int64),
        ("rotary_dim", c_int64),
        ("rope_interleaved", c_int64),
        ("eps", c_float),
        ("rope_factor", c_float),
        ("inv_freq", c_void_p),
        ("embedding", c_void_p),
        ("layer", POINTER(LayerStruct)),
        ("final_norm", c_void_p),
        ("lm_head", c_void_p),
    ]


class BatchStruct(ctypes.Structure):
    """SkBatch."""

    _fields_ = [
        ("rows", c_int64),
        ("sequences", c_int64),
        ("pages_max", c_int64),
        ("outputs", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("sequence_starts", c_void_p),
        ("tables", c_void_p),
        ("logit_rows", c_void_p),
    ]

    @classmethod
    def of(cls, batch: Batch) -> "BatchStruct":
        """Borrows the arrays of ``batch``: keep it alive."""
        return cls(
            len(batch.tokens),
            len(batch.sequence_starts) - 1,
            batch.tables.shape[1],
            len(batch.logit_rows),
            batch.tokens.ctypes.data,
            batch.positions.ctypes.data,
            batch.sequence_starts.ctypes.data,
            batch.tables.ctypes.data,
            batch.logit_rows.ctypes.data,
        )


def pages_struct(region: NDArray[np.uint8], layout: PageLayout, head_count: int) -> PagesStruct:
    """Borrows ``region``: keep it alive. ``element_size`` 2 means bf16."""
    return PagesStruct(
        region.ctypes.data,
        layout.page_bytes,
        layout.page_size,
        head_count,
        layout.kv_head_count,
        layout.head_size,
        int(layout.element_size == 2),
    )


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """Uninitialised memory at a 64-byte boundary; NumPy asks for huge pages where it is large."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:size]


def packed_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes of a packed [rows, columns] matrix, rows padded to whole panels."""
    return -(-rows // LANES) * LANES * columns * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Packed:
    """A [rows, columns] matrix in the panels that gemm.h describes."""

    data: NDArray[np.uint8]
    rows: int
    columns: int
    bf16: bool


class Kernels:
    """The kernels of one instruction set and the threads that run them; calls take turns.

    Args:
        threads: how many, the caller's included.
        variant: ``generic``, ``avx2`` or ``avx512``; None picks the widest that runs here. All
            give the same bits.

    Raises:
        KernelUnavailable: see `load_library`; or the processor lacks the instructions.
    """

    def __init__(self, threads: int, variant: str | None = None) -> None:
        if threads < 1:
            raise ValueError(f"threads {threads} must be above 0")
        self._library = load_library()
        for name in ("sk_create", "sk_destroy"):
            getattr(self._library, name).restype = c_void_p
        self._library.sk_destroy.argtypes = [c_void_p]
        self.variant = variant or self._widest()
        if not self._library.sk_supported(VARIANTS[self.variant]):
            raise KernelUnavailable(f"this processor has no {self.variant}")
        self._context = c_void_p(self._library.sk_create(threads))
        if not self._context:
            raise KernelUnavailable(f"cannot start {threads} threads")
        self._turn = threading.Lock()
        weakref.finalize(self, self._library.sk_destroy, self._context)

    def _widest(self) -> str:
        for name in ("avx512", "avx2"):
            if self._library.sk_supported(VARIANTS[name]):
                return name
        if platform.machine() in {"x86_64", "AMD64"}:
            # Without FMA the generic code calls a library function for each product.
            raise KernelUnavailable("this processor has neither AVX2 with FMA nor AVX-512")
        return "generic"

    def _call(self, name: str, *arguments: object) -> None:
        with self._turn:
            if getattr(self._library, name)(*arguments) != 0:
                raise MemoryError(f"{name}: out of memory")

    def pack(
        self, matrix: torch.Tensor, into: NDArray[np.uint8] | None = None, stride: int = 1
    ) -> Packed:
        """Pack ``matrix`` [rows, columns], bf16 or fp32, its panels ``stride`` panels apart."""
        rows, columns = matrix.shape
        source = matrix.detach().contiguous()
        data = aligned_bytes(packed_bytes(rows, columns, matrix.dtype)) if into is None else into
        bf16 = matrix.dtype == torch.bfloat16
        self._call(
            "sk_pack",
            self._context,
            c_void_p(source.data_ptr()),
            c_int64(rows),
            c_int64(columns),
            c_int(bf16),
            c_int64(stride),
            c_void_p(data.ctypes.data),
        )
        return Packed(data, rows, columns, bf16)

    def gemm(self, x: NDArray[np.float32], packed: Packed) -> NDArray[np.float32]:
        """``x`` [m, columns] times the transposed matrix: [m, rows], fp32 sums."""
        x = np.ascontiguousarray(x, np.float32)
        if x.ndim != 2 or x.shape[1] != packed.columns:
            raise ValueError(f"x: shape {x.shape} does not fit {packed.columns} columns")
        out = np.empty((len(x), packed.rows), np.float32)
        self._call(
            "sk_gemm",
            c_int(VARIANTS[self.variant]),
            self._context,
            c_void_p(x.ctypes.data),
            c_int64(len(x)),
            c_void_p(packed.data.ctypes.data),
            c_int64(packed.rows),
            c_int64(packed.columns),
            c_int(packed.bf16),
            c_void_p(out.ctypes.data),
        )
        return out

    def attention(
        self,
        q: NDArray[np.float32],
        batch: Batch,
        region: NDArray[np.uint8],
        layout: PageLayout,
        layer: int,
    ) -> NDArray[np.float32]:
        """Causal attention of ``q`` [rows, heads, head_size] over the pages of one layer, as they
        are (nothing is written): [rows, heads, head_size]. ``batch`` is not validated."""
        q = np.ascontiguousarray(q, np.float32)
        out = np.empty_like(q)
        pages = pages_struct(region, layout, q.shape[1])
        self._call(
            "sk_attention",
            c_int(VARIANTS[self.variant]),
            self._context,
            ctypes.byref(pages),
            ctypes.byref(BatchStruct.of(batch)),
            c_int64(layer),
            c_void_p(q.ctypes.data),
            c_void_p(out.ctypes.data),
        )
        return out

    def forward(self, model: ModelStruct, batch: Batch) -> NDArray[np.float32]:
        """Logits [outputs, vocab] of a valid batch; writes its K and V into the pages."""
        logits = np.empty((len(batch.logit_rows), model.vocab), np.float32)
        self._call(
            "sk_forward",
            c_int(VARIANTS[self.variant]),
            self._context,
            ctypes.byref(model),
            ctypes.byref(BatchStruct.of(batch)),
            c_void_p(logits.ctypes.data),
        )
        return logits
