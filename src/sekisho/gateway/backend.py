"""What the HTTP side needs of the nodes, so that it can be read and tested alone."""

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams


class NodeCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What one node was built with. ``pool_tokens`` is ``pages`` times ``page_size``;
    ``tokens_max``, in tokens, is the longest request that it holds."""

    name: str
    role: Literal["prefill", "decode", "both"]
    pool_tokens: int
    page_size: int
    pages: int
    tokens_max: int


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """``window``: the longest request that is promised, in tokens; None: what the smallest node
    holds. ``missing``: roles without a node."""

    window: int | None
    missing: list[str]
    nodes: list[NodeCapacity]


class Backend(Protocol):
    """A fleet of nodes serving one model."""

    def tokens_max(self) -> int:
        """Prompt plus answer that the smallest role can hold, at most the configured window; 0
        while no node is ready."""
        ...

    def ready(self) -> bool:
        """Whether tenants may be served: every role has a node, every guard is active, and every
        node holds the configured window."""
        ...

    def refusal(self) -> str:
        """Why the nodes cannot keep the configured window, in one line; empty if they can."""
        ...

    def capacity(self) -> Capacity:
        """What each node can physically hold."""
        ...

    def generate(
        self, scope: str, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[Delta | Ended, None]:
        """Deltas, then exactly one `Ended`, always, whatever happens to the nodes. Closing the
        iterator early aborts the request.

        Raises:
            ApiError: 400 that names a field, before the first event: the engine cannot do what
                ``params`` asks for.
        """
        ...


class Platform(Backend, Protocol):
    """A backend with a life of its own."""

    async def start(self) -> None:
        """Return when tenants may be served.

        Raises:
            FleetError, EngineError: they never may.
        """
        ...

    async def stop(self, grace: float) -> None:
        """Refuse new requests, give those under way ``grace`` seconds, end everything."""
        ...
