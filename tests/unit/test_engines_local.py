"""The vLLM pair that `--local` starts, with a ``vllm`` on PATH that plays one: real processes."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import vllm_player
from sekisho.engine.demo import ensure_demo_model
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import load_tokenizer
from sekisho.gateway.engines import fleet as fleet_module
from sekisho.gateway.engines import local as local_module
from sekisho.gateway.engines.fleet import EngineFleet
from sekisho.gateway.engines.local import LocalPair
from sekisho.gateway.engines.replica import EngineError
from sekisho.gateway.engines.scope import ScopeKeys
from sekisho.gateway.engines.vllm import VllmEngine
from serve_kit import SEKISHO, launch, serve, writing_below
from sglang_kit import end_of
from vllm_kit import PROMPT

PATIENCE_S = 60.0
Said = dict[str, Any]


@pytest.fixture(autouse=True)
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {vllm_player.__file__} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEKISHO_DATABASE", "sqlite:///nobody-else-needs-this")
    monkeypatch.setenv("VLLM_API_KEY", "of-somebody")
    monkeypatch.setattr(fleet_module, "POLL_S", 0.1)
    monkeypatch.setattr(local_module, "BACKOFF_S", (0.1, 0.2))


def logs(folder: Path) -> Path:
    return folder / "state" / "logs"


def said(folder: Path, role: str) -> list[Said]:
    """What each process of one role said of itself, oldest first."""
    lines = (logs(folder) / f"vllm-{role}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def run(folder: Path, test: Callable[[EngineFleet], Awaitable[None]]) -> None:
    """``test`` with a started fleet over a local pair, of which nothing may be left afterwards."""

    async def main() -> None:
        model = ensure_demo_model()
        pair = LocalPair(model, logs(folder), 2048)
        engine = VllmEngine(load_tokenizer(model), pair.key, pair)
        fleet = EngineFleet(engine, pair.replicas(), ScopeKeys(bytes(range(32))), 2048)
        async with asyncio.timeout(PATIENCE_S):
            try:
                await fleet.start()
                await test(fleet)
            finally:
                await fleet.stop(0.0)

    asyncio.run(main())
    settled(lambda: not writing_below(folder))


def settled(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


async def become(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def answered(fleet: EngineFleet) -> str:
    params = SamplingParams(max_tokens=64, temperature=0.0, stop_token_ids=(2,))
    return end_of([event async for event in fleet.generate("tenant:a", PROMPT, params)]).code


def test_both_roles_start_guarded_on_loopback_with_one_key(tmp_path: Path) -> None:
    async def test(fleet: EngineFleet) -> None:
        assert await answered(fleet) == "stop"
        assert len(writing_below(tmp_path)) == 4

    run(tmp_path, test)
    [prefill], [decode] = said(tmp_path, "prefill"), said(tmp_path, "decode")
    for each, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        flags, env = each["flags"], each["env"]
        assert flags[0] == "serve"
        assert flags[flags.index("--host") + 1] == env["VLLM_HOST_IP"] == "127.0.0.1"
        assert flags[flags.index("--max-model-len") + 1] == "2048"
        transfer = json.loads(flags[flags.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] == "SekishoConnector"
        assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == (role, "fail")
        assert env["SEKISHO_GUARD"] == "on"
        assert "SEKISHO_DATABASE" not in env
    key = prefill["env"]["SEKISHO_GUARD_KEY"]
    assert key == decode["env"]["SEKISHO_GUARD_KEY"]
    assert len(key) == 64
    assert key not in str(prefill["flags"])
    assert prefill["env"]["VLLM_API_KEY"] not in (key, "of-somebody")
    same = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
    assert prefill["env"][same] == decode["env"][same]


def test_a_pair_of_which_one_dies_is_started_again_with_another_key(tmp_path: Path) -> None:
    async def test(fleet: EngineFleet) -> None:
        for role in ("decode", "prefill"):
            before = set(writing_below(tmp_path))
            os.kill(_leader(tmp_path, role), signal.SIGKILL)
            await become(lambda: not fleet.ready())
            await become(fleet.ready)
            assert await answered(fleet) == "stop"
            assert not before & set(writing_below(tmp_path))

    run(tmp_path, test)
    starts = [
        [each["env"]["SEKISHO_GUARD_KEY"] for each in said(tmp_path, role)]
        for role in ("prefill", "decode")
    ]
    assert starts[0] == starts[1]
    assert len(set(starts[0])) == 3


def _leader(folder: Path, role: str) -> int:
    """The process that has started the others of its role."""
    mine = writing_below(logs(folder) / f"vllm-{role}.log")
    return next(pid for pid in mine if os.getsid(pid) == pid)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_the_guard_says_at_the_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("VLLM_PLAYER", f"refuse {role}")

    async def never(_fleet: EngineFleet) -> None:
        raise AssertionError

    with pytest.raises(EngineError) as refused:
        run(tmp_path, never)
    guard = "sekisho guard: SEKISHO_GUARD_KEY has 3 bytes, it needs 16"
    assert str(refused.value) == f"local: vLLM {role} ended with 1: {guard}"
    settled(lambda: not writing_below(tmp_path))


def test_one_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLAYER", "mute decode")
    monkeypatch.setattr(local_module, "START_S", 2.0)

    async def never(_fleet: EngineFleet) -> None:
        raise AssertionError

    with pytest.raises(EngineError, match="not ready in 2 s"):
        run(tmp_path, never)
    settled(lambda: not writing_below(tmp_path))


def test_without_vllm_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="no command vllm on PATH"):
        LocalPair(tmp_path, logs(tmp_path), None)


# -- as a user starts it


def command(folder: Path) -> list[str]:
    local = [SEKISHO, "serve", "--engine", "vllm", "--local", "--window", "2048"]
    return [*local, "--port", "0", "--state-dir", str(folder / "state")]


@pytest.fixture
def no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEKISHO_DATABASE")


def test_ctrl_c_ends_both_and_what_ignores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_database: None
) -> None:
    monkeypatch.setenv("VLLM_PLAYER", "stubborn decode")
    with serve(command(tmp_path)) as served:
        assert served.tokens_max == 2048
        assert len(writing_below(tmp_path)) == 4
        served.interrupt()
        assert served.wait() == 0
        settled(lambda: not writing_below(tmp_path))


def test_ctrl_c_while_they_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_database: None
) -> None:
    monkeypatch.setenv("VLLM_PLAYER", "mute prefill")
    with launch(command(tmp_path)) as launched:
        settled(lambda: len(writing_below(tmp_path)) == 4)
        launched.interrupt()
        assert launched.wait() == 0
        settled(lambda: not writing_below(tmp_path))


def test_a_killed_gateway_takes_them_along(tmp_path: Path, no_database: None) -> None:
    with serve(command(tmp_path)) as served:
        assert len(writing_below(tmp_path)) == 4
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
        settled(lambda: not writing_below(tmp_path))
