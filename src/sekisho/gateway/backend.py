"""What the HTTP side needs of the nodes, so that it can be read and tested alone."""

from collections.abc import AsyncGenerator
from typing import Protocol

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams


class Backend(Protocol):
    """A fleet of nodes serving one model."""

    def tokens_max(self) -> int:
        """Prompt plus answer that the smallest role can hold; 0 while no node is ready."""
        ...

    def ready(self) -> bool:
        """Whether tenants may be served: every role has a node and every guard is active."""
        ...

    def generate(
        self, scope: str, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[Delta | Ended, None]:
        """Deltas, then exactly one `Ended`, always, whatever happens to the nodes. Closing the
        iterator early aborts the request."""
        ...
