"""Active or dead: a guard that does not hold every seam, or whose peer has none, serves nothing.

SGLang logs a plugin that fails and starts without it; the guard ends the process instead.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyPair, ask_now, make, message_of, notes, text_of, wait_for
from rig import EngineProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

MARK = "sekisho guard: "


def refusal(process: EngineProcess) -> tuple[int, list[str]]:
    """Start one server; its exit code and what the guard said. It must end by itself."""
    process.start()
    try:
        wait_for(lambda: process.exit_code() is not None, 240, f"{process.name} ends")
        code = process.exit_code()
    finally:
        process.kill()
    text = process.log.read_text(errors="replace")
    assert "The server is fired up" not in text
    said = [line.partition(MARK)[2] for line in text.splitlines() if MARK in line]
    assert code is not None
    print(f"\n  exit {code}: {said}")
    return code, said


def pair_of(folder: Path, **more: Any) -> FaultyPair:
    return FaultyPair("0.5.19", guard=True, folder=folder, **more)


class TestNoStart:
    """One line, and no server."""

    @pytest.mark.parametrize(
        ("broken", "named"),
        [
            (
                "parameter",
                "has parameters self, transferred, not the known",
            ),
            ("missing", "_pre_alloc is missing"),
            ("class", "MooncakeKVSender"),
            ("queue", "FastQueue has no put and get"),
            ("version", "SGLang 0.5.99 is not a version that the guard knows (0.5.19, 0.5.23)"),
        ],
    )
    def test_a_seam_that_is_not_as_known(self, tmp_path: Path, broken: str, named: str) -> None:
        pair = pair_of(tmp_path, env={"ENGINE_BREAK": broken})
        code, said = refusal(pair.decode)
        assert code != 0
        assert len(said) == 1
        assert named in said[0]

    def test_a_seam_that_something_has_replaced_since(self, tmp_path: Path) -> None:
        _, said = refusal(pair_of(tmp_path, env={"ENGINE_BREAK": "replaced"}).decode)
        assert len(said) == 1
        assert "run_batch was replaced" in said[0]

    def test_a_setting_that_is_neither_on_nor_off(self, tmp_path: Path) -> None:
        pair = pair_of(tmp_path, env={"SEKISHO_GUARD": "yes please"})
        code, said = refusal(pair.prefill)
        assert code != 0
        assert said == ["SEKISHO_GUARD is 'yes please', and must be on or off"]

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (["--page-size", "1"], "--page-size is 1"),
            (["--disaggregation-mode", "null"], "the guard is for prefill and decode servers"),
            (["--disaggregation-transfer-backend", "fake"], "the guard knows mooncake"),
        ],
    )
    def test_a_flag_whose_pages_the_guard_does_not_follow(
        self, tmp_path: Path, flags: list[str], named: str
    ) -> None:
        _, said = refusal(pair_of(tmp_path, flags=flags).decode)
        assert len(said) == 1
        assert named in said[0]


@pytest.fixture(scope="module", params=["prefill", "decode"])
def one_sided(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyPair]:
    """The named role has no guard."""
    folder = tmp_path_factory.mktemp("one-sided") / request.param
    off = {request.param: {"SEKISHO_GUARD": "off"}}
    sides = {"prefill_env": off.get("prefill", {}), "decode_env": off.get("decode", {})}
    with pair_of(folder, waiting_s=15, **sides) as pair:
        yield pair


def test_a_peer_without_a_guard_gets_no_text_out(
    one_sided: FaultyPair, request: pytest.FixtureRequest
) -> None:
    [answers] = ask_now(one_sided, make(notes(51, 64)[0], answer=8), timeout_s=60)
    said = message_of(answers.decode) if answers.decode.status else answers.decode.body
    who = request.node.callspec.params["one_sided"]
    took = answers.decode.seconds
    print(f"\n  {who} without: {answers.decode.status} after {took:.1f} s: {said!r}")
    assert answers.decode.status != 200
    assert not text_of(answers.decode)
    if who == "prefill":
        assert answers.decode.status == 503
        assert "no active guard" in str(said)


class TestSeamCheckRemoved:
    """What the check of the seams is for: without it a server starts with a hole in its guard."""

    def test_a_broken_seam_lets_a_fault_through(self, tmp_path: Path) -> None:
        env = {"ENGINE_BREAK": "parameter", "ENGINE_NO_SEAM_CHECK": "1"}
        with pair_of(tmp_path, env=env, waiting_s=120) as pair:
            victim = make(notes(11, 120)[0], answer=8)
            fault = {"page_unwritten": {"room": victim.room, "page": 3}}
            pair.switch(fault, off=["release"])
            [answers] = ask_now(pair, victim)
            print(f"\n  {answers.decode.status} {text_of(answers.decode)!r}")
            assert answers.decode.status == 200
