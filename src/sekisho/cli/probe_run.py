"""What the commands of `probe` do, apart from their options."""

import asyncio
import functools
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sekisho.cli.conventions import unwritable, write_result
from sekisho.cli.progress import clear, progress
from sekisho.gate.fetch import Key
from sekisho.gate.model import GateError
from sekisho.gate.run import read_key
from sekisho.probe.budget import Budget, Cost, Prices
from sekisho.probe.endpoint import Account
from sekisho.probe.folder import (
    Folder,
    FolderError,
    read_exchanges,
    read_plan,
    read_self_test,
    read_spent,
    shown,
)
from sekisho.probe.output import About, render
from sekisho.probe.plan import SAME_ACCOUNT, Accounts, Plan, PlanError, plan
from sekisho.probe.run import read_judged, run_probe
from sekisho.probe.self_test import Control, Server
from sekisho.probe.self_test import SelfTest as Tested
from sekisho.probe.self_test import self_test as run_self_test
from sekisho.probe.sizes import BUDGETS, Size
from sekisho.probe.techniques import TECHNIQUES

if TYPE_CHECKING:
    from sekisho.lab.controls import Control as LabControl

MENDABLE = (PlanError, FolderError, GateError)
"""What the user can mend; one line each."""
_KEYS = frozenset({"key_a_env", "key_a_file", "key_b_env", "key_b_file"})
RESUME_TAKES = _KEYS | {"resume", "output_format", "output"}
"""Parameters; the plan has the others."""
SELF_TEST_TAKES = frozenset({"self_test", "technique"})
"""Parameters, where no endpoint is given."""
_VARIABLES = "SEKISHO_PROBE_KEY_A", "SEKISHO_PROBE_KEY_B"
_KEY_MIN = 4
"""Characters. A key is taken out of whatever is kept; a shorter one would take answers with it."""
_INTERRUPTED = 130


@dataclass(frozen=True)
class Shown:
    """How a result is told, and where; standard output where no file is named."""

    output_format: str
    output: Path | None


@dataclass(frozen=True)
class Keys:
    """Where the key of each account is: a variable or a file, as given; else `_VARIABLES`."""

    env_a: str
    file_a: Path | None
    env_b: str
    file_b: Path | None

    def read(self) -> tuple[Key | None, Key | None]:
        """Both, or neither.

        Raises:
            PlanError: what is named is not there, or there is only one.
        """
        first = _key("a", self.env_a, self.file_a)
        second = _key("b", self.env_b, self.file_b)
        if (first is None) != (second is None):
            has, lacks = ("B", "A") if first is None else ("A", "B")
            raise PlanError(f"there is a key of account {has}, and none of account {lacks}")
        return first, second

    def accounts(self) -> Accounts:
        """How many accounts they are."""
        first, second = self.read()
        if first is None or second is None:
            return "no key"
        return "one key" if first.header() == second.header() else "two keys"


def _key(account: str, env: str, file: Path | None) -> Key | None:
    """What was given is not repeated: somebody may have given the key itself."""
    given = f"--key-{account}-env" if env else f"--key-{account}-file"
    if env and file is not None:
        raise PlanError(f"--key-{account}-env and --key-{account}-file: give one of them")
    if not env and file is None:
        env = _VARIABLES[account == "b"]
        if not os.environ.get(env):
            return None
    try:
        key = read_key(env, "" if file is None else str(file), os.environ, Path())
    except GateError:
        raise PlanError(f"{given} names nothing that holds a key") from None
    if key is not None and len(key.header()) < len("Bearer ") + _KEY_MIN:
        raise PlanError(
            f"the key of account {account.upper()} is shorter than {_KEY_MIN} characters"
        )
    return key


def refuse_keys(*given: str | None) -> None:
    """Others on this machine can read a command line.

    Raises:
        PlanError: one holds a key.
    """
    if any(key is not None for key in given):
        raise PlanError(
            "a key on the command line can be read by others: set SEKISHO_PROBE_KEY_A and _B, or "
            "give --key-a-file and --key-b-file"
        )


def budget(
    size: Size, limits: tuple[int | None, ...], money: tuple[float | None, ...]
) -> Budget | None:
    """None where nothing is given: what the size allows.

    Raises:
        PlanError: money without prices, or a number that is none.
    """
    base = BUDGETS[size]
    most, prompt, answer = money
    if all(one is None for one in (*limits, *money)):
        return None
    prices = None
    if prompt is not None and answer is not None:
        prices = Prices(prompt_per_million=prompt, answer_per_million=answer)
    elif prompt is not None or answer is not None or most is not None:
        raise PlanError("money needs both --price-prompt and --price-answer")
    requests, tokens, concurrency = limits
    try:
        return Budget(
            requests_max=requests or base.requests_max,
            tokens_max=tokens or base.tokens_max,
            concurrency_max=concurrency or base.concurrency_max,
            money_max=most,
            prices=prices,
        )
    except ValueError as error:  # not a number
        raise PlanError(str(error)) from None


def planned(base_url: str, model: str, keys: Keys, **more: Any) -> Plan:
    """What the options ask for.

    Raises:
        PlanError, ClaimError: it cannot be done.
    """
    if not base_url:
        raise PlanError("--base-url is missing: the endpoint to ask")
    if not model:
        raise PlanError("--model is missing: the model to ask")
    return plan(base_url, model, accounts=keys.accounts(), **more)


def planned_again(folder: Path, keys: Keys, authorised_by: str) -> Plan:
    """The plan of an earlier run, as a new one.

    Raises:
        FolderError: there is none.
        PlanError: it cannot be run.
    """
    return read_plan(folder).again(accounts=keys.accounts(), authorised_by=authorised_by)


