"""The five defects that made the incident, and the defences of the production engine, by name.

Each is a switch of its own. All defects and no defence is the engine of the incident. Without any
defect an engine still lacks what only we have: headers are not compared after a step.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Defect(NamedTuple):
    """``report`` is the public report that tells of it."""

    name: str
    report: str
    text: str


class Defence(NamedTuple):
    """``verdict`` is what it does alone against all five defects, as the matrix must find it:
    "suffices": B gets an error; "narrows": nobody's text leaks, and B is still served a wrong
    answer with 200; "fails": the leak stays."""

    name: str
    verdict: str
    text: str


_DEFECTS = (
    Defect(
        "window",
        "sglang#30233, PR#30326",
        "the advertised window is a setting of its own, tied to no pool",
    ),
    Defect(
        "placeholder",
        "sglang#30233",
        "prefill rejects a prompt above its pool by putting one placeholder token in its place; "
        "the verdict waits in a field that finished() does not read",
    ),
    Defect(
        "finished",
        "sglang#30325, #38704",
        "admission on prefill asks finished(), hears no, and lets the request through: one page "
        "is computed and sent",
    ),
    Defect(
        "no-compare",
        "sglang#38704",
        "decode compares nothing of what arrived with what it reserved",
    ),
    Defect(
        "no-erase",
        "the incident of 2026, sglang#30233",
        "pages are given to the next request with everything that was in them",
    ),
)
_DEFENCES = (
    Defence(
        "admission",
        "suffices",
        "the original length is held against the pools of both roles before a page is reserved",
    ),
    Defence(
        "one-outcome",
        "suffices",
        "a request has one outcome: the verdict is what finished() reads",
    ),
    Defence(
        "commit-check",
        "suffices",
        "counts, then every header, are compared when the hand-off says that it is complete",
    ),
    Defence(
        "step-check",
        "suffices",
        "the headers of all pages that a step attended to are compared before its token leaves",
    ),
    Defence("erase-on-reuse", "narrows", "a page is zeroed when it is given to a request"),
    Defence("scrub-on-free", "narrows", "a page is zeroed when its request ends"),
    Defence(
        "payload-digest",
        "fails",
        "every page that arrived is hashed and compared with the digest in its header; what did "
        "not arrive is not looked at (sglang#39500 sums moved pages alike)",
    ),
)
DEFECTS: dict[str, Defect] = {defect.name: defect for defect in _DEFECTS}
DEFENCES: dict[str, Defence] = {defence.name: defence for defence in _DEFENCES}


class SwitchError(ValueError):
    """No such defect or defence; one line."""


class Switches(NamedTuple):
    """Which defects are in the engine, and which defences; use `switches` to make one."""

    defects: frozenset[str]
    defences: frozenset[str]

    def has(self, defect: str) -> bool:
        """Whether this defect is in, whatever a defence does about it."""
        return DEFECTS[defect].name in self.defects

    def guards(self, defence: str) -> bool:
        """Whether this defence is in."""
        return DEFENCES[defence].name in self.defences

    @property
    def compares(self) -> bool:
        """Decode compares counts and headers at the hand-off."""
        return not self.has("no-compare") or self.guards("commit-check")

    @property
    def erases(self) -> bool:
        """A page is zeroed when it is granted."""
        return not self.has("no-erase") or self.guards("erase-on-reuse")

    @property
    def leaks(self) -> bool:
        """What theory says: every link of the chain is there, and nothing cuts it."""
        verdicts = {DEFENCES[name].verdict for name in self.defences}
        return self.defects == frozenset(DEFECTS) and verdicts <= {"fails"}

    def names(self) -> tuple[list[str], list[str]]:
        """Defects and defences, in the order of this page."""
        return (
            [name for name in DEFECTS if name in self.defects],
            [name for name in DEFENCES if name in self.defences],
        )


def switches(without: Iterable[str] = (), defences: Iterable[str] = ()) -> Switches:
    """All five defects but ``without``, and ``defences``.

    Raises:
        SwitchError: a name is unknown.
    """
    removed, restored = frozenset(without), frozenset(defences)
    for kind, given, known in (("defect", removed, DEFECTS), ("defence", restored, DEFENCES)):
        for name in sorted(given - known.keys()):
            raise SwitchError(f"no {kind} is called {name!r}; there are: {', '.join(known)}")
    return Switches(frozenset(DEFECTS) - removed, restored)
