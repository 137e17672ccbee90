"""How much each technique does, in three sizes, and what that may cost where nobody says more.

Most of the tokens are those of `Boundary`, which asks at the limits. "No leak seen" in n trials
excludes a rate of leaks of 3/n, which is what the larger sizes are for.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from sekisho.probe.budget import Budget, Cost
from sekisho.probe.techniques import TECHNIQUES, Technique

Size: TypeAlias = Literal["quick", "standard", "thorough"]
SIZES: tuple[Size, ...] = get_args(Size)

LENGTH_MAX: Mapping[Size, int] = {"quick": 8_192, "standard": 32_768, "thorough": 262_144}
"""Tokens of the longest prompt, where nothing else is said; twice the window if that is more."""
BUDGETS: Mapping[Size, Budget] = {
    "quick": Budget(requests_max=1_000, tokens_max=1_700_000),
    "standard": Budget(requests_max=2_000, tokens_max=11_000_000),
    "thorough": Budget(requests_max=10_000, tokens_max=135_000_000),
}
"""Each holds all techniques of its size, with room for what is tried again; a window that needs
more has to be allowed by a budget that is given."""
_QUICK: Mapping[str, Mapping[str, Any]] = {
    "boundary": {"plants": 1, "repeats": 1, "bisect_max": 6},
    "residue": {"rounds": 3, "plants": 2, "words": 200},
    "abort": {"rounds": 2, "leaves": 4, "retries": 1},
    "crossed": {"rounds": 2, "streams": 4},
    "prefix": {"documents": 4, "variant_documents": 1, "words": 200},
    "ids": {"rounds": 1},
    "response-cache": {"rounds": 1, "stories": 4},
    "timing": {"samples": 30, "own_samples": 20},
    "interference": {"rounds": 1, "plants": 3, "words": 200},
}
_STANDARD: Mapping[str, Mapping[str, Any]] = {}
"""The arguments' own defaults."""
_THOROUGH: Mapping[str, Mapping[str, Any]] = {
    "boundary": {"plants": 3, "repeats": 3, "bisect_max": 14},
    "residue": {"rounds": 45, "plants": 8, "words": 600},
    "abort": {"rounds": 20, "leaves": 8, "retries": 2},
    "crossed": {"rounds": 20, "streams": 8},
    "prefix": {"documents": 60, "variant_documents": 8, "words": 600, "pictures": 20},
    "ids": {"rounds": 8},
    "response-cache": {"rounds": 8, "stories": 12},
    "timing": {"samples": 250, "own_samples": 60},
    "interference": {"rounds": 8, "plants": 6},
}
ARGUMENTS: Mapping[Size, Mapping[str, Mapping[str, Any]]] = {
    "quick": _QUICK,
    "standard": _STANDARD,
    "thorough": _THOROUGH,
}
"""Arguments of each technique, by its name; what is left out has its default."""


def made(name: str, size: Size, window: int | None, length_max: int) -> Technique:
    """The technique ``name``, a key of `TECHNIQUES`, in this size.

    Args:
        window, length_max: for the one that asks for prompts of every length.
    """
    arguments = dict(ARGUMENTS[size].get(name, {}))
    if name == "boundary":
        arguments |= {"window": window, "length_max": length_max}
    return TECHNIQUES[name](**arguments)


def budget_of(cost: Cost) -> Budget:
    """One that just holds a plan of this cost, with a tenth for requests that are tried again."""
    return Budget(
        requests_max=math.ceil(1.1 * cost.requests) + 10,
        tokens_max=math.ceil(1.1 * cost.tokens) + 10,
    )
