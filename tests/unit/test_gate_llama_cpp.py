"""The llama.cpp reader against answers of a real llama-server."""

import pytest

from gate_kit import FIXTURES, Speak, judged, response, rules, running, saying
from sekisho.gate.run import Target

NAME = "/models/SmolLM2-135M-Instruct.Q4_1.gguf"
NO_SLOTS = b'{"error":{"code":501,"message":"This server does not support slots endpoint. "}}'


def answers(folder: str) -> dict[str, bytes | Speak]:
    base = FIXTURES / folder
    names = {"/props": "props", "/slots": "slots", "/v1/models": "v1_models"}
    files = {path: base / f"{name}.json" for path, name in names.items()}
    return {path: file.read_bytes() for path, file in files.items() if file.is_file()}


def test_a_slot_of_four_holds_a_quarter_of_the_context() -> None:
    with running(answers("llama.cpp")) as [server]:
        result = judged(Target(source=server.url), window=2048)
        assert "GATE001" in rules(judged(Target(source=server.url), window=2049))
    assert "GATE001" not in rules(result)
    [reading] = result.readings
    assert (reading.engine, reading.version, reading.model) == ("llama.cpp", "b1-0c1e570", NAME)
    assert [(r.name, r.pool_tokens) for r in reading.ranks] == [
        (f"slot {number}", 2048) for number in range(4)
    ]
    assert result.servable == {NAME: 2048}


def test_slots_that_share_one_pool_hold_all_of_it_each() -> None:
    with running(answers("llama.cpp-unified")) as [server]:
        result = judged(Target(source=server.url), window=8192)
    assert result.servable == {NAME: 8192}
    assert "GATE004" in rules(result)  # one request fills it


@pytest.mark.parametrize("status", [404, 501])
def test_without_slots_the_properties_speak_for_each(status: int) -> None:
    changed = answers("llama.cpp")
    changed["/slots"] = saying(response(NO_SLOTS, status))
    with running(changed) as [server]:
        assert judged(Target(source=server.url), window=1).servable == {NAME: 2048}


def test_a_router_is_no_engine() -> None:
    routing = answers("llama.cpp-router")
    routing["/slots"] = saying(response(b'{"error":{"code":400}}', 400))
    with running(routing) as [server]:
        result = judged(Target(source=server.url), window=1)
    assert result.exit_code() == 3
    assert "name the servers behind it" in result.unread[0].reason
