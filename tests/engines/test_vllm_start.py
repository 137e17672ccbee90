"""Active or dead: what a vLLM engine with the guard in its configuration does not start with.

Each case is one engine, without a peer, that must end by itself with one line of the guard's; the
plugin's cases are a process that makes vLLM's scheduler, without a model.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from faulty_vllm import GUARD, KEY
from rig import STAND_INS, EngineError, EngineProcess, environment, installed
from rig_vllm import VllmPair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def _alone(folder: Path, connector: Mapping[str, Any], env: Mapping[str, str]) -> EngineProcess:
    """Decode without its prefill: it refuses before it would need one."""
    pair = VllmPair(
        context=1024,
        prefill_tokens=1024,
        decode_tokens=1024,
        connector=connector,
        env=env,
        flags=["--load-format", "dummy"],
        folder=folder,
    )
    return pair.decode


def _last_words(folder: Path, connector: Mapping[str, Any], **env: str) -> str:
    """The one line that the guard wrote; the engine must have ended by itself."""
    key = {"SEKISHO_GUARD_KEY": KEY} if "SEKISHO_GUARD_KEY" not in env else {}
    process = _alone(folder, connector, key | env)
    process.start()
    try:
        with pytest.raises(EngineError, match="ended with"):
            process.wait_ready(200)
    finally:
        process.kill()
    said = re.findall(r"^sekisho guard: .*$", process.log.read_text(errors="replace"), re.M)
    assert len(said) == 1, said
    print(f"\n{said[0]}")
    return str(said[0])


def test_without_a_key(tmp_path: Path) -> None:
    assert "SEKISHO_GUARD_KEY" in _last_words(tmp_path, GUARD, SEKISHO_GUARD_KEY="")


def test_with_the_policy_to_recompute(tmp_path: Path) -> None:
    said = _last_words(tmp_path, {**GUARD, "kv_load_failure_policy": "recompute"})
    assert "kv_load_failure_policy is recompute" in said


def test_with_a_seam_that_has_changed(tmp_path: Path) -> None:
    said = _last_words(tmp_path, GUARD, ENGINE_SWITCH=os.devnull, ENGINE_BREAK_VLLM="parameter")
    assert "free_blocks" in said


def test_with_a_connector_that_has_one_more_method(tmp_path: Path) -> None:
    said = _last_words(tmp_path, GUARD, ENGINE_SWITCH=os.devnull, ENGINE_BREAK_VLLM="method")
    assert "bring_your_own_blocks" in said


def test_with_an_unknown_version(tmp_path: Path) -> None:
    said = _last_words(tmp_path, GUARD, ENGINE_SWITCH=os.devnull, ENGINE_BREAK_VLLM="version")
    assert "0.99" in said


def test_with_an_inner_connector_that_was_not_tried(tmp_path: Path) -> None:
    extra = {**GUARD["kv_connector_extra_config"], "inner": "OffloadingConnector"}
    said = _last_words(tmp_path, {**GUARD, "kv_connector_extra_config": extra})
    assert "OffloadingConnector is not supported" in said


_MAKE = """
import sys
from sekisho.guard.vllm import plugin
plugin.load()
import vllm_drive
vllm_drive.make_scheduler(vllm_drive.Scheduler, "kv_consumer", 64, stock=sys.argv[1] == "stock")
print("made")
"""


@pytest.mark.parametrize(
    ("wanted", "key", "connector", "line"),
    [
        ("on", KEY, "guarded", ""),
        ("", "", "stock", ""),
        ("on", KEY, "stock", "does not name SekishoConnector"),
        ("on", "", "guarded", "no key"),
        ("maybe", KEY, "guarded", "must be on or off"),
    ],
)
def test_the_plugin_lets_no_engine_start_without_the_guard(
    wanted: str, key: str, connector: str, line: str
) -> None:
    venv = installed("vllm", "venv", ask="vllm")
    more = {"ENGINE_STAND_INS": "vllm", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    more |= {"SEKISHO_GUARD": wanted, "SEKISHO_GUARD_KEY": key}
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", _MAKE, connector],
        env=environment([STAND_INS, Path(__file__).parent], more),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = [one for one in done.stderr.splitlines() if one.startswith("sekisho guard: ")]
    if line:
        assert (done.returncode, len(said)) == (2, 1), done.stderr[-2000:]
        assert line in said[0]
        assert "made" not in done.stdout
    else:
        assert (done.returncode, said) == (0, []), done.stderr[-2000:]
        assert "made" in done.stdout
