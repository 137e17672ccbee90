"""Seams: a function that is missing, changed or replaced is an error, and never a silent gap."""

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sekisho.guard.seams import Seam, SeamError, check_held, hold, original_of

ENGINE = '''
class Base:
    def inherited(self, x):
        return ("inherited", x)


class Engine(Base):
    limit = 5

    def step(self, batch, *, fast=False):
        """What it does."""
        return ("step", self.limit, batch, fast)

    @classmethod
    def connect(cls, info):
        return ("connect", cls.__name__, info)

    class Inner:
        def deep(self):
            return "deep"


class Faster(Engine):
    pass


def alone(x, extra=None, y=2):
    return ("alone", x, extra, y)
'''
NAMES = map("guarded_engine_{}".format, itertools.count())


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A small module, new for each test."""
    name = next(NAMES)
    (tmp_path / f"{name}.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def noting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ("guarded", original(*args, **kwargs))


def other(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ("other", original(*args, **kwargs))


def seam(
    engine: ModuleType, path: str, *parameters: str, around: Callable[..., Any] = noting
) -> Seam:
    return Seam(f"{engine.__name__}:{path}", parameters, around)


def test_methods_class_methods_and_functions_lead_through_the_guard(engine: ModuleType) -> None:
    seams = [
        seam(engine, "Engine.step", "self", "batch", "fast"),
        seam(engine, "Engine.connect", "cls", "info"),
        seam(engine, "Engine.Inner.deep", "self"),
        seam(engine, "Engine.inherited", "self", "x"),
        seam(engine, "alone", "x", "y"),
    ]
    hold(seams)
    check_held(seams)
    assert engine.Engine().step(1, fast=True) == ("guarded", ("step", 5, 1, True))
    assert engine.Faster.connect(2) == ("guarded", ("connect", "Faster", 2))
    assert engine.Engine().connect(2) == ("guarded", ("connect", "Engine", 2))
    assert engine.Engine.Inner().deep() == ("guarded", "deep")
    assert engine.Engine().inherited(3) == ("guarded", ("inherited", 3))
    assert engine.Base().inherited(3) == ("inherited", 3)
    assert engine.alone(1, y=4) == ("guarded", ("alone", 1, None, 4))
    assert engine.Engine.step.__doc__ == "What it does."
    step = original_of(seams[0].target)
    assert step(engine.Engine(), 1) == ("step", 5, 1, False)


@pytest.mark.parametrize(
    "path", ["gone", "Engine.gone", "Gone.step", "Engine.Inner.gone", "Engine.step.gone"]
)
def test_a_missing_target_is_an_error_that_names_it(engine: ModuleType, path: str) -> None:
    with pytest.raises(SeamError, match=rf"{engine.__name__}:{path} is missing"):
        hold([seam(engine, path, "self")])
    with pytest.raises(SeamError, match="is missing"):
        check_held([seam(engine, path, "self")])


def test_a_missing_module_is_an_error() -> None:
    with pytest.raises(SeamError, match="is missing: No module named"):
        hold([Seam("no_such_engine.conn:Manager.send", ("self",), noting)])


@pytest.mark.parametrize(
    "parameters",
    [
        ("self", "batches"),  # renamed
        ("self", "batch", "fast", "more"),  # one is gone
        ("batch", "self"),  # in another order
    ],
)
def test_changed_parameters_are_an_error_that_names_them(
    engine: ModuleType, parameters: tuple[str, ...]
) -> None:
    before = engine.Engine.step
    with pytest.raises(SeamError, match="has parameters self, batch, fast, not the known"):
        hold([seam(engine, "Engine.step", *parameters)])
    assert engine.Engine.step is before


def test_what_is_no_function_is_not_held(engine: ModuleType) -> None:
    with pytest.raises((SeamError, TypeError)):
        hold([seam(engine, "Engine.limit", "self")])


def test_further_parameters_are_no_error(engine: ModuleType) -> None:
    hold([seam(engine, "alone", "x", "y"), seam(engine, "Engine.step", "self")])
    assert engine.alone(1) == ("guarded", ("alone", 1, None, 2))


def test_a_seam_that_is_not_held_is_found(engine: ModuleType) -> None:
    with pytest.raises(SeamError, match="leaves the guard out"):
        check_held([seam(engine, "Engine.step", "self")])


@pytest.mark.parametrize("path", ["Engine.step", "Engine.connect", "alone"])
def test_a_wrapper_that_was_replaced_is_found(engine: ModuleType, path: str) -> None:
    held = seam(engine, path)
    hold([held])
    owner: Any = engine if path == "alone" else engine.Engine
    setattr(owner, path.rpartition(".")[2], lambda *args, **kwargs: args)
    with pytest.raises(SeamError, match="replaced by something that leaves the guard out"):
        check_held([held])


def test_somebody_elses_wrapper_around_the_guards_is_none_of_its_business(
    engine: ModuleType,
) -> None:
    held = seam(engine, "Engine.step")
    hold([held])
    guarded = engine.Engine.step

    @functools.wraps(guarded)
    def tracing(*args: Any, **kwargs: Any) -> Any:
        return ("traced", guarded(*args, **kwargs))

    vars(tracing).pop("__sekisho_guard__")
    engine.Engine.step = tracing
    check_held([held])
    assert engine.Engine().step(1) == ("traced", ("guarded", ("step", 5, 1, False)))


def test_two_seams_of_one_target_are_both_there_and_both_missed(engine: ModuleType) -> None:
    first = seam(engine, "Engine.step", "self", "batch")
    second = seam(engine, "Engine.step", "self", "batch", around=other)
    hold([first, second])
    check_held([first, second])
    assert engine.Engine().step(1) == ("other", ("guarded", ("step", 5, 1, False)))
    original = original_of(first.target)
    assert original(engine.Engine(), 1) == ("step", 5, 1, False), "the engine's own, no wrapper"
    hold([first])
    engine.Engine.step = original
    for each in (first, second):
        with pytest.raises(SeamError, match="leaves the guard out"):
            check_held([each])


def test_one_of_two_seams_is_not_taken_for_the_other(engine: ModuleType) -> None:
    hold([seam(engine, "Engine.step")])
    with pytest.raises(SeamError, match="leaves the guard out"):
        check_held([seam(engine, "Engine.step", around=other)])
