"""`sekisho serve --engine sglang` in front of a real, guarded SGLang pair, as tenants meet it.

make test-engines
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rig_sglang import SglangPair
from serve_cases import ServedPair

from serve_kit import SEKISHO, Served, launch, serve

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

GUARD = {"SEKISHO_GUARD": "on"}


def command(pair: SglangPair, folder: Path, *more: str) -> list[str]:
    named = ["--sglang-prefill", pair.prefill.url, "--sglang-decode", pair.decode.url]
    state = ["--state-dir", str(folder / "state"), "--port", "0"]
    return [SEKISHO, "serve", "--engine", "sglang", *named, *state, *more]


@pytest.mark.parametrize("version", ["0.5.19", "0.5.23"], scope="class")
class TestGuardedPair(ServedPair):
    """One pair a version."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangPair]:
        folder = tmp_path_factory.mktemp(f"serve-{version}")
        with SglangPair(version, prefill_tokens=8192, env=GUARD, folder=folder) as pair:
            print(f"\n{version} ready after {pair.start_seconds:.0f} s")
            yield pair

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, pair: SglangPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        with serve(command(pair, tmp_path_factory.mktemp("state"))) as served:
            yield served


def test_an_unguarded_pair_is_refused(tmp_path: Path) -> None:
    with SglangPair("0.5.23", prefill_tokens=8192, folder=tmp_path / "pair") as pair:
        with launch(command(pair, tmp_path)) as launched:
            assert launched.wait() == 2
            line = launched.log().splitlines()[-1]
        print(f"\n{line}")
        assert "guard is not active" in line
