"""Truth: status, bill and outcome agree; nothing failed is served as success, nothing healthy is
called failed, and limits are what they say.

Compares what the client holds with what the answering node said of the request's end.

Not verified: the words of error messages; HTTP itself (the gateway's own tests do); usage of
answers that were cut off, beyond that they are not billed.
"""

from sekisho.core.outcome import CODES, Kind
from sekisho.engine.output import Ended
from sekisho.sim.checkers import FoundError
from sekisho.sim.client import Answer
from sekisho.sim.scenario import Ask

# What may end a request of a run in which nothing is broken.
_HEALTHY = {"context_length_exceeded", "queue_full", "capacity_exceeded", "client_gone"}


# The node may have finished while its last words were on their way to nobody.
_LOST_ON_THE_WAY = {"client_gone", "node_lost"}


class Truth:
    """``healthy``: nothing is broken in this run, only asked for."""

    name = "truth"

    def __init__(self, healthy: bool) -> None:
        self._healthy = healthy

    def ended(self, answer: Answer, ask: Ask, said: Ended | None, servable: bool) -> None:
        """``said`` is the node's own word, None where it never heard of the request or died;
        ``servable``: every role can hold it."""
        code = said.code if said is not None else ""
        if answer.served:
            self._served(answer, ask, said)
            if not servable:
                self._found(answer, "was served although a role cannot hold it")
            return
        if answer.billed:
            self._found(answer, f"failed with {answer.code} and is billed {answer.billed} tokens")
        if answer.finish:
            self._found(answer, f"failed with {answer.code} and shows finish {answer.finish}")
        if not answer.tokens and answer.status == 200:
            self._found(answer, f"got 200 and nothing, its outcome is {answer.code}")
        if code and CODES[code][0] is Kind.FINISHED and answer.code not in _LOST_ON_THE_WAY:
            self._found(answer, f"finished with {code} and was told {answer.code}")
        if self._healthy and answer.code not in _HEALTHY:
            self._found(answer, f"failed with {answer.code} although nothing was broken")
        if not servable and answer.tokens:
            self._found(answer, "was begun although a role cannot hold it")

    def queued(self, node: str, count: int, limit: int) -> None:
        if count > limit:
            raise FoundError(self.name, f"{count} requests wait on {node}, the limit is {limit}")

    def admitted(self, node: str, request: int, servable: bool) -> None:
        """The request waits or runs on a node whose role must be able to hold it."""
        if not servable:
            raise FoundError(self.name, f"{node} admitted request {request}, which it cannot hold")

    def _served(self, answer: Answer, ask: Ask, said: Ended | None) -> None:
        if said is None or CODES[said.code][0] is not Kind.FINISHED:
            code = said.code if said is not None else "nothing"
            self._found(answer, f"was served as a success, its node said {code}")
        if len(answer.tokens) != ask.count:
            self._found(answer, f"was served {len(answer.tokens)} of {ask.count} tokens")
        if answer.billed != len(answer.tokens):
            self._found(answer, f"is billed {answer.billed} for {len(answer.tokens)} tokens")

    def _found(self, answer: Answer, what: str) -> None:
        raise FoundError(self.name, f"request {answer.number} of {answer.tenant} {what}")
