"""From a `NodeConfig` to the parts of a node: model, region, pool, runner, transport."""

import hashlib
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout
from sekisho.core.pool import Pool
from sekisho.engine.batch import Runner
from sekisho.engine.kernels.build import KernelUnavailable
from sekisho.engine.native import NativeRunner
from sekisho.engine.pages import PageManager
from sekisho.engine.policy import POLICIES
from sekisho.engine.reference import ReferenceRunner
from sekisho.engine.spec import ModelError, ModelSpec, load_spec
from sekisho.engine.weights import ModelWeights, load_weights
from sekisho.transport import Transport, create_transport
from sekisho.transport.region import check_memory

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Share of the free memory that the pools of all nodes may take where the size is "auto": the
# weights, their packed copy and everybody else on the machine need the rest.
_POOL_SHARE = 0.25

Progress = Callable[[str, int, int], None]


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node process is told at its start. ``node_count`` nodes share the machine."""

    name: str
    role: str
    parent: int
    gateway: str
    address: str
    model: str
    dtype: str
    device: str
    isolation: str
    transport: str
    mooncake_protocol: str
    mooncake_device: str
    page_size: int
    pool_tokens: int | None
    batch_max: int
    chunk_tokens: int
    queue_max: int
    wait_max: float
    threads: int
    node_count: int
    log_level: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role is made of. ``transport`` is None on a colocated node: no page is moved."""

    spec: ModelSpec
    runner: Runner
    pages: PageManager
    transport: Transport | None
    notes: list[str]

    @property
    def tokens_max(self) -> int:
        """Tokens that one request may have here: window of the model, or the whole pool."""
        return min(self.spec.context_size, self.pages.tokens_max)


def build_parts(config: NodeConfig, progress: Progress) -> Parts:
    """Load and allocate everything.

    Raises:
        ModelError, TransportError, ValueError, MemoryError: one line says what is wrong.
    """
    folder = Path(config.model)
    spec = load_spec(folder)
    dtype = _DTYPES[config.dtype]
    layout = PageLayout(
        page_size=config.page_size,
        layer_count=spec.layer_count,
        kv_head_count=spec.kv_head_count,
        head_size=spec.head_size,
        element_size=dtype.itemsize,
        model=model_fingerprint(folder),
    )
    weights = load_weights(folder, spec, dtype, lambda n, total: progress("weights", n, total))
    page_count = _page_count(config, spec, layout)
    progress("pool", 0, 1)
    notes: list[str] = []
    transport: Transport | None = None
    if config.role == "colocated":
        region = _private_region(page_count * layout.page_bytes)
    else:
        created = create_transport(
            config.transport,
            layout.page_bytes,
            page_count,
            protocol=config.mooncake_protocol,
            device=config.mooncake_device,
        )
        transport, region = created.transport, created.transport.region
        if created.fallback_reason:
            notes.append(f"memory transport instead of Mooncake: {created.fallback_reason}")
    runner, reason = make_runner(
        spec,
        weights,
        region,
        layout,
        page_count,
        device=config.device,
        threads=config.threads,
    )
    if reason:
        notes.append(f"plain torch instead of the native kernels: {reason}")
    pool = Pool(page_count, secrets.randbits(63) + 1)
    memory = PageMemory(region, layout, page_count)
    pages = PageManager(memory, pool, POLICIES[config.isolation])
    return Parts(spec, runner, pages, transport, notes)


def model_fingerprint(folder: Path) -> str:
    """Names the weights: configuration, and name, size and header of every safetensors file.

    The header lists every tensor with shape and place; hashing gigabytes of values at each start
    would find an edited weight too, and is left to whoever distributes the files.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        hasher.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            if path.suffix == ".json":
                hasher.update(file.read())
            else:
                hasher.update(file.read(int.from_bytes(file.read(8), "little")))
    return hasher.hexdigest()


def _page_count(config: NodeConfig, spec: ModelSpec, layout: PageLayout) -> int:
    if config.pool_tokens is not None:
        return layout.pages_for(config.pool_tokens)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fitting = int(available * _POOL_SHARE / config.node_count) // layout.page_bytes
    useful = layout.pages_for(spec.context_size) * config.batch_max
    if fitting < 1:
        raise ModelError("pool_tokens: not even one page fits into the free memory")
    return min(fitting, useful)


def _private_region(size: int) -> NDArray[np.uint8]:
    check_memory(size)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)  # attention walks scattered pages: fewer TLB misses
    return np.frombuffer(region, np.uint8)


def make_runner(
    spec: ModelSpec,
    weights: ModelWeights,
    region: NDArray[np.uint8],
    layout: PageLayout,
    page_count: int,
    *,
    device: str,
    threads: int,
) -> tuple[Runner, str]:
    """The native kernels, or plain torch where they cannot run; and then the reason."""
    reason = ""
    if device == "cpu":
        try:
            return NativeRunner(spec, weights, region, layout, page_count, threads), ""
        except KernelUnavailable as error:
            reason = str(error)
    torch.set_num_threads(threads)
    return ReferenceRunner(spec, weights, region, layout, page_count, device), reason
