"""Assembles the platform on one machine: nodes, database, HTTP; and takes it down again."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from sekisho.config import Settings
from sekisho.engine.spec import ModelSpec, load_spec
from sekisho.engine.tokenizer import Tokenizer, load_tokenizer
from sekisho.gateway.app import create_app
from sekisho.gateway.backend import Platform
from sekisho.gateway.engines.build import engine_fleet
from sekisho.gateway.fleet import Fleet
from sekisho.gateway.model import ServedModel
from sekisho.gateway.store import TenantStore
from sekisho.node.build import NodeConfig
from sekisho.node.messages import Loading, Ready

NODE_COMMAND = (sys.executable, "-m", "sekisho.node")
WAIT_MAX_S = 60.0
"""How long a request may wait for pages before it ends with ``capacity_exceeded``."""
DRAIN_S = 30.0
"""How long requests under way may go on after Ctrl-C."""
_TENANTS = ("tenant-a", "tenant-b")


class ServeError(Exception):
    """The platform cannot start; one line says why."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a person needs to use it. ``keys``: by tenant, shown this once."""

    url: str
    model: str
    tokens_max: int
    keys: dict[str, str]


async def serve(
    settings: Settings,
    folder: Path,
    progress: Callable[[str, Loading | Ready], None],
    announce: Callable[[Served], None],
) -> None:
    """Run until SIGINT or SIGTERM, then drain and return.

    Raises:
        ServeError, FleetError, EngineError, ModelError, StoreError: it cannot start.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    listener = _bind(settings.host, settings.port)
    spec = load_spec(folder)  # before the tokenizer: it says best what is wrong with a folder
    tokenizer = load_tokenizer(folder)
    model = _served_model(settings, spec, tokenizer)
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = TenantStore.open(settings.database, settings.state_dir / "pepper")
    fleet = platform_of(settings, folder, model.name, tokenizer, progress)
    stopping = asyncio.create_task(stop.wait())
    try:
        starting = asyncio.create_task(fleet.start())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()  # and wait: processes that it has started must not be left behind
            await asyncio.gather(starting, return_exceptions=True)
            return
        starting.result()
        if refused := fleet.refusal():
            raise ServeError(f"window = {settings.window}: {refused}")
        server = _Server(
            uvicorn.Config(
                create_app(fleet, model, store),
                log_level=settings.log_level,
                access_log=False,
                timeout_graceful_shutdown=int(2 * DRAIN_S),
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        keys = {name: store.replace_keys(store.ensure_tenant(name)) for name in _TENANTS}
        announce(Served(f"http://{host}:{port}", model.name, fleet.tokens_max(), keys))
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        # The fleet ends what outlasts the drain, with an error; uvicorn would cut it off.
        await fleet.stop(DRAIN_S)
        await serving
    finally:
        stopping.cancel()
        await fleet.stop(0.0)
        store.close()
        listener.close()


def platform_of(
    settings: Settings,
    folder: Path,
    model: str,
    tokenizer: Tokenizer,
    progress: Callable[[str, Loading | Ready], None],
) -> Platform:
    """What answers behind the gateway, not started yet.

    Raises:
        StoreError, EngineError: a file of the settings cannot be used.
    """
    window = None if settings.window == "auto" else settings.window
    if settings.engine != "sekisho":
        return engine_fleet(settings, folder, tokenizer, window)
    return Fleet(
        roles_of(settings),
        lambda *names: node_config(settings, folder, *names),
        NODE_COMMAND,
        progress,
        window,
        model,
    )


def roles_of(settings: Settings) -> list[str]:
    """One role a node process."""
    if settings.colocated:
        return ["colocated"] * settings.colocated
    return ["prefill"] * settings.prefill + ["decode"] * settings.decode


def node_config(
    settings: Settings, folder: Path, role: str, name: str, gateway: str, address: str
) -> NodeConfig:
    """What a node process is told."""
    node_count = len(roles_of(settings))
    cores = len(os.sched_getaffinity(0))
    auto_threads = max(1, cores // node_count)
    return NodeConfig(
        name=name,
        role=role,
        parent=os.getpid(),
        gateway=gateway,
        address=address,
        model=str(folder),
        dtype=settings.dtype,
        device=settings.device,
        isolation=settings.isolation,
        transport=settings.transport,
        mooncake_protocol=settings.mooncake_protocol,
        mooncake_device=settings.mooncake_device,
        page_size=settings.page_size,
        pool_tokens=None if settings.pool_tokens == "auto" else settings.pool_tokens,
        batch_max=settings.max_batch,
        chunk_tokens=settings.chunk_tokens,
        queue_max=settings.queue_max,
        wait_max=WAIT_MAX_S,
        threads=auto_threads if settings.threads == "auto" else settings.threads,
        node_count=node_count,
        log_level=settings.log_level,
    )


class _Server(uvicorn.Server):
    """Signals are ours: they also come while nothing is served yet, and nodes must be drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a taken port costs no minute of waiting."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise ServeError(f"cannot bind {host} port {port}: {error.strerror or error}") from None
    return listener


def _served_model(settings: Settings, spec: ModelSpec, tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name=settings.served_model_name,
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        created=int(time.time()),
    )
