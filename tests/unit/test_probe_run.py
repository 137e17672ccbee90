"""A run over toys: its folder, its budget, how it stops and goes on, and what it never keeps."""

import asyncio
import contextlib
import dataclasses
import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from probe_kit import KEY_A, KEY_B, MODEL, Server, accounts, http, serving
from probe_toy import Leak, Toy
from sekisho.probe.budget import Budget, Cost
from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Ask
from sekisho.probe.folder import (
    Folder,
    FolderError,
    read_exchanges,
    read_finished,
    read_plan,
    read_result,
    read_spent,
    shown,
)
from sekisho.probe.model import Result, TechniqueResult, Verdict, conclude
from sekisho.probe.plan import SAME_ACCOUNT, Plan, PlanError, is_loopback, plan
from sekisho.probe.run import read_judged, run_probe
from sekisho.probe.sizes import ARGUMENTS, BUDGETS, SIZES, made
from sekisho.probe.techniques import TECHNIQUES, Crossed, Residue, Technique

RESIDUE = Residue(rounds=2, plants=2, words=60)
CROSSED = Crossed(rounds=1, streams=3)
NAMES = ("residue", "crossed")
URL = "http://127.0.0.1:9/v1"


def planned(server: Server | None = None, **more: Any) -> Plan:
    found = plan(URL if server is None else server.url, MODEL, seed=7, techniques=NAMES)
    return msgspec.structs.replace(found, **more)


class Stopped(Technique):
    """Asks some questions and is stopped there, as by Ctrl-C."""

    name, goal, report = "crossed", "stop", "x#1"

    def cost(self) -> Cost:
        return Cost()

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        for _ in range(2):
            await endpoint.ask(endpoint.accounts[0], Ask(prompt="so far", answer_tokens=1))
        raise asyncio.CancelledError


class Broken(Stopped):
    """Has a bug, whose message holds a secret."""

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        raise KeyError("the secret itself")


class Cheap(Stopped):
    """Sees nothing."""

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        ask = Ask(prompt=str(mint.number()), answer_tokens=1)
        outcomes = [await endpoint.ask(endpoint.accounts[1], ask) for _ in range(3)]
        return conclude(self.name, outcomes, [])


@dataclasses.dataclass
class Ran:
    """What came of it, and the prompts that the server saw."""

    result: Result
    prompts: list[str]


def ran(
    path: Path,
    toy: Toy,
    techniques: Sequence[Technique] = (RESIDUE, CROSSED),
    resume: bool = False,
    doubts: dict[str, str] | None = None,
    **more: Any,
) -> Ran:
    async def main() -> Ran:
        async with serving(toy.speak) as server:
            asked = planned(server, **more)
            opened = Folder.resumed(path) if resume else Folder.new(path, asked)
            with opened as folder:
                found = await run_probe(asked, accounts(), techniques, folder, doubts=doubts)
            return Ran(found, [r.prompt for r in server.requests if r.method == "POST"])

    return asyncio.run(main())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "exchanges.jsonl").read_text().splitlines()]


def verdicts(result: Result) -> dict[str, Verdict]:
    return {one.technique: one.verdict for one in result.techniques}


def test_a_clean_run_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "run"
    found = ran(path, Toy())
    assert verdicts(found.result) == dict.fromkeys(NAMES, Verdict.NO_LEAK_SEEN)
    assert found.result.exit_code() == 0
    assert read_result(path) == read_judged(path) == found.result
    assert list(read_finished(path)) == list(NAMES)
    logged = lines(path)
    assert [one["serial"] for one in logged] == list(range(1, len(found.prompts) + 1))
    assert read_spent(path).requests == len(found.prompts)
    assert read_plan(path).seed == 7


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(0o755)
    ran(path, Toy())
    modes = {one: stat.S_IMODE(one.stat().st_mode) for one in [path, *path.rglob("*")]}
    assert len(modes) == 8
    for one, mode in modes.items():
        assert mode == (0o700 if one.is_dir() else 0o600), one


def test_a_leak_is_found_and_its_exchanges_can_be_shown(tmp_path: Path) -> None:
    found = ran(tmp_path / "run", Toy("residue"))
    assert found.result.exit_code() == 1
    serials = shown(found.result)
    assert set(read_exchanges(tmp_path / "run", serials)) == serials != set()


