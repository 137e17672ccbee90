"""A platform with the lab's engine among its nodes serves nobody."""

import asyncio
import sys
from pathlib import Path

import pytest

from platform_kit import NODE, Answer, platform, tiny_model

LAB_NODE = Path(__file__).parents[1] / "lab_node.py"

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("lab_role", ["colocated", "decode", "prefill"])
def test_a_gateway_refuses_tenants_while_a_node_is_the_labs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, lab_role: str
) -> None:
    model, folder = tiny_model(tmp_path_factory), tmp_path_factory.mktemp("lab")
    given = folder / "given"
    monkeypatch.setenv("SEKISHO_TEST_GIVEN", str(given))
    # One role is the lab's engine, any other a node as the platform starts it.
    choose = (
        f'case "$0" in *\'"role":"{lab_role}"\'*) exec {sys.executable} {LAB_NODE} "$0";; '
        f'*) exec {" ".join(NODE)} "$0";; esac'
    )
    roles = ["colocated"] if lab_role == "colocated" else ["prefill", "decode"]

    async def scenario() -> tuple[int, int, Answer]:
        async with running.client() as client:
            live = await client.get("/health/liveness")
            ready = await client.get("/health/readiness")
            return live.status_code, ready.status_code, await client.ask("Hello")

    with platform(folder, model, roles, ("sh", "-c", choose)) as running:
        told = {node.partition("-")[0]: ready.tenants for node, ready in running.ready}
        assert told == {role: role != lab_role for role in roles}
        live, ready, answer = asyncio.run(scenario())
    assert (live, ready) == (200, 503)
    assert (answer.status, answer.code, answer.text) == (503, "not_ready", "")
    assert not given.exists()
