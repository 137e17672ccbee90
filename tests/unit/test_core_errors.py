"""Errors: local and remote fault are told apart, evidence travels, checks outlive ``-O``."""

import dataclasses
import subprocess
import sys

import pytest

from sekisho.core.errors import (
    Evidence,
    LocalOwnershipError,
    OwnershipError,
    RemoteOwnershipError,
    check,
)

EVIDENCE = Evidence("foreign", 3, 17, "a.1", "b.2")


def test_the_base_names_nobody_to_blame_and_cannot_be_raised() -> None:
    with pytest.raises(TypeError, match="LocalOwnershipError or RemoteOwnershipError"):
        OwnershipError("whose fault?")


@pytest.mark.parametrize("error", [LocalOwnershipError, RemoteOwnershipError])
def test_an_error_carries_its_evidence(error: type[OwnershipError]) -> None:
    raised = error("why", (EVIDENCE,))
    assert str(raised) == "why"
    assert raised.evidence == (EVIDENCE,)
    assert error("why").evidence == ()
    assert isinstance(raised, OwnershipError)


def test_one_side_is_not_the_other() -> None:
    assert not issubclass(LocalOwnershipError, RemoteOwnershipError)
    assert not issubclass(RemoteOwnershipError, LocalOwnershipError)


def test_evidence_is_one_line_and_cannot_be_edited() -> None:
    assert str(EVIDENCE) == "foreign: request=3 page=17 expected=a.1 found=b.2"
    with pytest.raises(dataclasses.FrozenInstanceError):
        EVIDENCE.page = 0  # type: ignore[misc]


def test_check_raises_the_local_error_and_only_where_false() -> None:
    check(True, "never seen")
    with pytest.raises(LocalOwnershipError, match=r"^seen$"):
        check(False, "seen")


def test_checks_survive_python_dash_o() -> None:
    code = (
        "from sekisho.core.pool import Pool\n"
        "try:\n"
        "    Pool(0, 1)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, __debug__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["LocalOwnershipError", "False"]
