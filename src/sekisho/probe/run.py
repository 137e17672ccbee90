"""A run: one technique after the other over one budget, judged together, in a folder that lets it
go on where it stopped."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from sekisho.probe.canary import Mint
from sekisho.probe.endpoint import Account, Endpoint
from sekisho.probe.exchange import Answer, Outcome, Refused
from sekisho.probe.folder import (
    Folder,
    FolderError,
    read_finished,
    read_plan,
    read_result,
    read_self_test,
)
from sekisho.probe.model import Result, TechniqueResult, Verdict, conclude
from sekisho.probe.oracles import settle
from sekisho.probe.plan import SAME_ACCOUNT, Plan
from sekisho.probe.self_test import doubt, is_proof
from sekisho.probe.techniques import Technique


async def run_probe(
    plan: Plan,
    accounts: tuple[Account, Account],
    techniques: Sequence[Technique],
    folder: Folder,
    *,
    doubts: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = lambda _line: None,
) -> Result:
    """Run what has not ended in ``folder`` yet, judge all, and save the result.

    A technique that an earlier run left unfinished begins again, with new secrets; its requests
    stay paid for. Where the plan stops at the first certain finding, what is not run is named.

    Args:
        doubts: techniques that the self-test does not believe, and why.

    Raises:
        FolderError: the folder cannot be written.
    """
    told = _Told(folder, progress)
    endpoint = Endpoint(
        plan.base_url,
        plan.model,
        accounts,
        budget=plan.budget,
        timeout_s=plan.timeout_s,
        log=told,
        serial=folder.serial,
    )
    endpoint.purse.spent = folder.spent
    results = read_finished(folder.path)
    broken: dict[str, TechniqueResult] = {}
    try:
        async with endpoint:
            for number, technique in enumerate(techniques, 1):
                done = results.get(technique.name)
                if done is None and not _stops(plan, [*results.values()]):
                    told.part = f"{technique.name} ({number} of {len(techniques)})"
                    try:
                        found = await technique.run(endpoint, Mint(plan.seed_of(technique.name)))
                        results[technique.name] = found
                        folder.save(found, endpoint.purse.spent)
                    except FolderError:
                        raise
                    except Exception as error:  # a bug of ours must not cost what others saw
                        broken[technique.name] = _broken(technique, error)
    finally:
        folder.save_spent(endpoint.purse.spent)
    result = judged(plan, results | broken, doubts or {})
    folder.save_result(result)
    return result


def judged(plan: Plan, results: Mapping[str, TechniqueResult], doubts: Mapping[str, str]) -> Result:
    """All of ``results`` together, in the order of the plan; what is missing is named."""
    have = [results[name] for name in plan.techniques if name in results]
    found = doubt(settle(have), dict(doubts))
    if plan.accounts != "two keys":
        found = msgspec.structs.replace(
            found,
            techniques=tuple(
                msgspec.structs.replace(one, notes=(*one.notes, SAME_ACCOUNT))
                for one in found.techniques
            ),
        )
    missing = tuple(name for name in plan.techniques if name not in results)
    return msgspec.structs.replace(found, not_run=missing)


def read_judged(path: Path) -> Result:
    """The result of a run's folder; of one that has not ended, what there is.

    Raises:
        FolderError: it cannot be read.
    """
    found = read_result(path)
    if found is not None:
        return found
    tested = read_self_test(path)
    return judged(read_plan(path), read_finished(path), tested.doubts() if tested else {})


def _stops(plan: Plan, results: Sequence[TechniqueResult]) -> bool:
    return plan.stop_at_first and any(
        is_proof(finding) for one in results for finding in one.findings
    )


def _broken(technique: Technique, error: Exception) -> TechniqueResult:
    """Says which error and where, but not its text: that may hold an answer."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "sekisho" in frame.filename] or frames
    at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
    reason = f"the technique itself failed: {type(error).__name__} at {at}"
    found = conclude(technique.name, [], [], unplanted={reason: 1})
    return msgspec.structs.replace(found, verdict=Verdict.INCONCLUSIVE)


class _Told:
    """The log of an endpoint, and a line of progress."""

    def __init__(self, folder: Folder, progress: Callable[[str], None]) -> None:
        self.part = ""
        self._folder = folder
        self._progress = progress
        self._counts = {"answered": 0, "refused": 0, "unusable": 0}

    def __call__(self, outcome: Outcome) -> None:
        self._folder.log(outcome)
        kind = "unusable"
        if isinstance(outcome, Answer):
            kind = "answered"
        elif isinstance(outcome, Refused):
            kind = "refused"
        self._counts[kind] += 1
        counts = ", ".join(f"{count:,} {name}" for name, count in self._counts.items())
        self._progress(f"{self.part}: {counts}")
