"""A toy endpoint in a loop of its own, for commands that run theirs."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from probe_kit import Server, Speak, serving


@contextlib.contextmanager
def threaded(speak: Speak) -> Iterator[Server]:
    """Serves until the block ends."""
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()
    found: list[Server] = []

    async def serve() -> None:
        async with serving(speak) as server:
            found.append(server)
            ready.set()
            await stop.wait()

    def work() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
