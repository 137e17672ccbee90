"""The folder of a run: what was asked, every exchange, what each technique saw, and the result.

::

    plan.json             `plan.Plan`
    self-test.json        `self_test.SelfTest`, where the controls were run first
    exchanges.jsonl       one `exchange.Outcome` a line, as they came
    spent.json            `budget.Cost`, whenever a technique or the run ends
    techniques/NAME.json  `model.TechniqueResult`, once it ended; tests not settled yet
    result.json           `model.Result`, once all have

Nobody else may read it, for it holds prompts and answers; a key it never holds. One process at a
time writes; the log is written through line by line, so that a process that is killed loses what
was in flight and no more.
"""

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import msgspec

from sekisho.probe.budget import Cost, estimate_tokens
from sekisho.probe.exchange import Inconclusive, Outcome, Refused
from sekisho.probe.model import Result, TechniqueResult
from sekisho.probe.plan import Plan
from sekisho.probe.self_test import SelfTest

_Read = TypeVar("_Read")
_LINE_MAX = 512 * 1024 * 1024
"""Bytes; an outcome holds an answer of 8 MiB a few times over, escaped."""


class FolderError(Exception):
    """A run's folder cannot be used; one sentence."""


class Folder:
    """A folder that this process writes. Use as ``with``.

    Attributes:
        path: where.
        serial: of the last request in the log.
        spent: of the budget, by earlier parts of the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.serial = 0
        self.spent = Cost()
        self._file: IO[bytes] | None = None

    @classmethod
    @contextlib.contextmanager
    def new(cls, path: Path, plan: Plan) -> Iterator[Self]:
        """A new one.

        Raises:
            FolderError: it is there and not empty, or cannot be written.
        """
        folder = cls(path)
        with _told(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise FolderError(f"{path} is not empty: go on with --resume, or name another")
            path.chmod(0o700)
            (path / "techniques").mkdir(mode=0o700)
            folder._lock()
            folder._write("plan.json", plan)
        yield from folder._used()

    @classmethod
    @contextlib.contextmanager
    def resumed(cls, path: Path) -> Iterator[Self]:
        """One that an earlier run left; a last line of its log that was cut is dropped.

        Raises:
            FolderError: it is none, or another process writes it.
        """
        folder = cls(path)
        read_plan(path)
        with _told(path):
            folder._lock()
            folder._continue()
        yield from folder._used()

    def log(self, outcome: Outcome) -> None:
        """One more exchange.

        Raises:
            FolderError: the disk is full, say; the run must end.
        """
        with _told(self.path):
            self._open().write(msgspec.json.encode(outcome) + b"\n")
            self._open().flush()

    def save(self, result: TechniqueResult, spent: Cost) -> None:
        """A technique has ended.

        Raises:
            FolderError: it cannot be written.
        """
        with _told(self.path):
            self._write(f"techniques/{result.technique}.json", result)
            self._write("spent.json", spent)

    def save_spent(self, spent: Cost) -> None:
        """The run ends here, or for now.

        Raises:
            FolderError: it cannot be written.
        """
        with _told(self.path):
            self._write("spent.json", spent)

    def save_self_test(self, found: SelfTest) -> None:
        """The controls have been run.

        Raises:
            FolderError: it cannot be written.
        """
        with _told(self.path):
            self._write("self-test.json", found)

    def save_result(self, result: Result) -> None:
        """The run has ended.

        Raises:
            FolderError: it cannot be written.
        """
        with _told(self.path):
            self._write("result.json", result)

    def _used(self) -> Iterator[Self]:
        try:
            yield self
        finally:
            self._open().close()

    def _open(self) -> IO[bytes]:
        if self._file is None:
            raise RuntimeError("use the folder as a context")
        return self._file

    def _lock(self) -> None:
        file = open(  # noqa: SIM115 - closed by _used
            self.path / "exchanges.jsonl", "ab", opener=_opener
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FolderError(f"{self.path}: another run writes into it") from None
        self._file = file

    def _continue(self) -> None:
        """Reads what the log says of serial and budget, and cuts a line that is not whole."""
        end = 0
        for length, outcome in _lines(self.path):
            end += length
            self.serial = max(self.serial, outcome.serial)
            self.spent += _cost(outcome)
        self._open().truncate(end)
        # What was in flight when the run ended stands in no log; and what the endpoint was not
        # asked by a logged request (its models) neither.
        saved = _read(self.path / "spent.json", Cost) or Cost()
        self.spent = Cost(
            max(self.spent.requests, saved.requests),
            max(self.spent.prompt_tokens, saved.prompt_tokens),
            max(self.spent.answer_tokens, saved.answer_tokens),
        )

    def _write(self, name: str, value: Any) -> None:
        """Whole or not at all."""
        beside = self.path / f"{name}.part"
        with open(beside, "wb", opener=_opener) as file:
            file.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
        beside.replace(self.path / name)


def read_plan(path: Path) -> Plan:
    """What was asked.

    Raises:
        FolderError: this is no run's folder.
    """
    found = _read(path / "plan.json", Plan)
    if found is None:
        raise FolderError(f"{path} is no folder of a run: it has no plan.json")
    return found


def read_spent(path: Path) -> Cost:
    """What the run has used of its budget.

    Raises:
        FolderError: it cannot be read.
    """
    return _read(path / "spent.json", Cost) or Cost()


def read_self_test(path: Path) -> SelfTest | None:
    """What the controls showed, where they were run.

    Raises:
        FolderError: it cannot be read.
    """
    return _read(path / "self-test.json", SelfTest)


def read_finished(path: Path) -> dict[str, TechniqueResult]:
    """What each technique saw that has ended, by name; tests are not settled.

    Raises:
        FolderError: one cannot be read.
    """
    found = {}
    for name in read_plan(path).techniques:
        result = _read(path / "techniques" / f"{name}.json", TechniqueResult)
        if result is not None:
            found[name] = result
    return found


def read_result(path: Path) -> Result | None:
    """The run's, or None where it has not ended.

    Raises:
        FolderError: it cannot be read.
    """
    return _read(path / "result.json", Result)


def read_exchanges(path: Path, serials: Collection[int]) -> dict[int, Outcome]:
    """Those of ``serials`` that the log has.

    Raises:
        FolderError: a line other than the last cannot be read.
    """
    wanted = set(serials)
    return {one.serial: one for _, one in _lines(path) if one.serial in wanted}


def shown(result: Result) -> set[int]:
    """Serials of the exchanges that findings name."""
    findings = [finding for one in result.techniques for finding in one.findings]
    return {serial for one in findings for serial in (one.seen_in, one.planted_in) if serial}


def _lines(path: Path) -> Iterator[tuple[int, Outcome]]:
    """Whole lines of the log, each with its length in bytes."""
    decoder = msgspec.json.Decoder(Outcome)
    with _told(path), (path / "exchanges.jsonl").open("rb") as file:
        number = 0
        while (line := file.readline(_LINE_MAX)).endswith(b"\n"):
            number += 1
            try:
                yield len(line), decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise FolderError(f"{path}: line {number} of exchanges.jsonl is damaged") from None


def _cost(outcome: Outcome) -> Cost:
    """What it was paid with, as `Endpoint` does."""
    ask = outcome.ask
    prompt, answer = estimate_tokens(ask.prompt) + ask.more_tokens, ask.answer_tokens
    if isinstance(outcome, Refused):
        return Cost(1)
    if isinstance(outcome, Inconclusive):
        return Cost(1, prompt, answer) if outcome.sent else Cost()
    whole = outcome.whole
    return Cost(
        1,
        prompt if whole.prompt_tokens is None else whole.prompt_tokens,
        answer if whole.completion_tokens is None else whole.completion_tokens,
    )


def _read(path: Path, kind: type[_Read]) -> _Read | None:
    with _told(path.parent):
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise FolderError(f"{path} is damaged, or of another version") from None


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderError(f"{path}: {error.strerror or 'cannot be used'}") from None
