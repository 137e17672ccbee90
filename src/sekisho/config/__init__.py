"""Settings: flags over ``SEKISHO_…`` variables over a TOML file over defaults.

A key that no setting has, in any of the three, refuses to start: a misspelt isolation or limit
must not silently fall back to its default. Importing this package is cheap (no torch).
"""

from sekisho.config.loading import DEFAULT_FILE, ConfigError, load_settings
from sekisho.config.settings import (
    DEMO_MODEL,
    REPEATABLE,
    Settings,
    mask_password,
    parse_servers,
)

__all__ = [
    "DEFAULT_FILE",
    "DEMO_MODEL",
    "REPEATABLE",
    "ConfigError",
    "Settings",
    "load_settings",
    "mask_password",
    "parse_servers",
]
