"""`sekisho gate` against real engines, both ways. Prints what was observed.

make test-engines
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rig import Engines
from rig_llama_cpp import LlamaServer
from rig_sglang import SglangPair
from rig_vllm import VllmPair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Verdict:
    """One run of the command."""

    code: int
    result: dict[str, Any]

    def findings(self, rule: str) -> list[dict[str, Any]]:
        return [one for one in self.result["findings"] if one["rule"] == rule]

    def held(self) -> dict[str, int]:
        """Tokens by role, as the judgement found them."""
        return {one["role"]: one["servable"] for one in self.result["capacities"]}


def gate(*arguments: str) -> Verdict:
    """The command as a user calls it."""
    program = str(Path(sys.executable).with_name("sekisho"))
    command = [program, "gate", "check", *arguments, "--format", "json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    verdict = Verdict(done.returncode, json.loads(done.stdout))
    stated = " ".join(word for word in arguments if not word.startswith("http"))
    print(f"\n{stated}: exit {verdict.code}, held {verdict.held()}")
    for one in verdict.result["findings"]:
        print(f"  {one['severity']} {one['rule']} {one['message']}")
    return verdict


def started(engines: Engines) -> str:
    return f"\n{type(engines).__name__} ready after {engines.start_seconds:.0f} s"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs, kept by pytest for the last three runs."""
    return tmp_path_factory.mktemp("engines")


class TestInvertedSglang:
    """Prefill holds a quarter of the window, decode two: how the incident's cluster stood."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, folder: Path) -> Iterator[SglangPair]:
        pair = SglangPair(
            "0.5.19", prefill_tokens=1024, decode_tokens=8192, folder=folder / "inverted"
        )
        with pair:
            print(started(pair))
            yield pair

    def test_prefill_is_named_with_1018_against_4096(self, pair: SglangPair) -> None:
        seen = gate(*sglang(pair), "--advertised", "4096")
        assert seen.code == 1
        about = {(one["source"], one["observed"]): one for one in seen.findings("GATE001")}
        short = about[pair.prefill.url, 1018]
        assert short["required"] == 4096
        assert "prefill holds 1018 tokens, 4096 are advertised" in short["message"]
        [faulty] = {one["report"] for one in seen.findings("GATE007")}
        assert faulty == "sglang#30233"

    def test_its_own_window_is_judged_without_being_named(self, pair: SglangPair) -> None:
        seen = gate(*sglang(pair))
        assert seen.code == 1
        assert pair.prefill.url in {one["source"] for one in seen.findings("GATE001")}

    def test_a_claim_that_prefill_holds_is_not_against_it(self, pair: SglangPair) -> None:
        """Both engines still advertise 4,096, which is what a gateway in front would replace."""
        seen = gate(*sglang(pair), "--advertised", "1018")
        assert seen.held()["prefill"] == 1018
        assert seen.findings("GATE006")


class TestHoldingSglang:
    """Both pools hold two windows, on a version without the fault."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, folder: Path) -> Iterator[SglangPair]:
        pair = SglangPair(
            "0.5.23", prefill_tokens=8192, decode_tokens=8192, folder=folder / "holding"
        )
        with pair:
            print(started(pair))
            yield pair

    def test_it_passes(self, pair: SglangPair) -> None:
        seen = gate(*sglang(pair), "--advertised", "4096", "--prompt", "4090")
        assert seen.code == 0
        assert not seen.findings("GATE001")

    def test_its_own_context_is_prompt_and_answer(self, pair: SglangPair) -> None:
        seen = gate(*sglang(pair))
        assert seen.code == 0
        assert seen.held() == {"prefill": 4096, "decode": 4096}

    def test_more_than_the_engines_take_does_not(self, pair: SglangPair) -> None:
        seen = gate(*sglang(pair), "--advertised", "4097", "--prompt", "4090")
        assert seen.code == 1
        assert {one["source"] for one in seen.findings("GATE001")} == {
            pair.prefill.url,
            pair.decode.url,
        }

    def test_without_its_decode_it_does_not(self, pair: SglangPair) -> None:
        seen = gate("--sglang-prefill", pair.prefill.url, "--advertised", "4096")
        assert seen.code == 1
        assert seen.findings("GATE002")

    def test_named_the_other_way_round_it_does_not(self, pair: SglangPair) -> None:
        swapped = ["--sglang-prefill", pair.decode.url, "--sglang-decode", pair.prefill.url]
        seen = gate(*swapped, "--advertised", "1024")
        assert seen.code == 1
        assert seen.findings("GATE012")


class TestVllm:
    """vLLM does not start with a window above its pool: only a claim can be too large."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, folder: Path) -> Iterator[VllmPair]:
        with VllmPair(prefill_tokens=4096, decode_tokens=8192, folder=folder / "vllm") as pair:
            print(started(pair))
            yield pair

    def test_it_passes(self, pair: VllmPair) -> None:
        seen = gate(*vllm(pair))
        assert seen.code == 0
        assert seen.held() == {"prefill": 2048, "decode": 2048}
        pools = {one["role"]: one["ranks"][0]["pool_tokens"] for one in seen.result["readings"]}
        assert pools == {"prefill": 4096 + 32, "decode": 8192 + 32}

    def test_a_claim_above_its_window_does_not(self, pair: VllmPair) -> None:
        seen = gate(*vllm(pair), "--advertised", "4096")
        assert seen.code == 1
        assert {one["observed"] for one in seen.findings("GATE001")} == {2048}

    def test_saved_metrics_give_the_pools_of_both(self, pair: VllmPair, tmp_path: Path) -> None:
        """Without the engine's own limit the smaller pool decides, to the token."""
        arguments = []
        for role, process in (("prefill", pair.prefill), ("decode", pair.decode)):
            file = tmp_path / f"{role}.txt"
            file.write_bytes(process.get("/metrics"))
            arguments.append(["--metrics-file", str(file), "--role", role])
        held = gate(*arguments[0], "--advertised", "4096", "--margin", "1").held()
        assert held == {"prefill": 4096}
        assert gate(*arguments[0], "--advertised", "4097").findings("GATE001")
        assert gate(*arguments[1], "--advertised", "8192").held() == {"decode": 8192}
        assert gate(*arguments[1], "--advertised", "8193").findings("GATE001")


class TestLlamaCpp:
    """Four slots share the context that it was started with."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, folder: Path) -> Iterator[LlamaServer]:
        if not LlamaServer.is_installed():
            pytest.skip("llama.cpp is not installed: make test-engines ENGINES=llama.cpp")
        with LlamaServer(context=8192, slots=4, folder=folder / "llama.cpp") as server:
            print(started(server))
            yield server

    def test_a_slot_is_what_one_request_has(self, server: LlamaServer) -> None:
        seen = gate("--llama-cpp", server.url, "--advertised", "2048", "--margin", "1")
        assert seen.code == 0
        assert seen.held() == {"both": 2048}

    def test_the_whole_context_is_not(self, server: LlamaServer) -> None:
        seen = gate("--engine", server.url, "--advertised", "8192")
        assert seen.code == 1
        assert {one["observed"] for one in seen.findings("GATE001")} == {2048}


def sglang(pair: SglangPair) -> list[str]:
    return ["--sglang-prefill", pair.prefill.url, "--sglang-decode", pair.decode.url]


def vllm(pair: VllmPair) -> list[str]:
    return ["--vllm-prefill", pair.prefill.url, "--vllm-decode", pair.decode.url]
