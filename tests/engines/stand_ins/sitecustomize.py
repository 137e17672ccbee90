"""Lets unmodified SGLang and vLLM start on a PyTorch without a GPU. For tests alone.

Python imports this module at the start of every process that has this folder on PYTHONPATH, also
of the engines' workers. ``ENGINE_STAND_INS`` says for which engine: ``sglang`` or ``vllm``. No
operation of an engine is replaced; models of the Llama family then run in the engines' own plain
torch code. With ``ENGINE_SWITCH`` the faults of `engine_faults` are put in, to be switched at
run time.
"""

import enum
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence

Hook = Callable[[types.ModuleType], None]

# What SGLang imports at its start and has no wheel for a CPU.
_ABSENT = frozenset({"torchvision", "torchaudio", "sgl_kernel", "decord"})


class _Missing:
    """Any attribute of an absent package; calling it is an error."""

    def __init__(self, path: str) -> None:
        self.__dict__["_path"] = path

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._path}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        raise RuntimeError(f"{self._path} is not available on this machine")


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        # A name with a capital is subclassed, or asked for by isinstance.
        is_class = name[:1].isupper()
        value: object = type(name, (), {}) if is_class else _Missing(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so that a package that is there is found first."""

    def find_spec(
        self,
        fullname: str,
        _path: Sequence[str] | None,
        _target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _AbsentModule(spec.name)
        module.__path__ = []
        module.__file__ = __file__
        module.__dict__["__version__"] = "0.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__.startswith("torchvision.transforms"):
            members = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
            module.__dict__["InterpolationMode"] = enum.Enum("InterpolationMode", members)


class _After(importlib.abc.MetaPathFinder):
    """Calls functions with a module as soon as that module has been imported; by its name."""

    def __init__(self, hooks: Mapping[str, Sequence[Hook]]) -> None:
        self._hooks = hooks

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._hooks:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run, hooks = spec.loader.exec_module, self._hooks[fullname]

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                for hook in hooks:
                    hook(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _host_indices(module: types.ModuleType) -> None:
    """SGLang 0.5.23 pins the page indices for a copy to a GPU, which no CPU build of torch can."""
    if hasattr(module.MooncakeKVSender, "supports_host_tensor_indices"):
        module.MooncakeKVSender.supports_host_tensor_indices = False


def _device_index(module: types.ModuleType) -> None:
    """vLLM's Mooncake connector asks for the index of the current accelerator; a CPU is 0."""
    if not module.is_available():
        module.__dict__["current_device_index"] = lambda: 0


_engine = os.environ.get("ENGINE_STAND_INS", "")
_after: dict[str, list[Hook]] = {}
if _engine == "sglang":
    sys.meta_path.append(_Absent())
    _after["sglang.srt.disaggregation.mooncake.conn"] = [_host_indices]
elif _engine == "vllm":
    _after["torch.accelerator"] = [_device_index]
if "ENGINE_SWITCH" in os.environ:
    import engine_breaks
    import engine_breaks_vllm
    import engine_checks
    import engine_faults
    import engine_faults_vllm

    for _name, _hook in (
        *engine_breaks.HOOKS,
        *engine_breaks_vllm.HOOKS,
        *engine_faults.HOOKS,
        *engine_faults_vllm.HOOKS,
        *engine_checks.HOOKS,
    ):
        _after.setdefault(_name, []).append(_hook)
if "ENGINE_METER" in os.environ:
    import engine_meter

    for _name, _hook in engine_meter.HOOKS:
        _after.setdefault(_name, []).append(_hook)
if "ENGINE_METER_VLLM" in os.environ:
    import engine_meter_vllm

    for _name, _hook in engine_meter_vllm.HOOKS:
        _after.setdefault(_name, []).append(_hook)
if _after:
    sys.meta_path.insert(0, _After(_after))
