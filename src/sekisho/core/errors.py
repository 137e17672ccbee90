"""What can go wrong with ownership, and who is to blame.

    OwnershipError
    ├── LocalOwnershipError    this process misused the core: our bug, nothing was changed
    └── RemoteOwnershipError   a peer or a transport broke its word: evidence is attached

Checks are explicit calls and not ``assert``, which ``python -O`` strips.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a check failed: ids and numbers only, never text of a prompt.

    ``kind`` is a stable word (``unwritten``, ``foreign``, ...); ``page`` is the index in the
    pool, or -1 where the finding is not about one page.
    """

    kind: str
    request: int
    page: int
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"{self.kind}: request={self.request} page={self.page} "
            f"expected={self.expected} found={self.found}"
        )


class OwnershipError(Exception):
    """Abstract: raise one of the two below."""

    def __init__(self, message: str, evidence: tuple[Evidence, ...] = ()) -> None:
        if type(self) is OwnershipError:
            raise TypeError("raise LocalOwnershipError or RemoteOwnershipError")
        super().__init__(message)
        self.evidence = evidence


class LocalOwnershipError(OwnershipError):
    """This process asked the core for something illegal; the state is unchanged."""


class RemoteOwnershipError(OwnershipError):
    """What a peer or a transport did does not agree with what was granted."""


def check(condition: bool, message: str) -> None:
    """Raise `LocalOwnershipError` unless ``condition`` holds; survives ``python -O``."""
    if not condition:
        raise LocalOwnershipError(message)
