"""A late write over real Mooncake: its blocks are nobody's until it has landed. Without the
quarantine they are given out, which is what the quarantine is for."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rig import STAND_INS, environment, free_port, installed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(200)]
_LATE = Path(__file__).parent / "vllm_late.py"
_POOL = 32


def _drive(quarantine: str) -> dict[str, Any]:
    venv = installed("vllm", "venv", ask="vllm")
    more = {"ENGINE_STAND_INS": "vllm", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    more |= {"VLLM_LOGGING_LEVEL": "ERROR", "SEKISHO_GUARD_KEY": "a key of the tests"}
    more |= {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port())}
    done = subprocess.run(
        [str(venv / "bin" / "python"), str(_LATE), quarantine],
        env=environment([STAND_INS], more),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stdout[-1000:] + done.stderr[-2000:]
    print(f"\nquarantine {quarantine}: {lines[0]}")
    found: dict[str, Any] = json.loads(lines[0])
    return found


def test_blocks_of_a_late_write_are_nobodys_until_it_has_landed() -> None:
    found = _drive("on")
    assert found["answer"] == "error"
    assert found["quarantined"] == len(found["late"]) > 0
    assert found["reused"] == []
    assert set(found["others"]) == {"right"}
    assert found["free"] == _POOL, "a block was lost"


def test_without_the_quarantine_they_are_given_out() -> None:
    found = _drive("off")
    assert found["answer"] == "error"
    assert found["quarantined"] == 0
    assert found["reused"] != []
    assert "wrong" not in found["others"], "headers find even what the quarantine would prevent"
