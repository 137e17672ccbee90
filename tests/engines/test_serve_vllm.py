"""`sekisho serve --engine vllm` in front of a real, guarded vLLM pair, as tenants meet it.

make test-engines
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_vllm import GUARD, KEY
from rig import installed
from rig_vllm import VllmPair
from serve_cases import QUESTION, ServedPair, ask, text_of, until

from serve_kit import SEKISHO, Served, launch, serve

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

FLAGS = ["--enable-prompt-tokens-details"]


def state(folder: Path) -> list[str]:
    return ["--state-dir", str(folder / "state"), "--port", "0"]


def command(pair: VllmPair, folder: Path, *more: str) -> list[str]:
    named = [
        *("--vllm-prefill", f"{pair.prefill.url}@{pair.bootstrap_port}"),
        *("--vllm-decode", pair.decode.url),
    ]
    return [SEKISHO, "serve", "--engine", "vllm", *named, *state(folder), *more]


class TestGuardedPair(ServedPair):
    """One pair, one gateway."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPair]:
        folder = tmp_path_factory.mktemp("serve-vllm")
        env = {"SEKISHO_GUARD_KEY": KEY}
        with VllmPair(context=4096, connector=GUARD, env=env, flags=FLAGS, folder=folder) as pair:
            print(f"\nready after {pair.start_seconds:.0f} s")
            yield pair

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, pair: VllmPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        with serve(command(pair, tmp_path_factory.mktemp("state"))) as served:
            yield served


def test_an_unguarded_pair_is_refused(tmp_path: Path) -> None:
    with VllmPair(context=2048, folder=tmp_path / "pair") as pair:
        with launch(command(pair, tmp_path)) as launched:
            assert launched.wait() == 2
            line = launched.log().splitlines()[-1]
        print(f"\n{line}")
        assert "guard is not active" in line


class TestLocal:
    """The pair that `--local` starts."""

    @pytest.fixture
    def path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM is found as a user's would be."""
        venv = installed("vllm", "venv", ask="vllm")
        monkeypatch.setenv("PATH", f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    def test_it_serves_and_ends_with_the_gateway(self, path: None, tmp_path: Path) -> None:
        asked = [SEKISHO, "serve", "--engine", "vllm", "--local", "--window", "2048"]
        with serve([*asked, *state(tmp_path)]) as served:
            print(f"\n{text_of(ask(served, 'tenant-a', QUESTION))}")
            assert len(_running(tmp_path)) >= 2
            served.interrupt()
            assert served.wait() == 0
            assert not _running(tmp_path)

    def test_it_ends_when_the_gateway_is_killed(self, path: None, tmp_path: Path) -> None:
        asked = [SEKISHO, "serve", "--engine", "vllm", "--local", "--window", "2048"]
        with launch([*asked, *state(tmp_path)]) as launched:
            until(lambda: len(_running(tmp_path)) >= 2)
            launched.process.send_signal(signal.SIGKILL)
            launched.process.wait()
            until(lambda: not _running(tmp_path))

    def test_what_the_guard_says_is_said(self, path: None, tmp_path: Path) -> None:
        """A window that the model does not have: vLLM refuses, and so does the gateway."""
        asked = [SEKISHO, "serve", "--engine", "vllm", "--local", "--window", "900000"]
        with launch([*asked, *state(tmp_path)]) as launched:
            assert launched.wait() == 2
            line = launched.log().splitlines()[-1]
        print(f"\n{line}")
        assert "vLLM" in line
        assert "ended with" in line


def _running(folder: Path) -> list[int]:
    """Processes whose output goes to the logs below ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder) in str((entry / "fd" / "1").readlink()):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
