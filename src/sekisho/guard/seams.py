"""Where the guard holds on to SGLang, and the proof that it does.

SGLang's own registry of hooks logs one that fails to apply and goes on without it. Here a target
that is missing, or whose parameters are not the known ones, is an error, and `check_held` finds a
wrapper that something else has replaced since.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_MARK = "__sekisho_guard__"
_originals: dict[str, Callable[..., Any]] = {}


class SeamError(Exception):
    """SGLang is not as the guard knows it; one line says where."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One function of SGLang and what goes around it.

    Args:
        target: ``module:attribute`` or ``module:Class.attribute``.
        parameters: names that must be there, in this order; others may follow or stand between.
        around: called as ``around(original, *args, **kwargs)`` in its place.
    """

    target: str
    parameters: tuple[str, ...]
    around: Callable[..., Any]


def hold(seams: Iterable[Seam]) -> None:
    """Put every ``around`` in place.

    Raises:
        SeamError: a target is missing, or not as known. Some may be in place then: end.
    """
    for seam in seams:
        owner, name, original, method = _resolve(seam.target)
        found = tuple(inspect.signature(original).parameters)
        kept = [p for p in found if p in seam.parameters]
        if kept != list(seam.parameters):
            raise SeamError(
                f"{seam.target} has parameters {', '.join(found) or 'none'}, "
                f"not the known {', '.join(seam.parameters)}"
            )
        _originals.setdefault(seam.target, original)  # a second seam goes around the first
        wrapper = _wrap(original, seam.around)
        setattr(owner, name, classmethod(wrapper) if method else wrapper)


def original_of(target: str) -> Callable[..., Any]:
    """SGLang's own function behind a seam that is held."""
    return _originals[target]


def check_held(seams: Iterable[Seam]) -> None:
    """Raise `SeamError` where a target no longer leads through the guard."""
    for seam in seams:
        function: Any = _resolve(seam.target)[2]
        while function is not None and getattr(function, _MARK, None) is not seam.around:
            function = getattr(function, "__wrapped__", None)
        if function is None:
            raise SeamError(f"{seam.target} was replaced by something that leaves the guard out")


def _wrap(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, _MARK, around)
    return wrapper


def _resolve(target: str) -> tuple[Any, str, Callable[..., Any], bool]:
    """Owner, name, plain function, and whether it is a class method."""
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise SeamError(f"{target} is missing: {error}") from error
    raw = inspect.getattr_static(owner, name)
    if isinstance(raw, classmethod):
        return owner, name, raw.__func__, True
    return owner, name, function, False
