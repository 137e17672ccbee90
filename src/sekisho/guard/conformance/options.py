"""``-p sekisho.guard.conformance.options``: what connector to judge.

Apart from ``conftest.py``, which pytest finds too late for options where it is asked for a package.
"""

import pytest

DEFAULTS = {
    "--inner": ("MooncakeConnector", "name of the connector"),
    "--inner-module": (None, "its module, where vLLM does not know it"),
    "--inner-config": ('{"mooncake_protocol": "tcp"}', "JSON"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """By default Mooncake over TCP."""
    group = parser.getgroup("sekisho")
    for name, (default, text) in DEFAULTS.items():
        group.addoption(name, default=default, help=text)
