"""How decode learns that prefill writes no more: it asks, until it is told or prefill is gone.

    decode                          prefill worker
    load failed, blocks pinned
      | DRAIN transfer  ----------> no new write for this transfer from here on
      | <---------- {drained}       whether any is under way
      | … asked again …
      | connection refused          the process that could write has ended

One JSON line each way over TCP, signed like the manifest that named the address. Asking again is
all that time does: no block is freed by it. Where decode reads, it asks the same server whether the
blocks of a request were held (`witness.py`).
"""

import contextlib
import json
import logging
import socket
import socketserver
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sekisho.guard.sockets import gone
from sekisho.guard.vllm.manifest import mac, signed

log = logging.getLogger("vllm.sekisho")
ASK_EVERY_S = 0.5
_WAIT_S = 2.0
_PATIENCE = 4
"""How many times `ASK_EVERY_S` a load may take before its prefill is looked at."""
_LINE_MAX = 4096
_REMEMBERED = 1 << 16


class Flights:
    """Prefill's writes by transfer: which are under way, which may not begin. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[str, int] = {}
        self._refused: OrderedDict[str, None] = OrderedDict()

    def begin(self, transfer: str) -> bool:
        """A write is about to be made; False: it must not be."""
        with self._lock:
            if transfer in self._refused:
                return False
            self._under_way[transfer] = self._under_way.get(transfer, 0) + 1
            return True

    def end(self, transfer: str) -> None:
        """It was made, or was not begun; whoever doubts that does not call this."""
        with self._lock:
            self._under_way[transfer] -= 1
            if not self._under_way[transfer]:
                del self._under_way[transfer]

    def drain(self, transfer: str) -> bool:
        """Begin no more; whether none is under way."""
        with self._lock:
            self._refused[transfer] = None
            self._refused.move_to_end(transfer)
            while len(self._refused) > _REMEMBERED:
                self._refused.popitem(last=False)
            return transfer not in self._under_way


class Drains(Protocol):
    """`Flights`, or whatever else knows of writes."""

    def drain(self, transfer: str) -> bool: ...


class DrainServer:
    """Answers for one prefill worker, in threads of its own. ``address``: ``host:port``.

    ``flights`` and ``held``: what to answer by (`kind.Kind`); without ``held`` nothing ever was.
    """

    def __init__(
        self,
        flights: "Drains",
        key: bytes,
        host: str,
        held: Callable[[str], bool] | None = None,
    ) -> None:
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = _WAIT_S

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    self.wfile.write(outer.answer(self.rfile.readline(_LINE_MAX)))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._flights = flights
        self._held = held
        self._key = key
        self._server = Server((host, 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, name="sekisho-drain", daemon=True
        ).start()

    def answer(self, line: bytes) -> bytes:
        """One line for one line; what is not signed with our key is told nothing."""
        try:
            asked = json.loads(line)
            [question] = asked.keys() - {"mac"}
            about, signature = str(asked[question]), asked["mac"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return b"{}\n"
        if question == "transfer" and signed(self._key, "drain", about, signature):
            return self._said("drained", about, self._flights.drain(about))
        if question == "request" and signed(self._key, "holds", about, signature):
            return self._said("held", about, self._held is not None and self._held(about))
        return b"{}\n"

    def _said(self, what: str, about: str, answer: bool) -> bytes:
        said = mac(self._key, what, [about, answer])
        return json.dumps({what: answer, "mac": said}).encode() + b"\n"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass(eq=False)
class Doubt:
    """A transfer that may still write. ``workers``: where to ask; ``over``: those that said no."""

    transfer: str
    name: str
    workers: tuple[str, ...]
    asked: int = 0
    over: set[str] = field(default_factory=set)


class Asker:
    """Decode's thread: it asks about writers in doubt, and watches those that are trusted, so that
    the death of one is known before the inner connector's patience ends.

    All methods are the scheduler's.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._open: list[Doubt] = []
        self._watched: dict[str, Doubt] = {}
        self._over: deque[str] = deque()
        self._gone: deque[str] = deque()
        self._wake = threading.Event()
        threading.Thread(target=self._run, name="sekisho-ask", daemon=True).start()

    def ask(self, transfer: str, name: str, workers: tuple[str, ...]) -> None:
        """From now on, until every one of ``workers`` has drained or is gone."""
        with self._lock:
            self._open.append(Doubt(transfer, name, workers))
        self._wake.set()

    def watch(self, name: str, workers: tuple[str, ...]) -> None:
        """A request waits for ``workers``, until `unwatch`."""
        with self._lock:
            self._watched[name] = Doubt("", name, workers)
        self._wake.set()

    def unwatch(self, name: str) -> None:
        with self._lock:
            self._watched.pop(name, None)

    def take_gone(self) -> list[str]:
        """Names of watched requests of which a worker has died, each once."""
        out = []
        while self._gone:
            out.append(self._gone.popleft())
        return out

    def open_count(self) -> int:
        with self._lock:
            return len(self._open) + len(self._over)

    def take_over(self) -> list[str]:
        """Names of requests whose writers are over, each once; what they had sent may not have
        been read yet."""
        out = []
        while self._over:
            out.append(self._over.popleft())
        return out

    def _run(self) -> None:
        while True:
            self._wake.wait()
            with self._lock:
                doubts, watched = list(self._open), list(self._watched.values())
            for doubt in watched:
                self._look_at(doubt)
            for doubt in doubts:
                try:
                    self._ask_one(doubt)
                except Exception:
                    log.exception("sekisho: asking to drain %s failed", doubt.transfer)
            with self._lock:
                for doubt in doubts:
                    # A manifest without an address has nobody who could say it is over.
                    if doubt.workers and doubt.over >= set(doubt.workers):
                        self._open.remove(doubt)
                        self._over.append(doubt.name)
                if not self._open and not self._watched:
                    self._wake.clear()
            threading.Event().wait(ASK_EVERY_S)

    def _look_at(self, doubt: Doubt) -> None:
        """A transfer takes less than a moment: only one that waits longer is looked at."""
        doubt.asked += 1
        if doubt.asked <= _PATIENCE:
            return
        for worker in doubt.workers:
            host, _, port = worker.rpartition(":")
            if gone(host, int(port)):
                with self._lock:
                    if self._watched.pop(doubt.name, None) is doubt:
                        self._gone.append(doubt.name)
                return

    def _ask_one(self, doubt: Doubt) -> None:
        doubt.asked += 1
        for worker in set(doubt.workers) - doubt.over:
            host, _, port = worker.rpartition(":")
            if drained(self._key, host, int(port), doubt.transfer):
                doubt.over.add(worker)
            elif doubt.asked > 1 and gone(host, int(port)):
                log.warning("sekisho: prefill worker %s is gone; its writes are over", worker)
                doubt.over.add(worker)


def drained(key: bytes, host: str, port: int, transfer: str) -> bool:
    """Whether the guard there says that nothing of ``transfer`` is under way, nor will be."""
    asked = {"transfer": transfer, "mac": mac(key, "drain", transfer)}
    return _answer(key, (host, port), asked, "drained", transfer) is True


def held(key: bytes, host: str, port: int, request: str) -> bool | None:
    """Whether the guard there says that it held the blocks of ``request`` until now, or until they
    were read; None: no answer that can be believed."""
    asked = {"request": request, "mac": mac(key, "holds", request)}
    return _answer(key, (host, port), asked, "held", request)


def _answer(
    key: bytes, where: tuple[str, int], asked: dict[str, str], what: str, about: str
) -> bool | None:
    try:
        with socket.create_connection(where, timeout=_WAIT_S) as link:
            link.sendall(json.dumps(asked).encode() + b"\n")
            answer: Any = json.loads(link.makefile("rb").readline(_LINE_MAX))
    except (OSError, ValueError):
        return None
    said = answer.get(what) if isinstance(answer, dict) else None
    if not isinstance(said, bool) or not signed(key, what, [about, said], answer.get("mac")):
        return None
    return said
