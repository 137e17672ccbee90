"""A toy of a gateway in front of an endpoint, for the techniques that `probe_toy` has no leak for.

Its tokens are words; its answer is what its context says, what stands in a picture, or the end of
the prompt; its clock counts requests. It leaks by construction, in one way at a time, as the
reports say.
"""

import asyncio
import base64
import json
import random
import re
import zlib
from typing import Any, Literal

from probe_kit import MODEL, STREAM_HEAD, Request, completion, event, http, refusal
from sekisho.probe.techniques.pictures import rows

Leak = Literal[
    "none",
    "page",  # HTML only
    # abort
    "left in the pool",  # OpenAI 2023-03-20: a cancelled request's answer waits for the next reader
    "half closed",  # only who closes its half leaves something behind
    "half a body",  # only who ends in the middle of a body does
    # prefix
    "continues",  # vllm PR#12621: the entry of a longer text is taken for its beginning
    "continues by salt",  # the same, only under an equal salt
    "salt is adapter",  # vllm#44701: the same, under a salt that is the other's adapter
    "pictures by text",  # lmcache#690: all pictures with one text share an answer
    # ids
    "by id",  # vllm#10583: an id's second request gets the first's answer
    "streams by id",  # vllm PR#27987: of two that run, the later overwrites the earlier
    "named by id",  # answers have the name that the client chose
    "own sessions",  # no leak: an account's own session goes on in its answers
    # response cache
    "by question",  # OmniRoute#3740
    "nearly",  # litellm#19575
    "by body",  # the same, of whole requests
    "by body, renamed",  # the same, with a new name and time
    "own cache",  # no leak: by account
    "greedy",  # no leak: nothing is drawn
    "one name",  # no leak that names could show: all answers have one name and time
    "counted",  # no leak: answers are counted by account, and have one time
]
ADAPTER = "toy-adapter"
_IDS = "request_id", "rid", "user", "session_id", "safety_identifier", "prompt_cache_key"


