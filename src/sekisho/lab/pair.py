"""A decode and a prefill node of one process, joined by lists instead of sockets."""

import time
from collections.abc import Iterator

from sekisho.core.errors import Evidence
from sekisho.core.page import PageLayout
from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.node.decode import DecodeNode
from sekisho.node.messages import Abort, Generate, Join
from sekisho.node.prefill import PrefillNode
from sekisho.transport import Transport

_DECODE, _PREFILL = "decode-lab", "prefill-lab"
_WAIT_S = 0.0002
_WAITS_MAX = 50_000


class NodePair:
    """``evidence``: what the checks of both nodes have found so far. ``target`` is the transport
    of the decode node."""

    def __init__(
        self, decode: DecodeNode, prefill: PrefillNode, target: Transport, layout: PageLayout
    ) -> None:
        self.evidence: list[Evidence] = []
        self._decode = decode
        self._prefill = prefill
        decode.prefill_up(_PREFILL)
        prefill.receive(_DECODE, Join(target.endpoint(), layout.fingerprint), 0.0)

    def generate(self, request: int, scope: str, tokens: list[int], params: SamplingParams) -> None:
        """Give the decode node a request; its answer comes with `events`."""
        self._decode.generate(Generate(request, scope, tokens, params, _PREFILL), 0.0)

    def abort(self, request: int) -> None:
        """The client of that request has left."""
        self._decode.abort(Abort(request))

    def outputs(self) -> list[Delta | Ended]:
        """What the decode node has said since it was asked last."""
        return [e for e in self._decode.to_gateway() if isinstance(e, Delta | Ended)]

    @property
    def idle(self) -> bool:
        """Every request has ended, and every write."""
        return self._decode.idle and self._prefill.idle

    def events(self) -> Iterator[Delta | Ended]:
        """Step both nodes until every request has ended and nothing is written any more.

        A writer that was proved a liar is never heard of again: its pages stay pinned, and it is
        not waited for.
        """
        waits = 0
        while waits < _WAITS_MAX:
            moved = self.step()
            events = self.outputs()
            yield from events
            if self._prefill.idle and not self._decode.counts()["running"] and not moved:
                return
            if not moved and not events:
                time.sleep(_WAIT_S)  # a write is under way in the transport's thread
                waits += 1

    def part(self) -> None:
        """The prefill node forgets the decode node, and with it the mapping of its region."""
        self._prefill.peer_dead(_DECODE)

    def step(self) -> bool:
        """One step of both nodes; False if neither had anything to do."""
        moved = self._decode.step(0.0)
        for _, message in self._decode.to_prefill:
            self._prefill.receive(_DECODE, message, 0.0)
            moved = True
        self._decode.to_prefill.clear()
        moved |= self._prefill.step(0.0)
        for _, answer in self._prefill.outbox:
            self._decode.answer(_PREFILL, answer)
            moved = True
        self._prefill.outbox.clear()
        for violations in (self._decode.violations, self._prefill.violations):
            self.evidence += violations
            violations.clear()
        return moved