def test_no_key_is_kept_though_the_endpoint_echoes_it(tmp_path: Path) -> None:
    async def echo(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http(json.dumps({"error": {"message": KEY_A + KEY_B}}).encode(), 400))

    async def main() -> None:
        async with serving(echo) as server:
            with Folder.new(tmp_path / "run", planned(server)) as folder:
                await run_probe(planned(server), accounts(), [RESIDUE], folder)

    asyncio.run(main())
    kept = [one.read_text() for one in (tmp_path / "run").rglob("*") if one.is_file()]
    assert any("redacted" in text for text in kept)
    assert not any(KEY_A in text or KEY_B in text for text in kept)


# Stopping and going on


def stopped(path: Path) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        ran(path, Toy(), (RESIDUE, Stopped()))
    assert read_result(path) is None


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stopped(path)
    before = lines(path)
    spent = read_spent(path)
    assert spent.requests == len(before)
    assert list(read_finished(path)) == ["residue"]

    found = ran(path, Toy(), resume=True)
    assert verdicts(found.result) == dict.fromkeys(NAMES, Verdict.NO_LEAK_SEEN)
    after = lines(path)
    assert after[: len(before)] == before
    assert len(after) - len(before) == len(found.prompts) == CROSSED.cost().requests
    assert [one["serial"] for one in after] == list(range(1, len(after) + 1))
    assert read_spent(path).requests == len(after)


def test_what_is_repeated_has_new_secrets(tmp_path: Path) -> None:
    first, second = (ran(tmp_path / name, Toy(), [CROSSED]).prompts for name in "ab")
    assert len(first) == len(second)
    assert not set(first) & set(second)


def test_a_run_that_has_not_ended_is_judged_by_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stopped(path)
    found = read_judged(path)
    assert verdicts(found) == {"residue": Verdict.NO_LEAK_SEEN}
    assert found.not_run == ("crossed",)
    assert found.exit_code() == 3


def test_a_line_that_was_cut_is_dropped_and_its_serial_used_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stopped(path)
    log = path / "exchanges.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:-20])
    (path / "spent.json").unlink()  # the process was killed
    last = len(lines_whole := whole.splitlines())
    assert len(read_exchanges(path, range(1, last + 1))) == last - 1
    with Folder.resumed(path) as folder:
        assert folder.serial == last - 1
        assert folder.spent.requests == last - 1
    assert log.read_bytes().splitlines() == lines_whole[:-1]


def test_a_line_that_is_damaged_is_no_silent_loss(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stopped(path)
    log = path / "exchanges.jsonl"
    log.write_bytes(b'{"type": "Answer"}\n' + log.read_bytes())
    with pytest.raises(FolderError, match=r"line 1 of exchanges\.jsonl"):
        read_exchanges(path, [1])


def test_the_budget_is_held_over_techniques_and_over_stops(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = RESIDUE.cost().requests
    tight = Budget(requests_max=first + 3)
    with contextlib.suppress(asyncio.CancelledError):
        ran(path, Toy(), (RESIDUE, Stopped()), budget=tight)
    found = ran(path, Toy(), (RESIDUE, CROSSED), resume=True, budget=tight)
    assert len(found.prompts) == 1
    assert verdicts(found.result)["crossed"] == Verdict.INCONCLUSIVE
    assert any("budget" in reason for reason in found.result.techniques[1].unusable)


@pytest.mark.parametrize(("stop", "names"), [(True, ("crossed",)), (False, ())])
def test_it_stops_at_a_certain_finding_if_asked(
    stop: bool, names: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    found = ran(path, Toy("residue"), stop_at_first=stop)
    assert found.result.not_run == names
    assert found.result.exit_code() == 1
    again = ran(path, Toy("residue"), resume=True, stop_at_first=stop)
    assert again.prompts == []
    assert again.result == found.result


@pytest.mark.parametrize("leak", ["one name", "garbled"])
def test_it_does_not_stop_at_a_finding_that_is_not_certain(leak: Leak, tmp_path: Path) -> None:
    order = (CROSSED, RESIDUE) if leak == "one name" else (RESIDUE, CROSSED)
    found = ran(tmp_path / "run", Toy(leak), order, stop_at_first=True)
    assert found.result.not_run == ()


# What goes wrong on our side


def test_a_bug_of_one_technique_costs_the_others_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    found = ran(path, Toy("residue"), (RESIDUE, Broken()))
    assert verdicts(found.result) == {"residue": Verdict.LEAK, "crossed": Verdict.INCONCLUSIVE}
    [reason] = found.result.techniques[1].unusable
    assert "KeyError at test_probe_run.py" in reason or "KeyError at run.py" in reason
    assert "secret itself" not in (path / "result.json").read_text()
    again = ran(path, Toy(), (RESIDUE, Cheap()), resume=True)
    assert verdicts(again.result)["crossed"] == Verdict.NO_LEAK_SEEN
    assert again.result.techniques[1].clean_trials == 3


def test_a_log_that_cannot_be_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Folder, outcome: object) -> None:
        raise FolderError("no space left")

    monkeypatch.setattr(Folder, "log", full)
    with pytest.raises(FolderError, match="no space left"):
        ran(tmp_path / "run", Toy())


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(FolderError, match="not empty"), Folder.new(tmp_path, planned()):
        pass
    assert (tmp_path / "mine").read_text() == "x"
    with pytest.raises(FolderError, match="no folder of a run"), Folder.resumed(tmp_path):
        pass


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with (
        Folder.new(path, planned()),
        pytest.raises(FolderError, match="another run"),
        Folder.resumed(path),
    ):
        pass
    with Folder.resumed(path) as folder:
        assert folder.serial == 0


def test_what_the_self_test_doubts_is_inconclusive_but_proof_is_proof(tmp_path: Path) -> None:
    doubts = dict.fromkeys(NAMES, "its self-test failed: it missed x")
    found = ran(tmp_path / "run", Toy("residue"), (RESIDUE, Cheap()), doubts=doubts).result
    assert verdicts(found) == {"residue": Verdict.LEAK, "crossed": Verdict.INCONCLUSIVE}
    assert "it missed x" in found.techniques[1].sentence()


def test_one_account_alone_is_said_to_be_one(tmp_path: Path) -> None:
    found = ran(tmp_path / "run", Toy(), accounts="no key").result
    assert all(SAME_ACCOUNT in one.sentence() for one in found.techniques)


# Plans and sizes


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("[::1]", True),
        ("[::ffff:127.0.0.1]", True),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("[::ffff:10.0.0.1]", False),
        ("2130706433", False),
    ],
)
def test_only_this_machine_needs_no_permission(host: str, own: bool) -> None:
    url = f"http://{host}:80/v1"
    assert is_loopback(url) is own
    with contextlib.nullcontext() if own else pytest.raises(PlanError, match="who allows it"):
        plan(url, MODEL, seed=1)
    allowed = plan(url, MODEL, seed=1, authorised_by="Ms Ito, 2026-12-01")
    assert allowed.authorised_by == "Ms Ito, 2026-12-01"


