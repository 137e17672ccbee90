"""Which SGLang servers are used at all: at the start, and while serving."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sekisho.engine.demo import ensure_demo_model
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer, load_tokenizer
from sekisho.gateway.engines import fleet as fleet_module
from sekisho.gateway.engines.fleet import EngineFleet
from sekisho.gateway.engines.replica import DOUBTED_AFTER, EngineError, Replica, UnfitError
from sglang_kit import (
    LIMIT,
    Server,
    described,
    end_of,
    fleet_over,
    guard,
    recorded,
    saying,
    server,
    serving,
    silent,
    text_of,
)

PROMPT = list(range(100, 140))
PARAMS = SamplingParams(max_tokens=64, temperature=0.0, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ensure_demo_model())


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "POLL_S", 0.02)


def sound(role: Any, **changed: Any) -> Server:
    return server(role, saying(recorded("greedy", role)), **changed)


def started(
    tokenizer: Tokenizer,
    *servers: Server,
    window: int | None = None,
    test: Callable[[EngineFleet], Awaitable[None]] | None = None,
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(20),
            serving(*servers),
            fleet_over(*servers, tokenizer=tokenizer, window=window) as fleet,
        ):
            if test is not None:
                await test(fleet)

    asyncio.run(main())


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def ask(fleet: EngineFleet) -> list[Any]:
    return [event async for event in fleet.generate("tenant:a", PROMPT, PARAMS)]


# -- at the start


def test_a_guarded_pair_is_served_with_what_its_smallest_server_holds(tokenizer: Tokenizer) -> None:
    async def test(fleet: EngineFleet) -> None:
        assert fleet.ready()
        assert fleet.tokens_max() == 2042  # a pool of 2,048 takes prompts of 6 tokens less
        shown = fleet.capacity()
        assert {node.name: node.pool_tokens for node in shown.nodes} == {
            "prefill-1": 4096,
            "decode-1": 2560,
        }
        assert shown.missing == []

    prefill = sound("prefill", pool=4096, context_length=2048, max_req_input_len=2042)
    decode = sound("decode", pool=2560, context_length=2048, max_req_input_len=2042)
    for each in (prefill, decode):
        each.window = 2048
    started(tokenizer, prefill, decode, test=test)


def test_a_version_whose_published_fault_the_guard_closes_is_served(tokenizer: Tokenizer) -> None:
    """sglang#30233: before 0.5.20."""
    started(tokenizer, sound("prefill", version="0.5.19"), sound("decode", version="0.5.19"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (False, "guard is not active"),
        ({"active": False}, "guard is not active"),
        ({"role": "both"}, "its guard is that of another role, both"),
        ({"limit": 0}, "none"),
        ({"limit": "many"}, "/server_info"),
    ],
)
def test_a_server_without_its_guard_refuses_the_start(
    tokenizer: Tokenizer, role: str, said: Any, why: str
) -> None:
    told = guard(role, **said) if isinstance(said, dict) else said
    both = [sound(each, said=told if each == role else None) for each in ("prefill", "decode")]
    with pytest.raises(EngineError) as refused:
        started(tokenizer, *both)
    line = str(refused.value)
    assert line.startswith(f"{role} http://127.0.0.1:")
    assert why in line
    assert line.isprintable()


def test_one_rank_without_a_guard_is_enough(tokenizer: Tokenizer) -> None:
    prefill = sound("prefill")
    two = sound("decode", dp_size=2)
    two.info = described("decode", said=guard("decode"), dp_size=2).replace(
        b'"internal_states": [', b'"internal_states": [{"memory_usage": {}}, '
    )
    with pytest.raises(EngineError, match="guard is not active"):
        started(tokenizer, prefill, two)


def test_a_server_that_was_named_for_another_role_refuses_the_start(tokenizer: Tokenizer) -> None:
    wrong = sound("prefill")
    wrong.info = described("decode", said=guard("decode"))
    with pytest.raises(EngineError, match="named as prefill, and states that it is decode"):
        started(tokenizer, wrong, sound("decode"))


