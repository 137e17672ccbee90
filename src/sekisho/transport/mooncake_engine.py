"""Starting the Mooncake Transfer Engine, and what its answers mean.

Sekisho uses the engine's one-task calls. Why not the batch calls: they report a failure as soon
as *one* task of the batch has failed, while others may still move; on a time-out they give up
their handle, after which nobody can learn what became of the writes; and they spin, which takes
a core from the model. A task has a state of its own, for as long as we want to ask. (Version
0.3.13, its sources read and tried out.)

===================================  ============================================================
``transfer_submit_write`` gives 0    refused. TCP: nothing was sent. RDMA may have posted a part
``transfer_check_status`` gives 1    `LANDED`. TCP: the receiver has acknowledged after its last
                                     store (framing version 2, mooncake#2086). RDMA: the
                                     adapter's completion
... gives -1                         `LOST`: this end has stopped, but what it had already sent
                                     may lie in the receiver's socket and land later
... gives 0 or -2                    under way. -2 is a limit on waiting (``MC_SLICE_TIMEOUT``);
                                     time proves nothing, so we go on asking
===================================  ============================================================
"""

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sekisho.transport.base import TransportError

LANDED, LOST = 1, -1


def load_engine(protocol: str) -> tuple[Any, str]:
    """The engine's class and version; sets its environment, which it reads when it starts.

    ``MC_FORCE_TCP`` is set for tcp, and ``MC_TCP_ENABLE_CONNECTION_POOL`` and ``MC_LOG_LEVEL``
    unless the environment has them: without the pool every header opens a connection.
    ``MC_TCP_BIND_ADDRESS`` is not, because the peer-to-peer handshake ignores it.

    Raises:
        TransportError: the package, a library or the RDMA device is missing, or ``MC_TCP_PROTO``
            asks for the framing without acknowledgement.
    """
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise TransportError("MC_TCP_PROTO=1 makes Mooncake report writes that have not landed")
    if protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
    else:
        # without a device, or if forced, the engine would quietly use tcp
        devices = Path("/sys/class/infiniband")
        if not devices.is_dir() or not any(devices.iterdir()) or "MC_FORCE_TCP" in os.environ:
            raise TransportError("protocol rdma: no RDMA device, or MC_FORCE_TCP is set")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError as error:
        raise TransportError(f"Mooncake: {error}; pip install 'sekisho[mooncake]'") from error
    except ImportError as error:
        raise TransportError(
            f"Mooncake: {error}; apt-get install libibverbs1 librdmacm1 libnuma1"
        ) from error
    for package in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return TransferEngine, importlib.metadata.version(package)
    raise TransportError("Mooncake: its package has no version")


def start_engine(
    engine_class: Any, host: str, protocol: str, device: str, base: int, size: int
) -> Any:
    """A running engine with ``size`` bytes at ``base`` registered.

    Raises:
        TransportError: it does not start; with its last words.
    """
    engine = engine_class()
    with _captured_stderr() as said:
        failed = engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        failed = failed or engine.register_memory(base, size)
        if failed:
            os.lseek(said, 0, os.SEEK_SET)
            lines = os.read(said, 65536).decode(errors="replace").splitlines()
            raise TransportError(f"Mooncake does not start: {' / '.join(lines[-3:])}")
    return engine


@contextlib.contextmanager
def _captured_stderr() -> Iterator[int]:
    """Keep what C++ code writes to descriptor 2: the engine logs an error on every good start."""
    kept = os.dup(2)
    sink = os.memfd_create("stderr")
    try:
        os.dup2(sink, 2)
        yield sink
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)
