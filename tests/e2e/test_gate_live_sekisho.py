"""The gate against a platform of real nodes, both ways; and a window that its nodes cannot hold."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from platform_kit import Answer, Platform, platform, tiny_model, wait_for
from serve_kit import SEKISHO, is_alive, launch

pytestmark = pytest.mark.timeout(1200)
WINDOW = 512
POOLS = {"prefill-0.1": 1024, "decode-0.1": 2048}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A pair that promises 512 tokens, with pools of 1,024 and 2,048."""
    folder = tmp_path_factory.mktemp("gate")
    roles = ["prefill", "decode"]
    model = tiny_model(tmp_path_factory)
    with platform(folder, model, roles, window=WINDOW, pools=POOLS) as running:
        yield running


def gate(url: str, window: int) -> tuple[int, dict[str, dict[str, object]]]:
    """Exit code and deciding capacities by role, as the command tells them; no key is given."""
    ended = subprocess.run(
        [SEKISHO, "gate", "--sekisho", url, "--advertised", str(window), "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.stdout, ended.stderr
    result = json.loads(ended.stdout)
    return ended.returncode, {c["role"]: c for c in result["capacities"]}


def test_the_gate_reads_the_pool_of_each_role(served: Platform) -> None:
    code, held = gate(served.url, 1024)
    assert code == 0
    assert {role: c["servable"] for role, c in held.items()} == {"prefill": 1024, "decode": 2048}
    code, held = gate(served.url, 1025)
    assert code == 1
    assert held["prefill"]["rank"] == "prefill-0.1"


def test_the_window_bounds_requests_below_what_the_pools_hold(served: Platform) -> None:
    async def scenario() -> tuple[object, list[Answer]]:
        async with served.client() as client:
            listed = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
            answers = [await client.ask([5] * size, max_tokens=12) for size in (500, 501)]
            return listed, answers

    listed, [fits, over] = asyncio.run(scenario())
    assert (listed, fits.status, over.status) == (WINDOW, 200, 400)
    assert f"{WINDOW} tokens" in over.error["message"] if over.error else False


def test_a_smaller_replacement_is_503_until_a_larger_one_joins(served: Platform) -> None:
    served.pools["prefill-0.2"] = WINDOW - 16

    async def scenario() -> tuple[int, str, list[Answer]]:
        async with served.client() as client:
            probe = await client.get("/health/readiness")
            answers = [await client.ask([5] * size, max_tokens=12) for size in (20, 500, 501)]
            return probe.status_code, probe.text, answers

    served.wait_replaced(served.kill("prefill"))
    status, told, answers = asyncio.run(scenario())
    assert status == 503
    assert f"prefill holds {WINDOW - 16} tokens, {WINDOW} are advertised" in told
    assert [(a.status, a.code) for a in answers] == [(503, "not_ready")] * 3
    code, held = gate(served.url, 16)
    assert (code, held["prefill"]["servable"]) == (1, WINDOW - 16)

    served.wait_replaced(served.kill("prefill"))
    status, _, answers = asyncio.run(scenario())
    assert (status, [a.status for a in answers]) == (200, [200, 200, 400])


def test_serve_refuses_a_window_above_its_pools_in_one_line(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path), "--pool-tokens", "1024", "--window", "4096")
    with launch([SEKISHO, "serve", *flags, "--port", "0"]) as launched:
        processes = wait_for(
            lambda: found if len(found := launched.processes()) >= 3 else None, "nodes"
        )
        assert launched.wait() == 2, launched.log()
        assert launched.output() == ""
        assert not [pid for pid in processes if is_alive(pid)]
        assert not launched.left_behind()
        log = launched.log()
    [line] = [text for text in log.splitlines() if text.startswith("sekisho: ")]
    assert line.startswith("sekisho: window = 4096: ")
    assert "prefill holds 1024 tokens, 4096 are advertised" in line
    assert "Traceback" not in log
