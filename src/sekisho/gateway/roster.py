"""The nodes as the gateway knows them: who is ready, who answers which request, who must go.

Sans-IO: the fleet feeds it from its sockets, the simulator from its network. All messages of a
request come from the one decode node it was given to; a word about it from any other node is an
error in the log and never text for a client.

    node      | ready ── serves ──| retiring: no new request | ended, replaced
    requests    |---- r1 ----| |---- r2 (runs to its end) ---|
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.gate.model import Rank
from sekisho.node.messages import (
    Abort,
    Condemned,
    Distrust,
    Generate,
    PeerDead,
    PeerUp,
    Ready,
    ToNode,
)

log = logging.getLogger("sekisho.fleet")

Deliver = Callable[[Delta | Ended], None]


@dataclass(eq=False)
class Node:
    """A node that is ready, or was; its name never comes again."""

    name: str
    ready: Ready
    retiring: bool = False
    requests: set[int] = field(default_factory=set)

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def rank(self) -> Rank:
        """What it can hold, as the gate judges it."""
        return Rank(
            name=self.name,
            pool_tokens=self.ready.page_count * self.ready.page_size,
            page_size=self.ready.page_size,
            sequence_max=self.ready.tokens_max,
        )


@dataclass(eq=False)
class _Request:
    node: Node
    prefill: Node | None
    deliver: Deliver


class Roster:
    """Routes requests to the nodes of ``roles``.

    Args:
        send: called with (node name, messages); must not wait.
        end: called with the name of a node whose process must end; its parent starts the next.
        window: tokens of the longest request that is promised; None: what the smallest node holds.
        refuse: why nodes of these sizes cannot keep the promise, or nothing.
    """

    def __init__(
        self,
        roles: Sequence[str],
        send: Callable[[str, Sequence[ToNode]], None],
        end: Callable[[str], None],
        window: int | None = None,
        refuse: Callable[[Mapping[str, Rank]], str] = lambda _: "",
    ) -> None:
        self.window = window
        self.refusal = ""
        """Why the nodes cannot keep the window, if they cannot."""
        self._refuse = refuse
        self.nodes: dict[str, Node] = {}
        self.draining = False
        self._roles = set(roles)
        self._send = send
        self._end_process = end
        self._gone: set[str] = set()
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}

    # -- queries

    def tokens_max(self) -> int:
        """Prompt plus answer that the smallest node can hold, at most the window; 0 while a role
        has no node."""
        usable = self._usable()
        if {node.role for node in usable} != self._roles:
            return 0
        held = min(node.ready.tokens_max for node in usable)
        return held if self.window is None else min(held, self.window)

    def ready(self) -> bool:
        """Every role has a node, every node's checks are active and holds the window, and nothing
        is draining."""
        guarded = all(node.ready.tenants for node in self._usable())
        return guarded and self.tokens_max() > 0 and not self.refusal and not self.draining

    def ranks(self) -> dict[str, Rank]:
        """What each node can hold, by name, without those that are being replaced."""
        return {node.name: node.rank for node in self._usable()}

    def requests(self) -> list[int]:
        """The numbers of the requests that have not ended."""
        return list(self._requests)

    # -- requests

    def open(self, scope: str, tokens: list[int], params: SamplingParams, deliver: Deliver) -> int:
        """Give a request to the least busy nodes; ``deliver`` gets its deltas and its one `Ended`,
        the latter at once where no node can take it. Returns the request's number."""
        number = next(self._numbers)
        decode = self._least_busy("decode", "colocated")
        prefill = self._least_busy("prefill")
        if not self.ready() or decode is None:
            deliver(Ended(number, "not_ready", "the nodes are not ready", 0, 0))
            return number
        self._requests[number] = _Request(decode, prefill, deliver)
        for node in filter(None, (decode, prefill)):
            node.requests.add(number)
        name = prefill.name if prefill is not None else ""
        self._send(decode.name, [Generate(number, scope, tokens, params, name)])
        return number

    def close(self, number: int) -> None:
        """Nobody waits for this request any more: abort it where it still runs."""
        request = self._requests.get(number)
        if request is not None:
            self._forget(number)
            self._send(request.node.name, [Abort(number)])

    def end(self, number: int, code: str, message: str) -> None:
        """End a request here, for a reason of the gateway's; the node is not asked."""
        self._requests[number].deliver(Ended(number, code, message, 0, 0))
        self._forget(number)

    # -- nodes

    def joined(self, name: str, ready: Ready) -> None:
        """A node is ready: introduce it to those it works with.

        A dead one's last word may come after the news of its death; it stays dead.
        """
        if name in self._gone:
            return
        node = self.nodes[name] = Node(name, ready)
        self._judge()
        for other in self.nodes.values():
            for decode, prefill in ((node, other), (other, node)):
                if (decode.role, prefill.role) == ("decode", "prefill"):
                    self._send(decode.name, [PeerUp(prefill.name, prefill.ready.address)])

    def hear(self, name: str, message: Delta | Ended | Distrust | Condemned) -> None:
        """What a node says of a request, of a peer, or of itself."""
        match message:
            case Delta() | Ended():
                request = self._requests.get(message.request)
                if request is None:
                    return  # given up here; its abort is on the way
                if request.node.name != name:
                    log.error("%s speaks of request %d of another", name, message.request)
                    return
                request.deliver(message)
                if isinstance(message, Ended):
                    self._forget(message.request)
            case Distrust(name=other):
                self._retire(other, "claimed writes that are not there")
            case Condemned():
                self._retire(name, "has pages that somebody unknown has written")

    def exited(self, name: str) -> None:
        """The node's process has ended, as its parent saw: it writes no more."""
        self._gone.add(name)
        node = self.nodes.pop(name, None)
        if node is None:
            return
        self._judge()
        for number in [n for n, r in self._requests.items() if r.node is node]:
            self.end(number, "node_lost", "the node that answered this request died")
        for other in self.nodes.values():
            self._send(other.name, [PeerDead(name)])

    # -- private

    def _judge(self) -> None:
        """The pool of a node that joins was sized anew: it may be too small for the window."""
        self.refusal = self._refuse(self.ranks()) if self.tokens_max() else ""

    def _usable(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.retiring]

    def _least_busy(self, *roles: str) -> Node | None:
        nodes = [node for node in self._usable() if node.role in roles]
        return min(nodes, key=lambda node: len(node.requests), default=None)

    def _retire(self, name: str, why: str) -> None:
        """Give a node no more work, and replace it when what it has ends."""
        node = self.nodes.get(name)
        if node is not None and not node.retiring:
            log.error("%s %s: it is replaced", name, why)
            node.retiring = True
            self._judge()
            self._end_if_retired(node)

    def _end_if_retired(self, node: Node) -> None:
        if node.retiring and not node.requests:
            self._end_process(node.name)

    def _forget(self, number: int) -> None:
        """The request needs no node any more."""
        request = self._requests.pop(number)
        for node in filter(None, (request.node, request.prefill)):
            node.requests.discard(number)
            self._end_if_retired(node)
