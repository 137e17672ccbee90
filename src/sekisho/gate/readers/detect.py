"""Which engine answers here, told from its answers."""

from collections.abc import Awaitable, Callable

from sekisho.gate.fetch import MissingError
from sekisho.gate.model import Engine, ReadError, Reading
from sekisho.gate.readers import llamacpp, sekisho, sglang, tgi, vllm
from sekisho.gate.readers.base import Ask, models

READERS: dict[Engine, Callable[[Ask], Awaitable[Reading | list[Reading]]]] = {
    "sekisho": sekisho.read,  # one address for all roles
    "sglang": sglang.read,
    "vllm": vllm.read,
    "llama.cpp": llamacpp.read,
    "tgi": tgi.read,
}
_OWNERS: dict[str, Engine] = {
    "sekisho": "sekisho",
    "sglang": "sglang",
    "vllm": "vllm",
    "llamacpp": "llama.cpp",
}


async def detect(ask: Ask) -> Engine:
    """By ``owned_by`` in ``/v1/models``; TGI, which states none that is its own, by ``/info``.

    Raises:
        ReadError: none of them; name the engine.
    """
    try:
        owners = {entry.owned_by for entry in await models(ask.get)}
    except MissingError:
        owners = set()
    known = {_OWNERS[owner] for owner in owners if owner in _OWNERS}
    if len(known) == 1:
        return known.pop()
    try:
        await tgi.read(ask)
    except MissingError:
        raise ReadError("no engine that is known answers here; name its kind") from None
    return "tgi"


async def read(ask: Ask, kind: Engine | None) -> list[Reading]:
    """Read ``kind``, or whatever answers: one reading for each role behind the address.

    Raises:
        ReadError: it cannot be read.
    """
    told = await READERS[kind or await detect(ask)](ask)
    return told if isinstance(told, list) else [told]
