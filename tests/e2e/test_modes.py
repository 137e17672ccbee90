"""What a platform says when a protection is off or a part is missing."""

import asyncio
from pathlib import Path

import pytest

from platform_kit import LONG, NODE, Answer, begins, platform, tiny_model, words

pytestmark = pytest.mark.timeout(1200)


def test_without_isolation_it_is_never_ready_and_tenants_are_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model, folder = tiny_model(tmp_path_factory), tmp_path_factory.mktemp("off")

    async def scenario() -> tuple[int, int, Answer]:
        async with running.client() as client:
            live = await client.get("/health/liveness")
            ready = await client.get("/health/readiness")
            return live.status_code, ready.status_code, await client.ask("Hello")

    with platform(folder, model, ["colocated"], isolation="off") as running:
        assert [ready.tenants for _, ready in running.ready] == [False]
        live, ready, answer = asyncio.run(scenario())
    assert (live, ready) == (200, 503)
    assert (answer.status, answer.code, answer.text) == (503, "not_ready", "")


def test_without_mooncake_the_nodes_fall_back_to_memory_and_say_so(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model, folder = tiny_model(tmp_path_factory), tmp_path_factory.mktemp("fallback")
    stub = folder / "stub" / "mooncake"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("")
    (stub / "engine.py").write_text('raise ImportError("libibverbs.so.1: cannot open")\n')

    async def scenario() -> Answer:
        async with running.client() as client:
            return await client.ask(words(50, 1))

    command = ("env", f"PYTHONPATH={stub.parent}", *NODE)
    with platform(folder, model, ["prefill", "decode"], command, transport="auto") as running:
        answer = asyncio.run(scenario())
        running.wait_settled()
    assert (answer.status, len(answer.logprobs)) == (200, 16)
    assert len(running.ready) == 2
    for _, ready in running.ready:
        assert ready.transport == "memory"
        [note] = [note for note in ready.notes if "Mooncake" in note]
        assert note.startswith("memory transport instead of Mooncake: ")
        assert "libibverbs.so.1" in note


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model, folder = tiny_model(tmp_path_factory), tmp_path_factory.mktemp("drain")

    async def scenario() -> tuple[Answer, Answer]:
        async with running.client() as client:
            begun = asyncio.Event()
            stream = asyncio.create_task(
                client.ask(words(20, 1), begins(begun), **LONG, max_tokens=15_000)
            )
            await begun.wait()
            await asyncio.to_thread(running.call, running.fleet.stop(0.1))
            return await stream, await client.ask(words(20, 1))

    with platform(folder, model, ["colocated"]) as running:
        stream, late = asyncio.run(scenario())
        assert running.fleet.pids() == {}
    assert (stream.status, stream.code) == (200, "shutting_down")
    assert stream.text
    assert (stream.finish, stream.done) == (None, False)
    assert (late.status, late.code) == (503, "not_ready")
    assert late.headers["retry-after"] == "5"


def test_without_a_model_folder_a_node_ends_with_one_line_and_2(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The gateway looks first; a node that finds the folder gone must not be started for ever."""
    from sekisho.gateway.fleet import FleetError

    model = tiny_model(tmp_path_factory)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    with (
        pytest.raises(FleetError, match=r"colocated-0\.1 ended with code 2 before it was ready"),
        platform(tmp_path, tmp_path, ["colocated"]),
    ):
        pass
    [line] = (tmp_path / "nodes.log").read_text().splitlines()
    assert line.startswith("colocated-0.1: ")
