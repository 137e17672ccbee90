"""The catalogue file, and a model folder's ``config.json``.

    [[models]]
    name = "glm"
    window = 1048576            # advertised: prompt and answer together
    output = 0                  # tokens of answer promised on top of the window
    prompt = 1000000            # the longest prompt that is let through; the window if absent
    config = "models/glm"       # its config.json is a claim too
    gateway = { url = "https://gateway", key_env = "GATEWAY_KEY" }
    [[models.engines]]
    url = "http://p1:30000"     # or metrics_file = "p1.prom"
    role = "prefill"            # where the engine does not say
    kind = "sglang"             # detected if absent
    key_file = "p1.key"         # or key_env; sent to this host only

    [[waivers]]
    rule = "GATE004"
    until = 2026-12-31
    because = "the second rack comes in December"

JSON and YAML have the same shape. An unknown key, or one given twice, refuses: a misspelt window
must not fall back to nothing. Paths are relative to the file.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sekisho.gate.fetch import clip
from sekisho.gate.model import Claim, ClaimError, Engine, Role
from sekisho.gate.policy import Waiver

_FILE_MAX = 4 * 1024 * 1024
WINDOW_MAX = 2**50


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Address(_Strict, frozen=True, kw_only=True):
    """Where something answers, and which key it wants. The key itself is never in a catalogue."""

    url: str
    key_env: str = ""
    key_file: str = ""


class EngineEntry(_Strict, frozen=True, kw_only=True):
    """One engine: an address, or a file of Prometheus text."""

    url: str = ""
    metrics_file: str = ""
    role: Role | None = None
    kind: Engine | None = None
    key_env: str = ""
    key_file: str = ""


class ModelEntry(_Strict, frozen=True, kw_only=True):
    """One model; sizes in tokens."""

    name: str
    engines: list[EngineEntry]
    window: int | None = None
    output: int = 0
    prompt: int = 0
    config: str = ""
    gateway: Address | None = None


class Catalogue(_Strict, frozen=True, kw_only=True):
    """The whole file. ``margin`` in windows."""

    models: list[ModelEntry]
    waivers: list[Waiver] = []
    margin: float | None = None
    margin_is_required: bool = False


def load_catalogue(path: Path) -> Catalogue:
    """Read and check a catalogue; its form is told by the suffix.

    Raises:
        ClaimError: it cannot be read, or a field is unknown, of another type or out of range.
    """
    forms: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": _json,
        ".yaml": _yaml,
        ".yml": _yaml,
    }
    parse = forms.get(path.suffix.lower())
    if parse is None:
        raise ClaimError(f"{path}: want a catalogue named .toml, .json, .yaml or .yml")
    text = _read(path)
    try:
        catalogue = msgspec.convert(parse(text), Catalogue)
    except msgspec.ValidationError as error:
        raise ClaimError(f"{path}: {clip(str(error))}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        what = str(error) if isinstance(error, _RefusedError) else f"not {path.suffix[1:]}{line}"
        raise ClaimError(f"{path}: {what}") from None
    _check(catalogue, path)
    return catalogue


def claims_of(entry: ModelEntry, path: Path) -> list[Claim]:
    """What a catalogue's entry claims: its window, and its ``config.json``.

    Raises:
        ClaimError: the config cannot be used.
    """
    found = []
    if entry.window is not None:
        found.append(checked_claim(entry.name, entry.window, entry.output, entry.prompt, str(path)))
    if entry.config:
        found.append(config_claim(entry.name, path.parent / entry.config))
    return found


def checked_claim(model: str, window: int, output: int, prompt: int, source: str) -> Claim:
    """A claim with sizes that can be meant.

    Raises:
        ClaimError: they cannot; one sentence.
    """
    for name, value, low in (("window", window, 1), ("output", output, 0), ("prompt", prompt, 0)):
        if not low <= value <= WINDOW_MAX:
            raise ClaimError(f"{source}: {name} of {clip(model)} is {value}, at least {low} wanted")
    if prompt > window:
        raise ClaimError(f"{source}: prompt of {clip(model)} is above its window of {window}")
    return Claim(model=model, window=window, output_tokens=output, source=source, prompt_max=prompt)


def config_claim(model: str, path: Path) -> Claim:
    """The window of a Hugging Face ``config.json``, or of the folder that has it.

    As ``_get_and_verify_max_len`` of vLLM's ``vllm/config/model.py`` derives it:
    ``max_position_embeddings``, times the ``factor`` of a scaled RoPE; for ``yarn`` the original
    length times ``factor``; for ``llama3`` and ``longrope`` the length already has it.

    Raises:
        ClaimError: no such file, or a number in it is none.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = _json(_read(file))
    except (ValueError, RecursionError):
        raise ClaimError(f"{file}: not JSON") from None
    if not isinstance(config, dict):
        raise ClaimError(f"{file}: not a model's config.json")
    inner = config.get("text_config")
    if "max_position_embeddings" not in config and isinstance(inner, dict):
        config = inner
    length = _whole(config.get("max_position_embeddings"), "max_position_embeddings", file)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ClaimError(f"{file}: rope_scaling is no object")
    scalings = [s for s in scaling.values() if isinstance(s, dict)] or [scaling]
    window = min(_scaled(length, one, file) for one in scalings)
    return checked_claim(model, window, 0, 0, str(file))


