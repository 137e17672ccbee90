"""The lab's servers for the probe: who may reach them, and the defects before an engine, each over
a backend that repeats the end of a prompt. The engine's own run on the real model, in e2e."""

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from starlette.types import ASGIApp

from gateway_kit import VOCAB, CharTokenizer, ScriptedBackend
from lab_kit import stand_in_model
from sekisho.core.memory import PageMemory
from sekisho.core.pool import Pool
from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.engine.policy import POLICIES
from sekisho.gate.fetch import Key
from sekisho.gateway.backend import Backend
from sekisho.lab.controls import SIZES, positive
from sekisho.lab.defects_http import HTTP_DEFECTS
from sekisho.lab.leaky_engine import Colocated, SharedPages
from sekisho.lab.leaky_gateway import DirtyChannels, Replaying, SharedCollector
from sekisho.lab.machine import LabModel
from sekisho.lab.serving import LOOPBACK, LabBackend, Served, serving
from sekisho.lab.unsafe import LabError
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Account, Endpoint
from sekisho.probe.model import TechniqueResult, Verdict
from sekisho.probe.oracles import settle
from sekisho.probe.techniques import TECHNIQUES, Abort, Crossed, Ids, ResponseCache, Technique
from stand_in import LAYOUT, answer

MODEL = cast(
    LabModel,
    SimpleNamespace(
        tokenizer=CharTokenizer(), spec=SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(0,))
    ),
)


class Echo(ScriptedBackend):
    """Answers with the end of the prompt, so slowly that a client can leave."""

    async def _follow(
        self, request: int, params: SamplingParams
    ) -> AsyncGenerator[Delta | Ended, None]:
        tokens = self.calls[request - 1].tokens[-params.max_tokens :]
        for index, token in enumerate(tokens):
            if index % 20 == 0:
                await asyncio.sleep(0.01)
            yield Delta(request, index, [token], chr(token), [])
        yield Ended(request, "stop", "", len(tokens), 0)


def plain(app: ASGIApp) -> ASGIApp:
    return app


async def probed(
    technique: Technique,
    around: Callable[[Backend], Backend] | None,
    wrap: Callable[[ASGIApp], ASGIApp],
) -> TechniqueResult:
    echo = Echo(limit=8000)
    async with (
        serving(MODEL, around(echo) if around else echo, wrap) as served,
        endpoint_of(served) as endpoint,
    ):
        result = await technique.run(endpoint, Mint(3))
    return settle([result]).techniques[0]


def endpoint_of(served: Served) -> Endpoint:
    accounts = Account("A", Key(served.key_a)), Account("B", Key(served.key_b))
    return Endpoint(served.base_url, served.model, accounts)


GATEWAYS: dict[str, tuple[Technique, Any, Callable[[ASGIApp], ASGIApp]]] = {
    "abort": (Abort(rounds=1, words=60, answer_tokens=400), DirtyChannels, plain),
    "crossed": (Crossed(rounds=1, streams=4), SharedCollector, plain),
    "ids": (Ids(rounds=1), None, lambda app: Replaying(app, by_question=False)),
    "response-cache": (
        ResponseCache(rounds=1, answer_tokens=400),
        None,
        lambda app: Replaying(app, by_question=True),
    ),
}


@pytest.mark.parametrize("name", GATEWAYS)
def test_a_defect_before_the_engine_is_caught(name: str) -> None:
    technique, around, wrap = GATEWAYS[name]
    assert asyncio.run(probed(technique, around, wrap)).verdict == Verdict.LEAK


@pytest.mark.parametrize("name", GATEWAYS)
def test_and_without_it_the_same_server_shows_nothing(name: str) -> None:
    result = asyncio.run(probed(GATEWAYS[name][0], None, plain))
    assert result.findings == ()
    assert result.verdict == Verdict.NO_LEAK_SEEN


@pytest.mark.parametrize("around", [DirtyChannels, SharedCollector])
def test_one_after_the_other_and_to_its_end_every_answer_is_its_own(
    around: Callable[[Backend], Backend],
) -> None:
    async def main() -> list[str]:
        backend = around(Echo(limit=8000))
        return [await text_of(backend, text) for text in ("one", "two", "three")]

    assert asyncio.run(main()) == ["one", "two", "three"]


async def text_of(backend: Backend, text: str) -> str:
    params = SamplingParams(max_tokens=99)
    events = [event async for event in backend.generate("s", [ord(c) for c in text], params)]
    assert isinstance(events[-1], Ended)
    assert len({event.request for event in events}) == 1
    return "".join(event.text for event in events if isinstance(event, Delta))


def test_every_technique_has_a_defect_with_a_report_and_sizes_that_it_takes() -> None:
    assert HTTP_DEFECTS.keys() == TECHNIQUES.keys() == SIZES.keys()
    for name, defect in HTTP_DEFECTS.items():
        assert TECHNIQUES[name](**SIZES[name]).cost().requests < 400
        assert defect.name and defect.report and defect.text
    assert len({defect.name for defect in HTTP_DEFECTS.values()}) == len(HTTP_DEFECTS)


