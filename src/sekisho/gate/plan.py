"""``sekisho gate plan``: the largest honest window, before anything is started.

The pool of a rank is what is left of its memory after the weights, in whole pages. One page is the
engine's own (vLLM's null block, SGLang's padding slot). A prompt is held by the prefill node and
again, with its answer, by the decode node: the smaller of the two pools decides.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sekisho.gate.claims import config_claim
from sekisho.gate.model import ClaimError
from sekisho.gate.plan_families import KvShape, kv_shape
from sekisho.gate.policy import MARGIN

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_CONFIG_BYTES_MAX = 2**22


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """Sizes in tokens.

    Attributes:
        prefill_tokens, decode_tokens: usable pool of a rank, in whole pages.
        trained: the window of ``config.json``.
        window: the largest that both roles hold and the model was trained for.
        comfortable: the same where the smaller pool must hold `MARGIN` windows.
    """

    shape: KvShape
    page_size: int
    prefill_tokens: int
    decode_tokens: int
    trained: int
    window: int
    comfortable: int


def plan_pool(
    config: dict[str, Any],
    trained: int,
    *,
    memory: int,
    decode_memory: int,
    weights: int = 0,
    ranks: int = 1,
    dtype: str = "auto",
    page_size: int = 16,
) -> PoolPlan:
    """Plan a pair whose ranks have ``memory`` and ``decode_memory`` bytes, of which ``weights`` are
    taken.

    Raises:
        ClaimError: see `kv_shape`; or no page is left for a request.
    """
    shape = kv_shape(config, ranks, dtype)
    prefill, decode = (
        _tokens(budget - weights, shape.bytes_per_token, page_size)
        for budget in (memory, decode_memory)
    )
    pool = min(prefill, decode)
    if pool <= 0:
        needed = weights + 2 * page_size * shape.bytes_per_token
        raise ClaimError(f"--memory: no page is left for a request; {needed} bytes is the least")
    return PoolPlan(
        shape=shape,
        page_size=page_size,
        prefill_tokens=prefill,
        decode_tokens=decode,
        trained=trained,
        window=min(pool, trained),
        comfortable=min(int(pool / MARGIN), trained),
    )


def _tokens(room: int, bytes_per_token: int, page_size: int) -> int:
    return (room // (bytes_per_token * page_size) - 1) * page_size


def parse_bytes(text: str, option: str) -> int:
    """``80GiB``, ``512 MiB``, ``1.5TB`` or a plain number of bytes.

    Raises:
        ClaimError: it is none of these.
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    unit = found and (_UNITS.get(found[2] or "B"))
    if found is None or unit is None:
        raise ClaimError(f"{option}: not a size such as 80GiB; units: {', '.join(_UNITS)}")
    # In integers: a float would round a size of many digits.
    whole, _, part = found[1].partition(".")
    return int(whole) * unit + int(part or "0") * unit // int("1" + "0" * len(part))


def load_config(path: Path) -> tuple[dict[str, Any], int]:
    """``config.json``, or the one in a folder, and the window it states.

    Raises:
        ClaimError: it cannot be read or is no model's configuration.
    """
    file = path / "config.json" if path.is_dir() else path
    trained = config_claim("planned", file).window
    try:
        if file.stat().st_size > _CONFIG_BYTES_MAX:
            raise ClaimError(f"{file}: larger than {_CONFIG_BYTES_MAX} bytes")
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]), trained
    except OSError as error:
        raise ClaimError(f"{file}: {error.strerror}") from None
    except msgspec.DecodeError:
        raise ClaimError(f"{file}: not a model's config.json") from None
