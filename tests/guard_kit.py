"""Two small pools under guard, and a writer that moves headers between them as a transfer does."""

import socket
from collections.abc import Sequence

import numpy as np

from sekisho.core.ledger import Pages
from sekisho.core.memory import Headers, Words
from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.guard.keeper import Holding, Keeper

SIZE = 16
LAYOUT = PageLayout(SIZE, 1, 1, 1, 1, "m")


def pages(*indices: int) -> Pages:
    return np.array(indices, np.intp)


def new_keeper(page_count: int = 12, incarnation: int = 7) -> Keeper:
    memory = np.zeros(page_count * HEADER_SIZE, np.uint8)
    return Keeper(LAYOUT, incarnation, Headers(memory, LAYOUT, page_count, HEADER_SIZE))


def prompt(length: int, text: int = 0) -> list[int]:
    """Token ids; texts of two numbers differ in every page."""
    return [text * 1000 + position for position in range(length)]


def computed(keeper: Keeper, scope: str, tokens: Sequence[int], row: Pages) -> Holding:
    """A request that this engine has computed into ``row``."""
    holding = keeper.open(f"request of {scope}", scope)
    keeper.claim(holding, row)
    keeper.wrote(holding, tokens, 0, row)
    return holding


def offered(keeper: Keeper, scope: str, tokens: Sequence[int], row: Pages) -> Holding:
    """A request whose pages ``row`` wait for a remote writer."""
    holding = keeper.open(f"request of {scope}", scope)
    keeper.claim(holding, row)
    keeper.expect(holding, tokens)
    return holding


def sent(scope: str, tokens: Sequence[int], to: Holding) -> Words:
    """The headers that a prefill server writes for ``tokens``, under the lease of ``to``."""
    count = LAYOUT.pages_for(len(tokens))
    source = new_keeper(count + 1, incarnation=9)
    row = np.arange(1, count + 1)
    computed(source, scope, tokens, row)
    words = source.headers.gather(row)
    words[:, 1:3] = to.lease
    return words


def closed_port() -> int:
    """A port of loopback that refuses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
