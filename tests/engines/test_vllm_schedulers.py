"""The guard inside vLLM's own schedulers, synchronous and asynchronous, under aborts and
preemption: it fails what it should and nothing else, and no block is lost."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rig import STAND_INS, environment, installed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
_DRIVE = Path(__file__).parent / "vllm_drive.py"


def _drive(seed: int, count: int, blocks: int) -> list[dict[str, Any]]:
    venv = installed("vllm", "venv", ask="vllm")
    more = {"ENGINE_STAND_INS": "vllm", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    more |= {"VLLM_LOGGING_LEVEL": "ERROR", "SEKISHO_GUARD_KEY": "a key of the tests"}
    done = subprocess.run(
        [str(venv / "bin" / "python"), str(_DRIVE), str(seed), str(count), str(blocks)],
        env=environment([STAND_INS], more),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("blocks", [65, 34])
def test_only_what_is_wrong_fails_and_every_block_comes_back(blocks: int) -> None:
    seed = int(os.environ.get("SEKISHO_SEED", "20261202"))
    print(f"\nseed {seed}")
    for found in _drive(seed, 300, blocks):
        print(found)
        assert found["unexpected"] == []
        assert found["failed"] > 20
        assert found["aborted"] > 20
        for role in ("prefill", "decode"):
            left = dict(found[role])
            preempted = left.pop("preempted")
            assert set(left.values()) == {0}, (role, left)
            assert role == "prefill" or blocks > 60 or preempted > 0
