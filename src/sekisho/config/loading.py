"""Settings from flags over ``SEKISHO_…`` variables over a TOML file over defaults."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from sekisho.config.settings import Settings

PREFIX = "SEKISHO_"
DEFAULT_FILE = Path("sekisho.toml")
# Switches of the test suite, inherited by the processes that it starts; and that of the guard
# inside other engines.
_NOT_SETTINGS = frozenset(
    {
        "SEKISHO_REQUIRE_MOONCAKE",
        "SEKISHO_REQUIRE_CHROMIUM",
        "SEKISHO_ENGINES",
        "SEKISHO_GUARD",
    }
)


class ConfigError(Exception):
    """The configuration cannot be used. One line, fit for the user; never a password."""


def load_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None
) -> Settings:
    """Merge the three places and check the result.

    ``flags`` maps setting names to values as given; a flag that was not given is absent. ``file``
    None means ``sekisho.toml`` in the current folder, if there is one.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a value outside its limit,
            settings that contradict each other, or a file that cannot be read.
    """
    layers = (
        ("default", {"state_dir": (_default_state_dir(environ), "default")}),
        ("file", _read_file(file)),
        ("environment", _read_environment(environ)),
        ("flag", {name: (value, _flag(name)) for name, value in flags.items()}),
    )
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        for name, (value, place) in layer.items():
            if name not in Settings.model_fields:
                raise ConfigError(_unknown(source, place, name))
            values[name], places[name], sources[name] = value, place, source
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, places)) from None
    settings._sources.update(sources)
    return settings


def _default_state_dir(environ: Mapping[str, str]) -> str:
    """``$XDG_STATE_HOME/sekisho``; a relative XDG path is ignored, as its specification says."""
    base = environ.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):
        base = f"{environ.get('HOME') or Path.home()}/.local/state"
    return f"{base}/sekisho"


def _read_file(file: Path | None) -> dict[str, tuple[object, str]]:
    """Keys of the file with the place that an error message names."""
    path = file
    if path is None:
        if not DEFAULT_FILE.exists():
            return {}
        path = DEFAULT_FILE
    try:
        table = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {_one_line(str(error))}") from None
    return {name: (value, f"{name} in {path}") for name, value in table.items()}


def _read_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    return {
        variable.removeprefix(PREFIX).lower() if variable.isupper() else variable: (value, variable)
        for variable, value in environ.items()
        if variable.upper().startswith(PREFIX) and variable not in _NOT_SETTINGS
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _unknown(source: str, place: str, name: str) -> str:
    """The message for an unknown key, with the nearest known key in that place's spelling."""
    known = list(Settings.model_fields)
    wanted = name.lower().replace("-", "_").removeprefix(PREFIX.lower())
    nearest = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)[0]
    spellings = {"flag": _flag(nearest), "environment": PREFIX + nearest.upper()}
    return _one_line(
        f"{place}: unknown key; the nearest known one is {spellings.get(source, nearest)}"
    )


def _explain(error: ValidationError, places: Mapping[str, str]) -> str:
    """One line for the first thing wrong: where it is, the setting's limit, and the value."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return _one_line(str(first["msg"]).removeprefix("Value error, "))
    name = str(first["loc"][0])
    limit = Settings.model_fields[name].description
    # A database URL may hold a password, and a malformed one defeats the masking.
    got = "" if name == "database" else f"; got {_short(first['input'])}"
    return _one_line(f"{places.get(name, name)}: want {limit}{got}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
