"""`sekisho probe` against real engines, as a user calls it. Prints what was observed.

make test-engines
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyPair
from rig_llama_cpp import LlamaServer
from rig_sglang_router import SglangRouter
from rig_vllm import NAME, VllmServer

from sekisho.engine.demo import ensure_demo_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(2400)]

SEED = 20261202
ONE_KEY_EACH = [f"probe-{secrets.token_hex(12)}" for _ in range(2)]
JUDGED = {"leak", "no leak seen"}


@dataclass(frozen=True)
class Probed:
    """One run of the command."""

    code: int
    result: dict[str, Any]

    def of(self, technique: str) -> dict[str, Any]:
        [found] = [one for one in self.result["techniques"] if one["technique"] == technique]
        return dict(found)

    def rules(self) -> set[str]:
        found = [one["findings"] for one in self.result["techniques"]]
        return {finding["rule"] for findings in found for finding in findings}


def probe(url: str, model: str, *arguments: str, folder: Path) -> Probed:
    command = [str(Path(sys.executable).with_name("sekisho")), "probe", "run"]
    command += ["--base-url", f"{url}/v1", "--model", model, "--seed", str(SEED)]
    command += ["--run-folder", str(folder / "run"), "--format", "json", *arguments]
    keys = {f"SEKISHO_PROBE_KEY_{name}": key for name, key in zip("AB", ONE_KEY_EACH, strict=True)}
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=1800,
        env=os.environ | keys,
    )
    assert done.stdout, done.stderr
    probed = Probed(done.returncode, json.loads(done.stdout))
    print(f"\nseed {SEED}, exit {probed.code}")
    for one in probed.result["techniques"]:
        print(f"  {one['technique']}: {one['sentence']}")
        for finding in one["findings"]:
            print(f"    {finding['rule']} {finding['message']}")
    return probed


class TestIncident:
    """Real SGLang 0.5.19 with prefill and decode apart behind its own router: prefill holds 1,024
    tokens, decode 2,048, and 4,096 are advertised (sglang#30233)."""

    @pytest.fixture(scope="class", params=["stock", "guarded"])
    @classmethod
    def probed(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[bool, Probed]:
        folder = tmp_path_factory.mktemp(request.param)
        guard = request.param == "guarded"
        sizes = {"prefill_tokens": 1024, "decode_tokens": 2048, "context": 4096, "waiting_s": 60}
        with (
            FaultyPair("0.5.19", guard=guard, folder=folder, **sizes) as pair,
            SglangRouter(pair) as router,
        ):
            print(f"\n{request.param} 0.5.19 ready after {pair.start_seconds:.0f} s")
            more = ["--technique", "boundary", "--window", "4096", "--size", "quick"]
            more += ["--timeout", "45"]  # those that stock prefill holds are freed after 60 s
            model = str(ensure_demo_model())
            return guard, probe(router.url, model, *more, folder=folder)

    def test_it_leaks_and_is_caught_and_guarded_it_does_not(
        self, probed: tuple[bool, Probed]
    ) -> None:
        guard, seen = probed
        boundary = seen.of("boundary")
        if guard:
            assert boundary["verdict"] == "no leak seen"
            assert "PROBE001" not in seen.rules()
        else:
            assert boundary["verdict"] == "leak"
            assert "PROBE001" in seen.rules()
            assert seen.code == 1

    def test_the_limit_that_no_status_shows_is_found(self, probed: tuple[bool, Probed]) -> None:
        """Prefill takes 1,018 tokens; guarded, those above are refused with both numbers."""
        guard, seen = probed
        told = any("did not know the end" in note for note in seen.of("boundary")["notes"])
        assert told != guard


class TestVllm:
    """Real vLLM 0.32.0, one server, its prefix cache shared by its two keys."""

    @pytest.fixture(scope="class")
    @classmethod
    def probed(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
        folder = tmp_path_factory.mktemp("vllm")
        flags = ["--dtype", "float32", "--api-key", *ONE_KEY_EACH]
        with VllmServer(context=2048, flags=flags, folder=folder) as server:
            print(f"\nvLLM ready after {server.start_seconds:.0f} s")
            yield probe(server.server.url, NAME, "--size", "quick", folder=folder)

    def test_every_technique_comes_to_a_verdict(self, probed: Probed) -> None:
        assert {one["verdict"] for one in probed.result["techniques"]} <= JUDGED

    def test_nothing_of_the_other_account_is_in_an_answer(self, probed: Probed) -> None:
        assert not probed.rules() & {"PROBE001", "PROBE008", "PROBE012"}

    def test_its_shared_prefix_cache_is_seen_by_time(self, probed: Probed) -> None:
        assert "PROBE010" in probed.rules()


@pytest.mark.skipif(not LlamaServer.is_installed(), reason="takes ten minutes to compile")
class TestLlamaCpp:
    """A real llama.cpp server, four slots, two keys."""

    @pytest.fixture(scope="class")
    @classmethod
    def probed(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
        folder = tmp_path_factory.mktemp("llama.cpp")
        flags = ["--api-key", ",".join(ONE_KEY_EACH)]
        with LlamaServer(flags=flags, folder=folder) as server:
            print(f"\nllama.cpp ready after {server.start_seconds:.0f} s")
            yield probe(server.url, "demo", "--size", "quick", folder=folder)

    def test_every_technique_comes_to_a_verdict(self, probed: Probed) -> None:
        assert {one["verdict"] for one in probed.result["techniques"]} <= JUDGED

    def test_nothing_of_the_other_account_is_in_an_answer(self, probed: Probed) -> None:
        assert not probed.rules() & {"PROBE001", "PROBE008", "PROBE012"}