def test_a_technique_without_a_defect_is_refused_in_one_line() -> None:
    async def main() -> None:
        async with positive("nothing"):
            pass

    with pytest.raises(LabError, match="no defect is for 'nothing'; there are: boundary, ") as told:
        asyncio.run(main())
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("isolation", ["standard", "strict"])
def test_pages_that_tenants_share_refuse_a_policy_that_serves_them(isolation: str) -> None:
    memory = PageMemory(np.zeros(2 * LAYOUT.page_bytes, np.uint8), LAYOUT, 2)
    SharedPages(memory, Pool(2, 1), POLICIES["off"])
    with pytest.raises(LabError, match="never serves tenants"):
        SharedPages(memory, Pool(2, 1), POLICIES[isolation])


def test_it_listens_to_this_machine_alone_and_its_keys_die_with_it() -> None:
    async def started() -> Served:
        async with serving(MODEL, Echo()) as served:
            assert served.base_url.startswith(f"http://{LOOPBACK}:")
            assert await asyncio.to_thread(status, served, served.key_a) == 200
            assert await asyncio.to_thread(status, served, served.key_a[:-1] + "#") == 401
            return served

    first, second = (asyncio.run(started()) for _ in range(2))
    keys = {first.key_a, first.key_b, second.key_a, second.key_b}
    assert len(keys) == 4
    assert LOOPBACK == "127.0.0.1"
    with pytest.raises(urllib.error.URLError):
        status(first, first.key_a)


def status(served: Served, key: str) -> int:
    request = urllib.request.Request(
        f"{served.base_url}/models", headers={"authorization": f"Bearer {key}"}
    )
    try:
        with contextlib.closing(urllib.request.urlopen(request, timeout=10)) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@contextlib.asynccontextmanager
async def stepped(technique: str) -> AsyncIterator[tuple[LabBackend, Colocated]]:
    node = Colocated(stand_in_model(), technique)
    backend = LabBackend(node, 1024, 512)
    backend.start()
    try:
        yield backend, node
    finally:
        await asyncio.to_thread(backend.stop)
        node.close()


async def tokens_of(backend: Backend, scope: str, prompt: list[int], count: int) -> list[int]:
    events = backend.generate(scope, prompt, SamplingParams(max_tokens=count, temperature=0))
    return [token async for e in events if isinstance(e, Delta) for token in e.tokens]


PROMPT_A, PROMPT_B = list(range(60)), [5] * 20


@pytest.mark.parametrize("technique", ["", "residue", "prefix", "timing", "interference"])
def test_alone_each_engine_answers_from_the_prompt(technique: str) -> None:
    async def main() -> list[int]:
        async with stepped(technique) as (backend, _):
            return await tokens_of(backend, "a", PROMPT_A, 8)

    assert asyncio.run(main()) == answer(PROMPT_A, 8)


@pytest.mark.parametrize(
    ("technique", "prompt", "is_own"),
    [
        ("", PROMPT_B, True),
        ("", PROMPT_A[:55], True),
        ("residue", PROMPT_B, False),
        ("prefix", PROMPT_A[:55], False),
        ("prefix", PROMPT_B, True),
        ("prefix", PROMPT_A[:40] + PROMPT_B, True),  # of which two pages are the same
        ("prefix", PROMPT_A[:50] + 3 * PROMPT_B, True),  # and here three, and many are not
        ("timing", PROMPT_A[:55], True),
    ],
)
def test_after_another_tenant_an_engine_answers_from_what_its_defect_says(
    technique: str, prompt: list[int], is_own: bool
) -> None:
    async def main() -> list[int]:
        async with stepped(technique) as (backend, _):
            await tokens_of(backend, "a", PROMPT_A, 8)
            return await tokens_of(backend, "b", prompt, 8)

    assert (asyncio.run(main()) == answer(prompt, 8)) == is_own


@pytest.mark.parametrize(("technique", "is_own"), [("", True), ("interference", False)])
def test_beside_another_tenant(technique: str, is_own: bool) -> None:
    async def main() -> list[list[int]]:
        async with stepped(technique) as (backend, _):
            both = tokens_of(backend, "a", PROMPT_A, 12), tokens_of(backend, "b", PROMPT_B, 8)
            return list(await asyncio.gather(*both))

    found = asyncio.run(main())
    assert (found == [answer(PROMPT_A, 12), answer(PROMPT_B, 8)]) == is_own


def test_a_client_that_leaves_frees_its_request_in_the_engine() -> None:
    async def main() -> None:
        async with stepped("") as (backend, node):
            said: list[Delta | Ended] = []
            outputs = node.outputs

            def heard() -> list[Delta | Ended]:
                said.extend(new := outputs())
                return new

            node.outputs = heard  # type: ignore[method-assign]
            params = SamplingParams(max_tokens=900, temperature=0)
            events = backend.generate("a", PROMPT_A, params)
            await anext(events)
            await events.aclose()
            while not (ends := [event.code for event in said if isinstance(event, Ended)]):
                await asyncio.sleep(0.01)
            assert ends == ["client_gone"]
            assert await tokens_of(backend, "b", PROMPT_B, 4) == answer(PROMPT_B, 4)

    asyncio.run(main())


def test_an_engine_that_fails_ends_every_request_and_serves_no_more() -> None:
    async def main() -> None:
        async with stepped("") as (backend, node):

            def step() -> bool:
                raise ValueError("rows")

            node.step = step  # type: ignore[method-assign]
            events = backend.generate("a", PROMPT_A, SamplingParams(max_tokens=4))
            [end] = [event async for event in events]
            assert isinstance(end, Ended) and end.code == "node_lost"
            assert not backend.ready()
            assert isinstance(backend.failure, ValueError)

    asyncio.run(main())
