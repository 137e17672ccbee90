"""Transfers that break their word: the request alone ends with a 5xx, the log says which page was
whose and nothing of the prompt, and pages come back when the writer is known to have ended."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from platform_kit import (
    FAULTY_NODE,
    LONG,
    Answer,
    Client,
    Platform,
    begins,
    platform,
    tiny_model,
    words,
)

pytestmark = pytest.mark.timeout(1200)
MARKER = "Rumpelstilzchen"
VICTIM = f"My password is {MARKER}. {words(30, 1)}"
NEIGHBOURS = [words(40, 20 + n) for n in range(2)]
NEIGHBOUR: dict[str, Any] = {**LONG, "max_tokens": 300}
EVIDENCE = re.compile(
    r"ownership violation (\w+): request=\d+ page=\d+ "
    r"expected=([0-9a-f]+\.\d+) ordinal=\d+ filled=\d+ "
    r"found=([0-9a-f]+\.\d+) ordinal=\d+ filled=\d+"
)


class Faulty:
    """A platform whose prefill node does what `next` says to its next transfer."""

    def __init__(self, running: Platform, faults: Path) -> None:
        self.platform = running
        self._faults = faults

    def next(self, fault: str) -> None:
        draft = self._faults / "draft"
        draft.write_text(fault)
        draft.rename(self._faults / "next")

    def release(self) -> None:
        (self._faults / "release").touch()

    def node(self, role: str) -> str:
        [name] = [name for name in self.platform.fleet.pids() if name.startswith(role)]
        return name

    def evidence(self) -> list[tuple[str, str, str]]:
        """(kind, lease expected, lease found) of every violation in the nodes' log."""
        return EVIDENCE.findall(self.platform.log.read_text())


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    faults = tmp_path_factory.mktemp("faults")
    command = ("env", f"SEKISHO_TEST_FAULTS={faults}", *FAULTY_NODE)
    model = tiny_model(tmp_path_factory)
    folder = tmp_path_factory.mktemp("transfer")
    with platform(folder, model, ["prefill", "decode"], command) as running:
        yield Faulty(running, faults)


@pytest.fixture(scope="module")
def alone(faulty: Faulty) -> list[Answer]:
    """The neighbours' answers while nobody else is there."""

    async def ask() -> list[Answer]:
        async with faulty.platform.client() as client:
            return [await client.ask(prompt, **NEIGHBOUR) for prompt in NEIGHBOURS]

    return asyncio.run(ask())


async def begin_neighbours(client: Client) -> list[asyncio.Task[Answer]]:
    """The neighbours' requests, once each of them has its first text."""
    begun = [asyncio.Event() for _ in NEIGHBOURS]
    tasks = [
        asyncio.create_task(client.ask(prompt, begins(event), **NEIGHBOUR))
        for prompt, event in zip(NEIGHBOURS, begun, strict=True)
    ]
    for event in begun:
        await event.wait()
    return tasks


async def ask_among_neighbours(
    faulty: Faulty, fault: str, alone: list[Answer], client: Client
) -> Answer:
    """The answer to the prompt whose transfer suffers ``fault``; late writes land while its
    neighbours still decode. These must not notice."""
    others = await begin_neighbours(client)
    faulty.next(fault)
    answer = await client.ask(VICTIM)
    faulty.release()
    for expected, task in zip(alone, others, strict=True):
        other = await task
        assert (other.done, other.content) == (True, expected.content)
    return answer


