"""Server-sent events of an engine's answer, bounded, and strict about how they end."""

from collections.abc import AsyncIterator

EVENT_MAX = 64 * 1024 * 1024
"""Bytes of one event. An engine may send the whole answer so far with each token, with twenty
log-probabilities for each of its tokens."""
DONE = b"[DONE]"


class EventsError(Exception):
    """These are no events, or they were cut off; nothing of them is in the message."""


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event of a body, up to ``[DONE]``, which is not given out.

    Raises:
        EventsError: it ends without ``[DONE]``, goes on after it, or holds something else.
    """
    buffer = bytearray()
    searched = 0
    done = False
    async for chunk in chunks:
        buffer += chunk
        while (end := buffer.find(b"\n\n", searched)) >= 0:
            block = bytes(buffer[:end])
            del buffer[: end + 2]
            searched = 0
            data = _data(block)
            if data is None:
                continue
            if done:
                raise EventsError("an event after the end")
            if data == DONE:
                done = True
            else:
                yield data
        searched = max(0, len(buffer) - 1)
        if len(buffer) > EVENT_MAX:
            raise EventsError(f"an event of more than {EVENT_MAX >> 20} MiB")
    if buffer or not done:
        raise EventsError("the answer was cut off")


def _data(block: bytes) -> bytes | None:
    """None for a comment, which keeps the connection open."""
    parts = []
    for line in block.split(b"\n"):
        if line.startswith(b"data:"):
            parts.append(line[5:].removeprefix(b" "))
        elif not line.startswith(b":"):
            raise EventsError("the answer holds no events")
    return b"\n".join(parts) if parts else None
