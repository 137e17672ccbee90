"""The lab's engines behind the real gateway, for a probe on this machine and for nobody else.

The server listens on the loopback address alone, on a port that the system chooses; its two keys
are made at its start and die with it, as does the folder of its database. No setting and no
command line of `sekisho serve` leads here.
"""

import asyncio
import contextlib
import itertools
import queue
import socket
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import uvicorn
from starlette.types import ASGIApp

from sekisho.core.errors import OwnershipError
from sekisho.engine.demo import NAME
from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.gateway.app import create_app
from sekisho.gateway.backend import Backend, Capacity, NodeCapacity
from sekisho.gateway.store import TenantStore
from sekisho.lab.machine import PAGE_SIZE, LabModel, served_model
from sekisho.lab.unsafe import LabError

LOOPBACK = "127.0.0.1"
_WAIT_S = 0.0002  # a write is under way in the transport's thread
_DRAIN_S = 5


class Nodes(Protocol):
    """What a thread steps: `leaky_engine.Colocated` or a `NodePair`."""

    def generate(
        self, request: int, scope: str, tokens: list[int], params: SamplingParams
    ) -> None: ...

    def abort(self, request: int) -> None: ...

    def step(self) -> bool: ...

    def outputs(self) -> list[Delta | Ended]: ...

    @property
    def idle(self) -> bool: ...


@dataclass(eq=False)
class _Stream:
    """Who waits for the events of a request, in which loop."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Delta | Ended]


class LabBackend:
    """A `Backend` whose nodes are stepped by one thread, from `start` to `stop`.

    Args:
        window: what is advertised, in tokens.
        page_count: of the pool that answers.
    """

    def __init__(self, nodes: Nodes, window: int, page_count: int) -> None:
        self.failure: BaseException | None = None
        self._nodes = nodes
        self._window = window
        self._page_count = page_count
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sekisho-lab")
        self._idle = True

    def start(self) -> None:
        """Step from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Step no more; whoever still waits is told nothing."""
        self._calls.put(None)
        self._thread.join()

    def tokens_max(self) -> int:
        """See `Backend`."""
        return self._window

    def ready(self) -> bool:
        """See `Backend`; not after its thread has failed."""
        return self.failure is None

    def refusal(self) -> str:
        """See `Backend`."""
        return ""

    def capacity(self) -> Capacity:
        """See `Backend`; of the pool that answers."""
        node = NodeCapacity(
            name="lab",
            role="both",
            pool_tokens=self._page_count * PAGE_SIZE,
            page_size=PAGE_SIZE,
            pages=self._page_count,
            tokens_max=self._window,
        )
        return Capacity(window=self._window, missing=[], nodes=[node])

    async def generate(
        self, scope: str, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[Delta | Ended, None]:
        """See `Backend`."""
        request = next(self._numbers)
        stream = self._streams[request] = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        self._calls.put(lambda: self._nodes.generate(request, scope, tokens, params))
        try:
            while True:
                event = await stream.events.get()
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            del self._streams[request]
            self._calls.put(lambda: self._nodes.abort(request))

    def _run(self) -> None:
        try:
            while self._take():
                self._idle = not self._nodes.step()
                for event in self._nodes.outputs():
                    self._tell(event)
        except (OwnershipError, RuntimeError, ValueError) as error:
            self.failure = error
            for request in list(self._streams):
                self._tell(Ended(request, "node_lost", "the lab's engine has failed", 0, 0))

    def _take(self) -> bool:
        """Make the calls that wait, or wait for one; False where there is to be no more."""
        wait = self._idle and not self._calls.qsize()
        with contextlib.suppress(queue.Empty):
            while True:
                timeout = None if self._nodes.idle else _WAIT_S
                call = self._calls.get(wait, timeout) if wait else self._calls.get_nowait()
                if call is None:
                    return False
                call()
                wait = False
        return True

    def _tell(self, event: Delta | Ended) -> None:
        stream = self._streams.get(event.request)
        if stream is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended, and its client with it
                stream.loop.call_soon_threadsafe(stream.events.put_nowait, event)


class Served(NamedTuple):
    """How to reach it. ``base_url`` ends in /v1."""

    base_url: str
    model: str
    key_a: str
    key_b: str


@contextlib.asynccontextmanager
async def serving(
    model: LabModel, backend: Backend, wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app
) -> AsyncIterator[Served]:
    """The gateway over ``backend``, with two new tenants, until the context ends.

    Raises:
        LabError: it does not start.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sekisho-lab-")))
        store, keys = await asyncio.to_thread(_tenants, folder)
        stack.callback(store.close)
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        app = wrap(create_app(backend, served_model(model), store))
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=_DRAIN_S)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise LabError("the lab's server does not start")
                await asyncio.sleep(0.01)
            yield Served(f"http://{LOOPBACK}:{listener.getsockname()[1]}/v1", NAME, *keys)
        finally:
            server.should_exit = True
            await asyncio.to_thread(thread.join)


def _tenants(folder: Path) -> tuple[TenantStore, tuple[str, str]]:
    store = TenantStore.open(f"sqlite:///{folder / 'tenants.db'}", folder / "pepper")
    key_a, key_b = (store.create_key(store.ensure_tenant(f"tenant-{name}")) for name in "ab")
    return store, (key_a, key_b)