def told_costs(planned: Plan) -> int:
    """The dry run; exit code 0, or 2 where the budget does not hold it."""
    prices = planned.budget.prices
    for technique in planned.made():
        print(f"{technique.name}: to {technique.goal} ({technique.report})")
        print(f"  at most {_told_cost(technique.cost(), prices)}")
    cost = planned.cost()
    print(f"together at most {_told_cost(cost, prices)}")
    refused = planned.budget.refuses(cost)
    if refused:
        raise PlanError(refused)
    return 0


def _told_cost(cost: Cost, prices: Prices | None) -> str:
    money = f", {cost.money(prices):.4g} in money" if prices is not None else ""
    return f"{cost.requests:,} requests, {cost.tokens:,} tokens{money}"


def new(planned: Plan, keys: Keys, path: Path | None, how: Shown) -> int:
    """A new run; its exit code."""
    _check_writable(how.output)
    if planned.accounts != "two keys":
        print(f"sekisho: {planned.accounts}: {SAME_ACCOUNT}", file=sys.stderr)
    refused = planned.budget.refuses(planned.cost())
    if refused:
        print(f"sekisho: {refused}: the run may end inconclusive", file=sys.stderr)
    if path is None:
        path = Path(f"sekisho-probe-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    with Folder.new(path, planned) as folder:
        return _run(planned, keys, folder, how)


def resumed(path: Path, keys: Keys, how: Shown) -> int:
    """The rest of a run that was stopped; its exit code."""
    _check_writable(how.output)
    planned = read_plan(path)
    planned.check()
    if keys.accounts() != planned.accounts:
        raise PlanError(f"the run began with {planned.accounts}; now there are others")
    with Folder.resumed(path) as folder:
        return _run(planned, keys, folder, how)


def _run(planned: Plan, keys: Keys, folder: Folder, how: Shown) -> int:
    key_a, key_b = keys.read()
    accounts = Account("A", key_a), Account("B", key_b)
    say = progress()
    try:
        tested = read_self_test(folder.path)
        if planned.self_test and tested is None:
            tested = asyncio.run(_self_tested(planned.techniques, say))
            folder.save_self_test(tested)
        doubts = tested.doubts() if tested is not None else {}
        asyncio.run(
            run_probe(planned, accounts, planned.made(), folder, doubts=doubts, progress=say)
        )
    except KeyboardInterrupt:
        clear()
        print(f"sekisho: stopped; go on with --resume {folder.path}", file=sys.stderr)
        return _INTERRUPTED
    finally:
        clear()
    print(f"sekisho: the run is kept in {folder.path}", file=sys.stderr)
    return told(folder.path, how)


def told(path: Path, how: Shown) -> int:
    """Write the result of the run in ``path``; its exit code."""
    planned, result, tested = read_plan(path), read_judged(path), read_self_test(path)
    about = About(
        base_url=planned.base_url,
        model=planned.model,
        started=planned.started,
        seed=planned.seed,
        authorised_by=planned.authorised_by,
        version=planned.version,
        spent=read_spent(path),
        prices=planned.budget.prices,
        self_test=None if tested is None else tested.sentence(),
    )
    text = render(result, about, read_exchanges(path, shown(result)), how.output_format)
    write_result(text, how.output)
    return result.exit_code()


def _check_writable(path: Path | None) -> None:
    if unwritable(path) is not None:
        raise FolderError(f"{path} cannot be written")


def only_self_test(names: tuple[str, ...]) -> int:
    """The controls alone: 0 where every technique is believed."""
    unknown = [name for name in names if name not in TECHNIQUES]
    if unknown:
        raise PlanError(f"no technique {unknown[0]!r}; there are {', '.join(TECHNIQUES)}")
    tested = asyncio.run(_self_tested(names or tuple(TECHNIQUES), progress()))
    clear()
    for caught in tested.positive:
        print(caught.sentence())
    for silent in tested.negative:
        print(silent.sentence())
    for name in tested.untested:
        print(f"{name}: there is no control for it")
    print(f"self-test {tested.sentence()}")
    return 0 if tested.passed() else 1


async def _self_tested(names: tuple[str, ...], say: Callable[[str], None]) -> Tested:
    # The lab brings a model and torch; only the self-test needs them.
    try:
        from sekisho.engine.spec import ModelError
        from sekisho.lab.controls import SIZES, negative, positive
        from sekisho.lab.defects_http import HTTP_DEFECTS
        from sekisho.lab.unsafe import LabError
    except ModuleNotFoundError as error:
        raise PlanError(f"the self-test needs the lab: {error.name} is missing") from None

    sized = {name: TECHNIQUES[name](**SIZES.get(name, {})) for name in names}
    controls = [
        Control(
            technique=sized[name],
            defect=HTTP_DEFECTS[name].name,
            report=HTTP_DEFECTS[name].report,
            start=functools.partial(_server, functools.partial(positive, name)),
        )
        for name in names
        if name in HTTP_DEFECTS
    ]
    try:
        return await run_self_test(
            controls,
            functools.partial(_server, negative),
            list(sized.values()),
            untested=[name for name in names if name not in HTTP_DEFECTS],
            progress=say,
        )
    except (ModelError, LabError) as error:
        raise PlanError(f"the self-test cannot run: {error}") from None


@asynccontextmanager
async def _server(
    start: "Callable[[], AbstractAsyncContextManager[LabControl]]",
) -> AsyncIterator[Server]:
    async with start() as control:
        yield Server(
            base_url=control.base_url,
            model=control.model,
            key_a=Key(control.key_a),
            key_b=Key(control.key_b),
        )