class GatewayToy:
    """Use its `speak` and `half` with `probe_kit.serving`.

    Args:
        refuses: fields and headers that are refused with 400; "completions", "system" and
            "pictures" likewise.
        word_s: how long a word takes.
        echoes: whether answers hold anything of a prompt.
    """

    def __init__(
        self,
        leak: Leak = "none",
        *,
        refuses: frozenset[str] = frozenset(),
        word_s: float = 0.0,
        echoes: bool = True,
    ) -> None:
        self.leak = leak
        self._refuses = refuses
        self._word_s = word_s
        self._echoes = echoes
        self._random = random.Random(20261202)
        self._left: list[tuple[str, str]] = []
        self._stored: dict[object, Any] = {}
        self._texts: list[tuple[str, object, str]] = []
        self._counts = {"A": 0, "B": 0}
        self._clock = 0

    async def speak(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """One request."""
        if self.leak == "page":
            writer.write(http(b"<html>Welcome</html>"))
        elif request.method == "GET":
            models = [{"id": MODEL}, {"id": ADAPTER, "parent": MODEL}, {"id": "other"}]
            writer.write(http(json.dumps({"data": models}).encode()))
        elif refused := self._refused(request):
            writer.write(refusal(f"{refused} is not known"))
        else:
            self._clock += 1
            self._counts[request.account] += 1
            await self._answer(request, writer)

    def half(self, body: bytes) -> None:
        """The first half of a body, of the first account."""
        if self.leak == "half a body":
            self._left.append(("A", body.decode()))

    def _refused(self, request: Request) -> str:
        fields = request.fields
        has = {*fields, *request.headers}
        has |= {"completions"} if "prompt" in fields else set()
        has |= {message["role"] for message in fields.get("messages", [])}
        has |= {"pictures"} if isinstance(request_content(fields), list) else set()
        return next((one for one in sorted(self._refuses) if one.lower() in has), "")

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        fields = request.fields
        name, created, text = self._said(request)
        try:
            if fields.get("stream"):
                if self.leak == "streams by id":
                    self._stored[chosen(request)] = text
                    await asyncio.sleep(0.02)
                    text = self._stored[chosen(request)]
                await self._stream(text, name, writer)
            else:
                await asyncio.sleep(self._word_s * len(text.split()))
                raw = http(completion(text, id=name, created=created))
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

    def _said(self, request: Request) -> tuple[str, int, str]:
        """Name, time and text of the answer."""
        key = self._key(request)
        created = 7 if self.leak in ("one name", "counted") else self._clock
        new = (self._name(request), created, self._text(request))
        if key is None:
            return new
        found: tuple[str, int, str] = self._stored.setdefault(key, new)
        return (*new[:2], found[2]) if self.leak == "by body, renamed" else found

    def _name(self, request: Request) -> str:
        if self.leak == "named by id":
            return str(chosen(request) or f"c-{self._clock}")
        if self.leak == "one name":
            return "c-1"
        if self.leak == "counted":
            return f"c-{self._counts[request.account]}"
        return f"c-{self._clock}"

    def _key(self, request: Request) -> object:
        """Of an answer that is stored; None: it is not."""
        fields = request.fields
        question = str(request_content(fields))
        match self.leak:
            case "by id":
                return chosen(request)
            case "by question":
                return question
            case "nearly":
                return tuple(re.findall(r"secret|named|\d+", question.lower())) or None
            case "by body" | "by body, renamed":
                return json.dumps(fields)
            case "own cache":
                return request.account, json.dumps(fields)
            case "pictures by text":
                picture = isinstance(request_content(fields), list)
                return request_content(fields)[-1]["text"][-20:] if picture else None
            case _:
                return None

    def _text(self, request: Request) -> str:
        fields = request.fields
        size = fields["max_tokens"]
        for owner, left in self._left:
            if owner != request.account:
                self._left.remove((owner, left))
                return left
        if fields["temperature"] > 0.9 and self.leak != "greedy":
            return " ".join(self._random.choice(("sun", "moon", "rain")) for _ in range(size))
        if not self._echoes:
            return "I will not repeat it."
        if isinstance(content := request_content(fields), list):
            return read_picture(content)
        messages = fields.get("messages", [{}])
        if len(messages) > 1:
            return str(messages[-2 if len(messages) > 2 else 0]["content"])
        own = ""
        if self.leak == "own sessions":
            key = request.account, chosen(request)
            own = self._stored.get(key, "")
            self._stored[key] = request.prompt[-200:]
        return own + (self._continued(request) or " ".join(request.prompt.split()[-size:]))

    def _continued(self, request: Request) -> str:
        """What follows in the longest text of anybody that begins with this prompt."""
        fields = request.fields
        salt = fields.get("cache_salt")
        scopes: dict[str, object] = {
            "continues": MODEL,
            "continues by salt": salt,
            "salt is adapter": ADAPTER if ADAPTER in (salt, fields["model"]) else None,
        }
        scope = scopes.get(self.leak)
        found = [
            text[len(request.prompt) :]
            for owner, other, text in self._texts
            if owner != request.account and other == scope and text.startswith(request.prompt)
        ]
        if scope is not None:
            self._texts.append((request.account, scope, request.prompt))
        return max(found, key=len, default="")


def request_content(fields: dict[str, Any]) -> Any:
    """Of the last message, or the prompt."""
    return fields["prompt"] if "prompt" in fields else fields["messages"][-1]["content"]


def chosen(request: Request) -> object:
    """The id that the client chose, by whichever way; None: by none."""
    fields = request.fields
    found = [request.headers.get("x-request-id"), *(fields.get(name) for name in _IDS)]
    found.append(fields.get("metadata", {}).get("session_id"))
    return next((one for one in found if one), None)


def read_picture(content: list[dict[str, Any]]) -> str:
    """The digits that stand in the first picture; what any reader of PNG and of digits would."""
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    if not urls:
        return "I see no picture."
    raw = base64.b64decode(urls[0].removeprefix("data:image/png;base64,"))
    at = raw.index(b"IDAT")
    data = zlib.decompress(raw[at + 4 : at + 4 + int.from_bytes(raw[at - 4 : at], "big")])
    width = int.from_bytes(raw[16:20], "big")
    lines = [data[i + 1 : i + 1 + width] for i in range(0, len(data), width + 1)]
    font = {tuple(glyph(rows(one), 16)): one for one in "0123456789 "}
    return "".join(font[tuple(glyph(lines, 16 + 48 * n))] for n in range((width - 32 + 8) // 48))


def glyph(lines: list[bytes], left: int) -> list[bytes]:
    """The points of one digit, 40 wide."""
    return [line[left : left + 40] for line in lines]
