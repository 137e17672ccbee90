"""The other end of a transport test: a process of its own, asked through a pipe."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from sekisho.transport import Transport, TransportError, create_transport
from sekisho.transport.mooncake_engine import load_engine

ANSWER_S = 40.0


def open_transport(kind: str, page_bytes: int, page_count: int) -> Transport:
    """A transport of ``kind``; skips if Mooncake is not installed and nobody insists on it."""
    if kind == "mooncake" and os.environ.get("SEKISHO_REQUIRE_MOONCAKE") != "1":
        try:
            load_engine("tcp")
        except TransportError as error:
            pytest.skip(str(error))
    return create_transport(kind, page_bytes, page_count).transport


class Peer:
    """A spawned process that owns a region; `ask` calls one of the functions below in it."""

    def __init__(self, kind: str, page_bytes: int, page_count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, kind, page_bytes, page_count), daemon=True
        )
        self.process.start()
        theirs.close()
        self.endpoint: str = self._receive()

    def ask(self, question: Callable[..., Any], *arguments: object) -> Any:
        self.begin(question, *arguments)
        return self._receive()

    def begin(self, question: Callable[..., Any], *arguments: object) -> None:
        """Ask without waiting; `end` brings the answer."""
        self._pipe.send((question, arguments))

    def end(self) -> Any:
        return self._receive()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()

    def _receive(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError("the peer process does not answer")
        return self._pipe.recv()


def _serve(pipe: Connection, kind: str, page_bytes: int, page_count: int) -> None:
    transport = create_transport(kind, page_bytes, page_count).transport
    pages = transport.region.reshape(page_count, page_bytes)
    pipe.send(transport.endpoint())
    while True:
        question, arguments = pipe.recv()
        pipe.send(question(pages, *arguments))


# questions, answered in the peer: `pages` is its region, uint8 [page_count, page_bytes]


def page_bytes_of(pages: Any, index: int) -> bytes:
    data: bytes = pages[index].tobytes()
    return data


def written_pages(pages: Any) -> list[int]:
    """Pages in which any byte is not zero."""
    return [int(index) for index in np.flatnonzero(pages.any(axis=1))]


def watch_headers(pages: Any, expected: dict[int, tuple[bytes, int]]) -> list[int]:
    """Spin until every header of ``expected`` (page -> header, payload byte) has come; return
    the pages whose payload was not all there at the moment their header was seen."""
    torn = []
    open_pages = dict(expected)
    while open_pages:
        for index, (header, value) in list(open_pages.items()):
            if pages[index, :64].tobytes() == header:
                if not (pages[index, 64:] == value).all():
                    torn.append(index)
                del open_pages[index]
    return torn
