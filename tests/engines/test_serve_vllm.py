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
from serve_cases import QUESTION, ServedPair, ask, ready, text_of, until

from serve_kit import SEKISHO, Served, launch, serve, writing_below

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
    def asked(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
        """vLLM is found as a user's would be, and takes what memory it is given."""
        venv = installed("vllm", "venv", ask="vllm")
        monkeypatch.setenv("PATH", f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}")
        return [SEKISHO, "serve", "--engine", "vllm", "--local", *state(tmp_path)]

    def test_it_serves_and_comes_back_and_ends_with_the_gateway(
        self, asked: list[str], tmp_path: Path
    ) -> None:
        with serve([*asked, "--window", "2048"]) as served:
            before = text_of(ask(served, "tenant-a", QUESTION))
            print(f"\n{before}")
            first = set(writing_below(tmp_path))
            log = tmp_path / "state" / "logs" / "vllm-decode.log"
            leader = next(pid for pid in writing_below(log) if os.getsid(pid) == pid)
            os.kill(leader, signal.SIGKILL)
            until(lambda: not ready(served))
            until(lambda: ready(served))
            assert text_of(ask(served, "tenant-a", QUESTION)) == before
            assert first.isdisjoint(writing_below(tmp_path)), "neither half outlives the other"
            served.process.send_signal(signal.SIGKILL)
            served.process.wait()
            until(lambda: not writing_below(tmp_path))

    def test_ctrl_c_while_it_starts_leaves_nothing(self, asked: list[str], tmp_path: Path) -> None:
        with launch(asked) as launched:
            until(lambda: len(writing_below(tmp_path)) > 2)
            launched.interrupt()
            assert launched.wait() == 0
            until(lambda: not writing_below(tmp_path))

    def test_what_vllm_says_at_its_end_is_said(self, asked: list[str], tmp_path: Path) -> None:
        """A window that the model does not have."""
        with launch([*asked, "--window", "900000"]) as launched:
            assert launched.wait() == 2
            line = launched.log().splitlines()[-1]
        print(f"\n{line}")
        assert "ended with" in line
        assert "900000" in line
        until(lambda: not writing_below(tmp_path))