@pytest.mark.parametrize(
    ("fault", "status", "code", "kind"),
    [
        ("fail", 502, "transfer_failed", None),
        ("unknown", 502, "transfer_failed", None),
        ("short", 500, "ownership_violation", "unwritten"),
        ("late", 500, "ownership_violation", "unwritten"),
        ("lie", 500, "ownership_violation", "unwritten"),
        ("foreign", 500, "ownership_violation", "foreign"),
    ],
    ids=["fails", "in_doubt", "is_short", "is_late", "wrote_nothing", "wrote_anothers_pages"],
)
def test_a_transfer_that(
    faulty: Faulty, alone: list[Answer], fault: str, status: int, code: str, kind: str | None
) -> None:
    prefill, known = faulty.node("prefill"), len(faulty.evidence())

    async def scenario() -> Answer:
        async with faulty.platform.client() as client:
            return await ask_among_neighbours(faulty, fault, alone, client)

    answer = asyncio.run(scenario())
    assert (answer.status, answer.code, answer.text) == (status, code, "")
    found = faulty.evidence()[known:]
    if kind is None:
        assert not found
    else:
        assert {each[0] for each in found} == {kind}
        assert all(expected != found for _, expected, found in found)
        faulty.platform.wait_replaced(prefill)
    faulty.platform.wait_settled()
    check_answers(faulty, alone)
    assert faulty.node("prefill") == (prefill if kind is None else faulty.platform.ready[-1][0])


def test_a_transfer_in_doubt_keeps_its_pages_from_everybody_until_it_is_over(
    faulty: Faulty, alone: list[Answer]
) -> None:
    async def scenario() -> Answer:
        async with faulty.platform.client() as client:
            faulty.next("unknown")
            return await client.ask(VICTIM)

    assert asyncio.run(scenario()).code == "transfer_failed"
    pages = faulty.platform.wait_reports(
        lambda found: all(report.pages["leased"] == 0 for report in found.values()),
        "no page held by a request",
    )
    quarantined = {name.partition("-")[0]: r.pages["quarantined"] for name, r in pages.items()}
    assert quarantined["decode"] > 0, "where it may still land"
    check_answers(faulty, alone)
    faulty.release()
    faulty.platform.wait_settled()
    check_answers(faulty, alone)


def test_a_transfer_that_is_duplicated_into_pages_that_have_grown(
    faulty: Faulty, alone: list[Answer]
) -> None:
    known, decode = len(faulty.evidence()), faulty.node("decode")
    # 43 of them are transferred: the last page is partly filled, and decode goes on filling it.
    tokens = list(range(1000, 1044))

    async def scenario() -> Answer:
        async with faulty.platform.client() as client:
            faulty.next("duplicate")
            begun = asyncio.Event()
            victim = asyncio.create_task(
                client.ask(tokens, begins(begun), **LONG, max_tokens=10_000)
            )
            await begun.wait()
            # They run already: a node whose page was hit takes nothing new.
            others = await begin_neighbours(client)
            faulty.release()
            for other, expected in zip(others, alone, strict=True):
                assert (await other).content == expected.content
            return await victim

    answer = asyncio.run(scenario())
    assert (answer.status, answer.code) == (200, "ownership_violation")
    assert (answer.finish, answer.done) == (None, False)
    [(kind, expected, found)] = faulty.evidence()[known:]
    assert kind == "short"
    assert expected == found, "its own lease, its own page, as it was when it was sent"
    # Who wrote there is unknown: the page is never granted again, and its node is replaced.
    faulty.platform.wait_replaced(decode)
    faulty.platform.wait_settled()
    check_answers(faulty, alone)


def test_no_word_of_any_prompt_is_in_any_log(
    faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> Answer:
        async with faulty.platform.client() as client:
            faulty.next("lie")
            return await client.ask(VICTIM)

    prefill = faulty.node("prefill")
    assert asyncio.run(scenario()).code == "ownership_violation"
    faulty.platform.wait_replaced(prefill)
    assert "code=ownership_violation" in caplog.text
    assert "ownership violation unwritten" in faulty.platform.log.read_text()
    assert MARKER not in caplog.text + faulty.platform.log.read_text()


def check_answers(faulty: Faulty, alone: list[Answer]) -> None:
    """The platform serves as before."""

    async def ask() -> None:
        async with faulty.platform.client() as client:
            for prompt, expected in zip(NEIGHBOURS, alone, strict=True):
                assert (await client.ask(prompt, **NEIGHBOUR)).content == expected.content

    asyncio.run(ask())