@pytest.mark.parametrize("text", ["me", ", today", "me, ", "me,\ntoday", "me, " + "x" * 200])
def test_permission_says_who_and_when(text: str) -> None:
    with pytest.raises(PlanError, match="--authorised-by wants"):
        plan(URL, MODEL, seed=1, authorised_by=text)


def test_a_plan_that_was_edited_is_checked_again() -> None:
    other = planned(base_url="http://example.com/v1")
    with pytest.raises(PlanError, match="who allows it"):
        other.again(accounts="two keys", authorised_by="")
    with pytest.raises(PlanError, match=r"no technique '\.\./x'"):
        planned(techniques=("../x",)).check()


def test_a_replay_has_the_seed_and_each_technique_its_own() -> None:
    again = planned().again(accounts="two keys", authorised_by="")
    assert [again.seed_of(name) for name in NAMES] == [planned().seed_of(name) for name in NAMES]
    assert again.seed_of("residue") != again.seed_of("crossed")


def test_all_techniques_have_names_goals_reports_and_three_sizes() -> None:
    assert set(TECHNIQUES) >= {
        *("boundary", "residue", "abort", "crossed", "prefix", "ids", "response-cache"),
        *("timing", "interference"),
    }
    for name, technique in TECHNIQUES.items():
        assert technique.name == name
        assert technique.goal
        assert technique.report
        costs = [made(name, size, None, 4096).cost().requests for size in SIZES]
        assert costs[0] < costs[1] < costs[2], name
    for table in ARGUMENTS.values():
        assert set(table) <= set(TECHNIQUES)


@pytest.mark.parametrize("size", SIZES)
def test_the_budget_of_a_size_holds_all_of_it_with_room(size: Any) -> None:
    cost = plan(URL, MODEL, seed=1, size=size).cost()
    budget = BUDGETS[size]
    assert 1.25 * cost.requests < budget.requests_max
    assert 1.25 * cost.tokens < budget.tokens_max


def test_a_window_that_costs_more_than_a_size_may_is_asked_about() -> None:
    with pytest.raises(PlanError, match="a budget that is meant"):
        plan(URL, MODEL, seed=1, window=1_048_576)
    meant = Budget(tokens_max=10**9)
    assert plan(URL, MODEL, seed=1, window=1_048_576, budget=meant).budget == meant


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    with Folder.new(tmp_path / "run", planned()):
        pass
    assert read_plan(tmp_path / "run") == planned(started=read_plan(tmp_path / "run").started)
