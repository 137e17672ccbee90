"""The conformance suite with vLLM's Mooncake connector: it passes, and without the guard's checks
it fails where each of them is needed."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from rig import STAND_INS, environment, installed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def _suite(folder: Path, off: Sequence[str]) -> tuple[int, set[str]]:
    """Its exit code, and the cases that failed."""
    switch = folder / "switch.json"
    switch.write_text(json.dumps({"off": list(off)}))
    venv = installed("vllm", "venv", ask="vllm")
    more = {"ENGINE_STAND_INS": "vllm", "VLLM_CPU_KVCACHE_SPACE": "1", "ENGINE_SWITCH": str(switch)}
    more |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "20"}
    command = [
        str(venv / "bin" / "python"),
        "-m",
        "pytest",
        "--pyargs",
        "sekisho.guard.conformance",
    ]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", "-W", "ignore", "-ra"],
        env=environment([STAND_INS], more),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    failed = set(re.findall(r"^FAILED \S*::(\w+)", done.stdout, re.M))
    print(f"\n{done.stdout.strip().splitlines()[-1]}")
    assert done.returncode in (os.EX_OK, 1), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, failed


def test_mooncake_conforms(tmp_path: Path) -> None:
    assert _suite(tmp_path, []) == (0, set())


def test_the_suite_sees_each_check_that_is_missing(tmp_path: Path) -> None:
    _, failed = _suite(tmp_path, ["admission", "arrival", "prefix"])
    assert {
        "test_a_shorter_prompt_at_prefill_fails",
        "test_a_longer_prompt_at_prefill_fails",
        "test_parameters_of_two_requests_that_are_swapped_fail",
        "test_success_that_was_told_and_not_written_fails",
        "test_a_salt_that_the_prefix_cache_ignores_is_not_ignored",
        "test_an_adapter_that_the_prefix_cache_ignores_is_not_ignored",
    } <= failed
