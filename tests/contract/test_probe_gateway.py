"""The probe against our own gateway under uvicorn, with two tenants: what it reads there is what
it expects of any endpoint. The backend repeats the end of a prompt, or of the other tenant's."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import uvicorn

from gateway_kit import MODEL, ScriptedBackend, open_gateway
from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.gate.fetch import Key
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Account, Endpoint
from sekisho.probe.model import TechniqueResult, Verdict
from sekisho.probe.oracles import settle
from sekisho.probe.techniques import (
    Abort,
    Boundary,
    Crossed,
    Ids,
    Prefix,
    Residue,
    ResponseCache,
    Technique,
)

WINDOW = 4000


def backend(leaks: bool) -> ScriptedBackend:
    """Answers with the last characters of the prompt; a leaking one of what another scope sent."""

    def script(request: int, params: SamplingParams) -> Iterable[Delta | Ended]:
        call = found.calls[request - 1]
        tokens = call.tokens
        others = [one.tokens for one in found.calls[:request] if one.scope != call.scope]
        if leaks and others:
            tokens = others[-1]
        text = "".join(map(chr, tokens[-min(len(tokens), params.max_tokens or 16) :]))
        for index, char in enumerate(text):
            yield Delta(request, index, [ord(char)], char, [])
        yield Ended(request, "stop", "", len(text), 0)

    found = ScriptedBackend(script=script, limit=WINDOW)
    return found


@contextlib.contextmanager
def two_tenants(folder: Path, leaks: bool) -> Iterator[Endpoint]:
    gateway = open_gateway(folder, backend(leaks))
    other = gateway.store.create_key(gateway.store.ensure_tenant("beta"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(gateway.app, log_config=None, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            accounts = (Account("alpha", Key(gateway.key)), Account("beta", Key(other)))
            yield Endpoint(url, MODEL, accounts)
        finally:
            server.should_exit = True
            thread.join()
            gateway.store.close()


def run(technique: Technique, endpoint: Endpoint) -> TechniqueResult:
    async def main() -> TechniqueResult:
        async with endpoint:
            return await technique.run(endpoint, Mint(7))

    return settle([asyncio.run(main())]).techniques[0]


TECHNIQUES: list[Technique] = [
    Boundary(length_max=10_000, plants=1, repeats=1, answer_tokens=150),
    Residue(rounds=2, plants=2, words=60, answer_tokens=400),
    Crossed(rounds=1, streams=4),
    Prefix(documents=3, variant_documents=1, words=40, answer_tokens=900, pictures=1),
    Ids(rounds=1),
    ResponseCache(rounds=1, answer_tokens=400),
]


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda one: one.name)
def test_our_gateway_shows_nothing_and_everything_of_it_can_be_read(
    technique: Technique, tmp_path: Path
) -> None:
    with two_tenants(tmp_path, leaks=False) as endpoint:
        result = run(technique, endpoint)
    assert result.findings == ()
    assert result.unusable == {}
    assert result.verdict == Verdict.NO_LEAK_SEEN


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda one: one.name)
def test_a_leak_behind_our_gateway_is_caught(technique: Technique, tmp_path: Path) -> None:
    with two_tenants(tmp_path, leaks=True) as endpoint:
        result = run(technique, endpoint)
    assert result.verdict == Verdict.LEAK


def test_our_gateway_hands_on_nothing_of_what_was_cancelled(tmp_path: Path) -> None:
    with two_tenants(tmp_path, leaks=False) as endpoint:
        result = run(Abort(rounds=2, leaves=4, words=60, answer_tokens=400), endpoint)
    assert result.findings == ()
    assert result.verdict != Verdict.LEAK


def test_the_window_is_read(tmp_path: Path) -> None:
    async def main(endpoint: Endpoint) -> dict[str, int | None]:
        async with endpoint:
            return await endpoint.models(endpoint.accounts[0])

    with two_tenants(tmp_path, leaks=False) as endpoint:
        assert asyncio.run(main(endpoint)) == {MODEL: WINDOW}