def test_a_server_that_does_not_answer_refuses_the_start(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        prefill, decode = sound("prefill"), sound("decode")
        async with serving(prefill, decode):
            await decode.stop()
            with pytest.raises(EngineError, match=r"decode http://.*: no connection"):
                async with fleet_over(prefill, decode, tokenizer=tokenizer):
                    pass

    asyncio.run(main())


def test_an_inverted_window_refuses_the_start(tokenizer: Tokenizer) -> None:
    """The incident of 2026: prefill's pool is smaller than what the engine advertises."""
    small = sound("prefill", pool=1024)
    with pytest.raises(EngineError) as refused:
        started(tokenizer, small, sound("decode"))
    line = str(refused.value)
    assert line.isprintable()
    assert all(part in line for part in (small.url, "1024", "4096"))


def test_a_window_that_a_server_does_not_hold_refuses_the_start(tokenizer: Tokenizer) -> None:
    with pytest.raises(EngineError, match=r"holds 4090 tokens, the window is 4096"):
        started(tokenizer, sound("prefill"), sound("decode"), window=4096)


def test_a_smaller_window_is_kept(tokenizer: Tokenizer) -> None:
    async def test(fleet: EngineFleet) -> None:
        assert fleet.tokens_max() == 512
        end = end_of([e async for e in fleet.generate("t", [5] * 512, PARAMS)])
        assert end.code == "context_length_exceeded"

    started(tokenizer, sound("prefill"), sound("decode"), window=512, test=test)


# -- while serving


def replaced(**changed: Any) -> Callable[[Server], bytes]:
    def info(each: Server) -> bytes:
        return described(each.role, **{"said": guard(each.role), **changed})

    return info


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("become", "why"),
    [
        (replaced(said=None), "guard is not active"),
        (replaced(pool=2048), "holds"),
        (
            lambda each: described(each.role, said=guard(each.role, limit=LIMIT - 1)),
            "prompts up to",
        ),
        (lambda each: b"<html>", "HTML"),
    ],
)
def test_a_server_that_became_unfit_leaves_and_comes_back(
    tokenizer: Tokenizer, role: str, become: Callable[[Server], bytes], why: str
) -> None:
    prefill, decode = sound("prefill"), sound("decode")
    changed = prefill if role == "prefill" else decode

    async def test(fleet: EngineFleet) -> None:
        before, changed.info = changed.info, become(changed)
        await settled(lambda: not fleet.ready())
        assert fleet.tokens_max() == 0
        assert fleet.refusal().startswith(f"{role}-1: ")
        assert why in fleet.refusal()
        assert "127.0.0.1" not in fleet.refusal()
        assert fleet.capacity().missing == [role]
        assert end_of(await ask(fleet)).code == "not_ready"
        assert prefill.asked == decode.asked == []
        changed.info = before
        await settled(fleet.ready)
        assert end_of(await ask(fleet)).code == "stop"

    started(tokenizer, prefill, decode, test=test)


def test_what_a_server_had_under_way_ends_when_it_loses_its_guard(tokenizer: Tokenizer) -> None:
    prefill, decode = sound("prefill"), server("decode", silent())

    async def test(fleet: EngineFleet) -> None:
        asking = asyncio.create_task(ask(fleet))
        await settled(lambda: bool(decode.asked))
        decode.info = described("decode")
        assert end_of(await asking).code == "node_lost"

    started(tokenizer, prefill, decode, test=test)


def test_a_dead_server_is_left_and_its_restart_noticed(tokenizer: Tokenizer) -> None:
    prefill, decode = sound("prefill"), sound("decode")

    async def test(fleet: EngineFleet) -> None:
        port = int(decode.url.rpartition(":")[2])
        await decode.stop()
        await settled(lambda: not fleet.ready())
        await decode.start(port)
        await settled(fleet.ready)
        assert text_of(await ask(fleet)).startswith("A checkpoint")

    started(tokenizer, prefill, decode, test=test)


def test_a_request_that_meets_a_dead_server_fails_and_the_next_one_does_not(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "POLL_S", 1000.0)
    prefill, dead, alive = sound("prefill"), sound("decode"), sound("decode")

    async def test(fleet: EngineFleet) -> None:
        await dead.stop()
        assert end_of(await ask(fleet)).code == "node_lost"
        for _ in range(3):
            assert end_of(await ask(fleet)).code == "stop"
        assert len(alive.asked) == 3

    started(tokenizer, prefill, dead, alive, test=test)


def test_requests_go_to_the_least_busy_in_turn(tokenizer: Tokenizer) -> None:
    prefill = server("prefill", silent())
    decodes = [server("decode", silent()) for _ in range(3)]

    async def test(fleet: EngineFleet) -> None:
        asking = [asyncio.create_task(ask(fleet)) for _ in range(6)]
        await settled(lambda: sum(len(each.asked) for each in decodes) == 6)
        assert [len(each.asked) for each in decodes] == [2, 2, 2]
        await fleet.stop(0.0)
        codes = {end_of(await each).code for each in asking}
        assert codes == {"shutting_down"}

    started(tokenizer, prefill, *decodes, test=test)


def test_a_late_server_gets_nothing_new_and_keeps_what_it_has() -> None:
    replica = Replica("prefill", "http://p", "prefill-1")
    lost: list[str] = []
    replica.watch(lambda code, _why: lost.append(code))
    for _ in range(DOUBTED_AFTER - 1):
        replica.unfit(UnfitError("late", late=True))
        assert not replica.why
    replica.unfit(UnfitError("late", late=True))
    assert replica.why == "late"
    assert lost == []
    replica.unfit(UnfitError("unguarded"))
    assert lost == ["node_lost"]


def test_a_stopped_fleet_leaves_no_connection_and_no_task(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        prefill, decode = sound("prefill"), server("decode", silent())
        async with serving(prefill, decode):
            async with fleet_over(prefill, decode, tokenizer=tokenizer) as fleet:
                asking = asyncio.create_task(ask(fleet))
                await settled(lambda: bool(decode.asked))
                await fleet.stop(0.0)
                assert end_of(await asking).code == "shutting_down"
                assert decode.aborted == [decode.asked[0]["rid"]]
                with contextlib.suppress(asyncio.CancelledError):
                    await decode.gone.wait()
            assert end_of(await ask(fleet)).code == "not_ready"

    asyncio.run(main())
