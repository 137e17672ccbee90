"""llama.cpp server: ``/props`` and ``/slots``, as its ``tools/server/README.md`` describes them.

``n_ctx`` is the context of one slot, which is all that a request can have. Where the slots share
one pool (``--kv-unified``, the default without ``--parallel``), it is that whole pool for each, and
a request holds it only while the others are idle. ``/slots`` can be switched off (``--no-slots``,
answered by 501); then ``/props`` speaks for every slot.
"""

import msgspec

from sekisho.gate.fetch import MissingError, clip
from sekisho.gate.model import Rank, ReadError, Reading
from sekisho.gate.readers.base import Ask, ModelEntry, advertised, decode, models, tokens


class _Generation(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    default_generation_settings: _Generation
    total_slots: int = 0
    role: str = ""
    model_path: str = ""
    model_alias: str = ""
    build_info: str = ""


class _Slot(msgspec.Struct):
    id: int
    n_ctx: int


async def read(ask: Ask) -> Reading:
    """Raises:
    ReadError: a slot is missing, or a number is none; or it is a router, which holds nothing.
    """
    # First and alone: a router's other answers are errors, which would be taken for the reason.
    props = decode(await ask.get("/props"), _Props, "/props")
    if props.role == "router":
        raise ReadError("a llama.cpp router answers here: name the servers behind it")
    slots, listed = await _slots(ask), await _models(ask)
    every = tokens(props.default_generation_settings.n_ctx, "n_ctx of /props")
    count = props.total_slots
    if not 1 <= count <= 65536 or (slots and len(slots) != count):
        raise ReadError(f"/slots has {len(slots)} of total_slots {count}")
    sizes = [min(every, tokens(slot.n_ctx, "n_ctx of /slots")) for slot in slots]
    name = props.model_alias or props.model_path.rpartition("/")[2]
    return Reading(
        source=ask.source,
        engine="llama.cpp",
        version=clip(props.build_info, 60),
        role="both",
        model=clip(listed[0].id if listed else name),
        ranks=[
            Rank(name=f"slot {number}", pool_tokens=size, page_size=1, sequence_max=size)
            for number, size in enumerate(sizes or [every])
        ],
        advertised=advertised(listed),
        # Any client's prompt can meet the slot that another client's left: cache_prompt is on by
        # default, and no key of a tenant exists.
        prefix_scope="shared",
    )


async def _slots(ask: Ask) -> list[_Slot]:
    try:
        return decode(await ask.get("/slots"), list[_Slot], "/slots")
    except MissingError:
        return []


async def _models(ask: Ask) -> list[ModelEntry]:
    try:
        return await models(ask.get)
    except MissingError:
        return []
