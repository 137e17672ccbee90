"""A toy of an OpenAI-compatible endpoint that leaks on purpose, in one way at a time, or not.

Its tokens are words, its answer is the end of the prompt, its memory is what others sent last. It
leaks by construction, as the reports say; no engine is in it.
"""

import asyncio
import json
import random
from typing import Any, Literal

from probe_kit import MODEL, STREAM_HEAD, Request, completion, event, http, refusal, stream

Leak = Literal[
    "none",
    "placeholder",  # sglang#30233: over-long is answered out of the other's pages
    "cut",  # over-long is cut to what fits, in silence
    "empty",  # sglang#33507: an abort served as an empty answer
    "hang up",  # over-long takes the worker down
    "residue",  # llama.cpp#27148: the other's conversation goes on in the next answer
    "garbled",  # the same, with every fifth character wrong
    "error page",  # the other's text stands in an error page
    "swap",  # cloudflare/ai#620: a stream gets the answer of another that runs
    "words",  # mlx-lm#965: streams mix word by word
    "one name",  # all answers have one name
    "html",  # nothing but a page
]
OVERHEAD = 3


class Toy:
    """Use its `speak` with `probe_kit.serving`.

    Args:
        window: what ``/models`` states, in words, prompt and answer.
        pool: what really fits.
        share: the share of answers that leak.
        says: whether ``/models`` states the window, errors name the limit, answers count.
    """

    def __init__(
        self,
        leak: Leak = "none",
        *,
        window: int = 900,
        pool: int | None = None,
        share: float = 1.0,
        says: bool = True,
        echoes: bool = True,
    ) -> None:
        self.leak = leak
        self.window = window
        self.pool = window if pool is None else pool
        self.says = says
        self._share = share
        self._echoes = echoes
        self._random = random.Random(20261202)
        self._memory: list[tuple[str, str]] = []
        self._queue: list[str] = []
        self._live: list[list[str]] = []
        self._count = 0

    async def speak(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """One request."""
        if self.leak == "html":
            writer.write(http(b"<html>Welcome</html>"))
        elif request.method == "GET":
            window = {"max_model_len": self.window} if self.says else {}
            writer.write(http(json.dumps({"data": [{"id": MODEL, **window}]}).encode()))
        else:
            await self._answer(request, writer)

    def tokens(self, prompt: str) -> int:
        """Its tokens are words."""
        return len(prompt.split()) + OVERHEAD

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        fields = request.fields
        words = request.prompt.split()
        count = self.tokens(request.prompt)
        self._count += 1
        other = self._other(request.account)
        over = count + fields["max_tokens"] > self.pool
        if not over:
            self._memory = [*self._memory[-20:], (request.account, request.prompt)]
        if over and self._over(writer, count, other):
            return
        text = " ".join(words[-fields["max_tokens"] :]) if self._echoes else "I will not repeat it."
        leaks = other and self._random.random() < self._share
        if leaks and self.leak == "residue":
            text = other
        elif leaks and self.leak == "garbled":
            text = "".join("_" if i % 5 == 4 else c for i, c in enumerate(other))
        elif leaks and self.leak == "error page":
            writer.write(http(f"<html>failed: {other}</html>".encode(), 500))
            return
        if fields.get("stream"):
            await self._stream(text.split(), count, writer)
        else:
            writer.write(http(self._completion(text, count)))

    def _completion(self, text: str, count: int, **more: Any) -> bytes:
        body = json.loads(completion(text, prompt_tokens=count, **more))
        if not self.says:
            del body["usage"]
        return json.dumps(body).encode()

    def _other(self, account: str) -> str:
        """The end of what the other account sent last, a secret in it."""
        texts = [text for owner, text in self._memory if owner != account]
        return " ".join(texts[-1].split()[-45:]) if texts else ""

    def _over(self, writer: asyncio.StreamWriter, count: int, other: str) -> bool:
        """An over-long prompt; False where it is answered as if it were not."""
        if self.leak == "placeholder":
            writer.write(http(self._completion(other or "the the the", 1)))
        elif self.leak == "cut":
            writer.write(http(self._completion("as you wish", self.pool - 10)))
        elif self.leak == "empty":
            writer.write(http(completion("", prompt_tokens=count, finish_reason="length")))
        elif self.leak == "hang up":
            writer.write(http(b'{"detail": "worker died"}', 500))
        elif self.says:
            writer.write(refusal(f"context length is {self.pool} tokens, not {count}"))
        else:
            writer.write(refusal("the prompt is too long"))
        return True

    async def _stream(self, words: list[str], count: int, writer: asyncio.StreamWriter) -> None:
        name = "c-1" if self.leak == "one name" else f"c-{self._count}"
        self._queue += words
        self._live.append(words)
        await asyncio.sleep(0.02)  # until all of a round are here
        shown = words
        if self.leak == "swap":
            shown = self._random.choice(self._live)
        writer.write(STREAM_HEAD)
        for index in range(len(words)):
            word = shown[index % len(shown)]
            if self.leak == "words":
                word = self._queue.pop(self._random.randrange(min(8, len(self._queue))))
            writer.write(event(f"{word} ", name))
            await asyncio.sleep(0)
        for last in stream([], name, count):
            writer.write(last)
        self._live.remove(words)
