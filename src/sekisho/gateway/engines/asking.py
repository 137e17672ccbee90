"""How every engine's servers are reached, and what it means when one does not describe itself."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from sekisho.gate.fetch import Client, Key, RefusedError
from sekisho.gate.model import ReadError
from sekisho.gateway.engines.replica import UnfitError

EXAMINE_S = 10.0
"""How long a server may take to describe itself; its scheduler answers between two passes."""
CONNECT_S = 2.0


def session(key: Key | None) -> aiohttp.ClientSession:
    """For requests. A connection a request: an idle one may lead to a server that is gone, and
    engines close them after some seconds, perhaps while the next request is on its way."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={} if key is None else {"Authorization": key.header()},
        trust_env=False,
    )


def getter(
    client: Client, url: str, key: Key | None
) -> Callable[[str], Coroutine[Any, Any, bytes]]:
    """Bodies below ``url``, each asked for once."""
    asked: dict[str, asyncio.Task[bytes]] = {}

    async def get(path: str) -> bytes:
        if path not in asked:
            asked[path] = asyncio.create_task(client.get(url, path, key))
        return await asked[path]

    return get


@asynccontextmanager
async def examining() -> AsyncIterator[None]:
    """Around the reading of one server.

    Raises:
        UnfitError: it does not answer, is late, or says nothing usable.
    """
    try:
        async with asyncio.timeout(EXAMINE_S):
            yield
    except TimeoutError:
        raise UnfitError(f"no whole answer within {EXAMINE_S:g} s", late=True) from None
    except RefusedError as error:
        raise UnfitError(str(error)) from None
    except ReadError as error:
        raise UnfitError(str(error), late=error.inconclusive) from None
