"""A client and the part of the gateway that answers it, without HTTP.

The production code judges every event (`StreamCheck`) and maps outcomes to statuses
(`from_outcome`); what the client saw and what it is billed are kept for the checkers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.gateway.errors import ApiError
from sekisho.gateway.generation import StreamCheck
from sekisho.gateway.prompts import Call
from sekisho.sim.scenario import Ask


@dataclass
class Answer:
    """What one request of a client came to.

    ``status`` is HTTP's, 0 while nothing was sent; ``code`` of an error, also of one within a
    stream; ``finish`` is the finish reason shown to the client; ``billed`` in answer tokens.
    """

    ask: int
    tenant: str
    number: int = 0
    status: int = 0
    code: str = ""
    finish: str = ""
    tokens: list[int] = field(default_factory=list)
    billed: int = 0
    cached: int = 0
    ended: bool = False

    @property
    def served(self) -> bool:
        """The client holds this for a whole answer."""
        return self.status == 200 and not self.code and self.finish != ""


class Client:
    """One attempt of an `Ask`."""

    def __init__(self, index: int, ask: Ask, live: set[int], on_end: Callable[[], None]) -> None:
        self.ask = ask
        self._on_end = on_end
        self.params = SamplingParams(
            max_tokens=ask.count, temperature=ask.temperature, seed=index + 1
        )
        self.answer = Answer(index, ask.tenant)
        self._check = StreamCheck(Call(0, 0, ask.tokens, self.params), live)

    def deliver(self, event: Delta | Ended) -> None:
        """An event of the roster for this request."""
        answer = self.answer
        if answer.ended:
            return
        answer.number = event.request
        try:
            self._check.accept(event)
        except ApiError as error:
            answer.status = answer.status or error.status
            answer.code = error.code
            self._end()
            return
        answer.status = 200
        if isinstance(event, Delta):
            answer.tokens.extend(event.tokens)
            return
        answer.finish = event.code
        answer.billed += event.output_tokens
        answer.cached = event.cached_tokens
        self._end()

    def leave(self) -> None:
        """The client closes the connection."""
        if not self.answer.ended:
            self.answer.status = self.answer.status or 499
            self.answer.code = "client_gone"
            self._end()

    def _end(self) -> None:
        self.answer.ended = True
        self._check.close()
        self._on_end()
