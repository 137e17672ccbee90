"""A toy of a gateway in front of an endpoint, for the techniques that `probe_toy` has no leak for.

Its tokens are words, its answer is the end of the prompt; its clock counts requests. It leaks by
construction, in one way at a time, as the reports say.
"""

import asyncio
import json
from typing import Literal

from probe_kit import MODEL, STREAM_HEAD, Request, completion, event, http

Leak = Literal[
    "none",
    "page",  # HTML only
    # abort
    "left in the pool",  # OpenAI 2023-03-20: a cancelled request's answer waits for the next reader
    "half closed",  # only who closes its half leaves something behind
    "half a body",  # only who ends in the middle of a body does
]


class GatewayToy:
    """Use its `speak` and `half` with `probe_kit.serving`.

    Args:
        refuses: fields that are refused with 400; "chat", "completions" and "system" too.
        word_s: how long a word of a stream takes.
    """

    def __init__(
        self,
        leak: Leak = "none",
        *,
        refuses: frozenset[str] = frozenset(),
        word_s: float = 0.002,
    ) -> None:
        self.leak = leak
        self._refuses = refuses
        self._word_s = word_s
        self._left: list[tuple[str, str]] = []
        self._clock = 0

    async def speak(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """One request."""
        if self.leak == "page":
            writer.write(http(b"<html>Welcome</html>"))
        elif request.method == "GET":
            writer.write(http(json.dumps({"data": [{"id": MODEL}]}).encode()))
        else:
            self._clock += 1
            await self._answer(request, writer)

    def half(self, body: bytes) -> None:
        """The first half of a body, of the first account."""
        if self.leak == "half a body":
            self._left.append(("A", body.decode()))

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        fields = request.fields
        words = request.prompt.split()
        text = " ".join(words[-fields["max_tokens"] :])
        for owner, left in self._left:
            if owner != request.account:
                self._left.remove((owner, left))
                text = left
                break
        name = f"c-{self._clock}"
        try:
            if fields.get("stream"):
                await self._stream(text, name, writer)
            else:
                await asyncio.sleep(self._word_s * len(text.split()))
                raw = http(completion(text, id=name, prompt_tokens=len(words)))
                writer.write(raw[:20])
                await asyncio.sleep(self._word_s)  # a client that has gone is known by its reset
                writer.write(raw[20:])
                await writer.drain()
        except OSError:
            if self.leak == "left in the pool":
                self._left.append((request.account, request.prompt))
            raise
        if request.reader.at_eof() and self.leak == "half closed":
            self._left.append((request.account, request.prompt))

    async def _stream(self, text: str, name: str, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for word in text.split():
            writer.write(event(f"{word} ", name))
            await writer.drain()
            await asyncio.sleep(self._word_s)
        writer.write(event("", name, "stop") + b"data: [DONE]\n\n")
        await writer.drain()
