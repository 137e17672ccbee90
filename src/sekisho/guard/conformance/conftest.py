"""The deployment that the tests of the suite share."""

import json
import os
from collections.abc import Iterator

import pytest

from sekisho.guard.conformance.options import DEFAULTS
from sekisho.guard.conformance.ports import free_port


@pytest.fixture(scope="session")
def deployment(pytestconfig: pytest.Config) -> Iterator[object]:
    """Prefill and decode in one process: real schedulers, real connectors, no model."""
    for name, value in {
        "SEKISHO_GUARD_KEY": "a key of the conformance suite",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port()),
        "MC_FORCE_TCP": "1",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "UCX_TLS": "tcp,self",
    }.items():
        os.environ.setdefault(name, value)
    pytest.importorskip("vllm", reason="the suite runs in vLLM's environment")
    from sekisho.guard.conformance.deployment import Deployment

    name, module, config = (
        pytestconfig.getoption(option, default) for option, (default, _) in DEFAULTS.items()
    )
    said = {"inner": name} | ({"inner_module_path": module} if module else {})
    made = Deployment(said | json.loads(config))
    yield made
    made.close()
