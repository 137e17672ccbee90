"""A server of a foreign engine as the gateway knows it: fit to be used or not, and how busy."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from sekisho.gate.model import Reading

log = logging.getLogger("sekisho.engines")

Role = Literal["prefill", "decode"]
DOUBTED_AFTER = 3
LOST_AFTER = 20
"""Times that a server may be late with its answer: before it gets no new request, and before what
it has under way ends. One that refuses the connection leaves at once; one that computes a long
prompt describes itself only after that."""


class EngineError(Exception):
    """The platform cannot start over these servers; one line says why."""


class UnfitError(Exception):
    """A server must not be used; one sentence, nothing of its answer.

    ``late``: it did not answer in time, which says little.
    """

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What a fit server said of itself.

    Attributes:
        held: tokens that its smallest rank can hold for one request, as the gate reads it.
        prompt_max: longest prompt in tokens that its guard lets in.
        guard: the guard's version.
        bootstrap_port: where decode meets prefill; 0 on a server without.
    """

    reading: Reading
    held: int
    prompt_max: int
    guard: str
    bootstrap_port: int = 0


Lost = Callable[[str, str], None]
"""Gets the code and the reason of the end."""


@dataclass(eq=False)
class Replica:
    """One server. ``bootstrap_port`` 0: the one it states itself.

    Attributes:
        label: its name for people who must not know its address, as ``prefill-1``.
        why: why it may not be used, where it may not.
        examined: what it said last; None while it may not be used.
        busy: requests under way. turn: when it was last chosen.
        wanted: set when it should be examined before its time.
    """

    role: Role
    url: str
    label: str
    bootstrap_port: int = 0
    why: str = ""
    examined: Examined | None = None
    busy: int = 0
    turn: int = 0
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _misses: int = 0
    _lost: set[Lost] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.role} {self.url}"

    @property
    def port(self) -> int:
        """Its bootstrap port."""
        stated = 0 if self.examined is None else self.examined.bootstrap_port
        return self.bootstrap_port or stated

    @property
    def bootstrap_url(self) -> str:
        """Where decode asks for its workers, for an engine that wants a URL."""
        host = urlsplit(self.url).hostname or ""
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def watch(self, lost: Lost) -> Callable[[], None]:
        """Call ``lost`` when requests at this server must end; returns what ends the watch."""
        self._lost.add(lost)
        return lambda: self._lost.discard(lost)

    def fit(self, examined: Examined) -> None:
        """It was examined and may be used."""
        if self.examined is None:
            log.info(
                "%s: %s %s, guard %s, holds %d tokens, prompts up to %d",
                self.name,
                examined.reading.engine,
                examined.reading.version,
                examined.guard,
                examined.held,
                examined.prompt_max,
            )
        self.examined = examined
        self.why = ""
        self._misses = 0

    def unfit(self, error: UnfitError) -> None:
        """It was examined and may not be used, unless it is only late."""
        self._misses += 1
        if not error.late or self._misses >= LOST_AFTER:
            self.leave(str(error))
        elif self._misses >= DOUBTED_AFTER:
            self._set_aside(str(error))

    def doubt(self, why: str) -> None:
        """A request failed there: nothing new goes to it before it has passed an examination, which
        is wanted now. What else it has under way goes on."""
        self._set_aside(why)
        self.wanted.set()

    def leave(self, why: str) -> None:
        """As `doubt`, but what it has under way ends in an error too. The next examination that
        it passes brings it back."""
        self._set_aside(why)
        self.end_all("node_lost", f"{self.name} left: {why}")

    def end_all(self, code: str, why: str) -> None:
        """End what it has under way."""
        for lost in list(self._lost):
            lost(code, why)

    def _set_aside(self, why: str) -> None:
        if self.examined is not None:
            log.error("%s gets no more requests: %s", self.name, why)
            self.examined = None
        self.why = why
