"""What all readers share: how an engine is asked, and how a number of its answer is believed."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from sekisho.gate.fetch import clip
from sekisho.gate.model import ReadError, Role

TOKENS_MAX = 2**50
"""Above any pool that can exist: a larger number is a mistake or a lie."""

Get: TypeAlias = Callable[[str], Coroutine[Any, Any, bytes]]
"""The body of a path; see `fetch.Client.get` for its errors."""

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Ask:
    """One engine to read. ``role``: the one it was named for, where its answers do not show it."""

    source: str
    get: Get
    role: Role | None = None


class ModelEntry(msgspec.Struct):
    """One entry of ``/v1/models``; the names of the window differ by server."""

    id: str
    owned_by: str = ""
    parent: str | None = None
    max_model_len: int | None = None
    context_length: int | None = None
    context_window: int | None = None
    max_context_length: int | None = None

    def window(self) -> int | None:
        """The largest window that the entry states."""
        stated = (
            self.max_model_len,
            self.context_length,
            self.context_window,
            self.max_context_length,
        )
        return max((w for w in stated if w is not None), default=None)


class Models(msgspec.Struct):
    """``/v1/models``."""

    data: list[ModelEntry]


def decode(body: bytes, kind: type[T], path: str) -> T:
    """``body`` as JSON of this shape. Fields that it does not name are never even created, which
    is how the keys in SGLang's answer stay out.

    Raises:
        ReadError: malformed, or of another shape; the field is named and no value is.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ReadError(f"{path}: {clip(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        what = "HTML" if body.lstrip()[:1] == b"<" else "not whole JSON"
        raise ReadError(f"{path}: the answer is {what}") from None
    except RecursionError:
        raise ReadError(f"{path}: the answer is nested too deep") from None


def tokens(value: int, name: str, low: int = 1) -> int:
    """``value``, if it can be a number of tokens.

    Raises:
        ReadError: below ``low``, or beyond `TOKENS_MAX`.
    """
    if not low <= value <= TOKENS_MAX:
        raise ReadError(f"{name} is {value}, which is no number of tokens")
    return value


def whole(text: str, name: str) -> int:
    """The decimal number in ``text``.

    Raises:
        ReadError: anything else, also a fraction.
    """
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ReadError(f"{name} is not a whole number")
    return int(text)


async def models(get: Get) -> list[ModelEntry]:
    """The entries of ``/v1/models``, base models first (an adapter names its parent)."""
    listed = decode(await get("/v1/models"), Models, "/v1/models").data
    if not listed:
        raise ReadError("/v1/models lists no model", inconclusive=True)
    return sorted(listed, key=lambda entry: entry.parent is not None)


def advertised(entries: list[ModelEntry]) -> int | None:
    """The largest window among ``entries``, checked."""
    windows = [tokens(w, "the window of /v1/models") for e in entries if (w := e.window())]
    return max(windows, default=None)


async def all_of(
    first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B], third: Coroutine[Any, Any, C]
) -> tuple[A, B, C]:
    """The three results, asked for at once; the first error ends the other two."""
    tasks = asyncio.create_task(first), asyncio.create_task(second), asyncio.create_task(third)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