def _scaled(length: int, scaling: dict[str, Any], file: Path) -> int:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = scaling.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 4096:
        raise ClaimError(f"{file}: factor of rope_scaling is no factor")
    if kind in ("default", "llama3", "longrope", "su"):
        return length
    if kind == "yarn" and "original_max_position_embeddings" in scaling:
        name = "original_max_position_embeddings"
        length = _whole(scaling[name], name, file)
    return int(length * factor)


def _whole(value: object, name: str, file: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= WINDOW_MAX:
        raise ClaimError(f"{file}: {name} is missing or no number of tokens")
    return value


def _check(catalogue: Catalogue, path: Path) -> None:
    if not catalogue.models:
        raise ClaimError(f"{path}: models is empty")
    names = [entry.name for entry in catalogue.models]
    for entry in catalogue.models:
        where = f"{path}: model {clip(entry.name)!r}"
        if not entry.name or names.count(entry.name) > 1:
            raise ClaimError(f"{where}: name is empty or stands twice")
        if not entry.engines:
            raise ClaimError(f"{where}: engines is empty")
        if entry.window is None and (entry.output or entry.prompt):
            raise ClaimError(f"{where}: output and prompt need window")
        for engine in entry.engines:
            if bool(engine.url) == bool(engine.metrics_file):
                raise ClaimError(f"{where}: an engine wants url or metrics_file, one of the two")
            if engine.metrics_file and (engine.key_env or engine.key_file):
                raise ClaimError(f"{where}: metrics_file wants no key")
        keyed = [(engine.key_env, engine.key_file) for engine in entry.engines]
        if entry.gateway is not None:
            keyed.append((entry.gateway.key_env, entry.gateway.key_file))
        if any(name and file for name, file in keyed):
            raise ClaimError(f"{where}: key_env and key_file exclude each other")
    for number, waiver in enumerate(catalogue.waivers):
        if fault := waiver.fault():
            raise ClaimError(f"{path}: waivers[{number}]: {fault}")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_MAX + 1)
    except OSError as error:
        raise ClaimError(f"{path}: {error.strerror}") from None
    if len(raw) > _FILE_MAX:
        raise ClaimError(f"{path}: larger than {_FILE_MAX >> 20} MiB")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ClaimError(f"{path}: not UTF-8") from None


class _RefusedError(ValueError):
    """A key that stands twice in one object (the second would hide the first), or an alias."""


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RefusedError(f"{clip(str(key))} stands twice in one place")
        found[key] = value
    return found


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


class _Loader(yaml.SafeLoader):
    """YAML without aliases, which can unfold a line to gigabytes, and without double keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            raise _RefusedError("aliases are not read")
        return super().compose_node(parent, index)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    pairs = [
        (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True))
        for key, value in node.value
    ]
    if any(not isinstance(key, str) for key, _ in pairs):
        raise _RefusedError("a key is no text")
    return _once(pairs)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def _yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)
