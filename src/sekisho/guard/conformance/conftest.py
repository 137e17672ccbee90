"""Options of the suite, and the deployment that its tests share."""

import json
import os
import socket
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """What connector to judge; by default Mooncake over TCP."""
    group = parser.getgroup("sekisho")
    group.addoption("--inner", default="MooncakeConnector", help="name of the connector")
    group.addoption("--inner-module", default=None, help="its module, where vLLM does not know it")
    group.addoption("--inner-config", default='{"mooncake_protocol": "tcp"}', help="JSON")


@pytest.fixture(scope="session")
def deployment(pytestconfig: pytest.Config) -> Iterator[object]:
    """Prefill and decode in one process: real schedulers, real connectors, no model."""
    for name, value in {
        "SEKISHO_GUARD_KEY": "a key of the conformance suite",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(_free_port()),
        "MC_FORCE_TCP": "1",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, value)
    pytest.importorskip("vllm", reason="the suite runs in vLLM's environment")
    from sekisho.guard.conformance.deployment import Deployment

    said = {"inner": pytestconfig.getoption("--inner")}
    if pytestconfig.getoption("--inner-module"):
        said["inner_module_path"] = pytestconfig.getoption("--inner-module")
    made = Deployment(said | json.loads(pytestconfig.getoption("--inner-config")))
    yield made
    made.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
