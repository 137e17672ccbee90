"""Engine versions with a published fault of the family that the gate is about.

A small table, read on 2026-12-02. A row cites its report; a fault without a known range of versions
has no row, because a guess would be waived and the waiver would outlive it.
"""

from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from sekisho.gate.model import Finding, Reading, Role, Severity


class Fault(NamedTuple):
    """Versions ``since`` (inclusive, or any) to ``before`` (exclusive) of an engine, in ``roles``.

    ``known``: the day on which the row was written, ISO.
    """

    engine: str
    roles: frozenset[Role]
    since: Version | None
    before: Version
    severity: Severity
    report: str
    known: str
    what: str


_SPLIT: frozenset[Role] = frozenset({"prefill", "decode"})
_ANY: frozenset[Role] = frozenset({"prefill", "decode", "both"})

# sglang#30233 was reported of 0.5.11 and leaked in our runs of 0.5.19. Its two halves, a
# placeholder for the prompt and a queue that never asks for the verdict, are in 0.4.6.post5, 0.4.7,
# 0.5.4, 0.5.10, 0.5.13 and 0.5.19; 0.5.20 settles the verdict in disaggregation/prefill.py, and
# there nothing leaked. vllm PR#12621 is a security update in the release notes of 0.7.2.
FAULTS: tuple[Fault, ...] = (
    Fault(
        "sglang",
        _SPLIT,
        None,
        Version("0.5.20"),
        Severity.ERROR,
        "sglang#30233",
        "2026-12-02",
        "a prompt over prefill's limit is refused by replacing it and sent on all the same: decode "
        "answers from pages that nobody wrote",
    ),
    Fault(
        "sglang",
        _SPLIT,
        Version("0.5.20"),
        Version("0.5.24"),  # seen in 0.5.20 and 0.5.23, the PR is closed; later ones were not tried
        Severity.WARNING,
        "sglang#28651",
        "2026-12-02",
        "prefill refuses an over-long prompt at once, but decode keeps the pages reserved for it "
        "until its waiting time-out",
    ),
    Fault(
        "vllm",
        _ANY,
        None,
        Version("0.7.2"),
        Severity.ERROR,
        "GHSA-rm76-4mrf-v9r8",
        "2026-12-02",
        "under Python 3.12 or later keys of the prefix cache can be made to collide, so that one "
        "prompt is answered from another's pages",
    ),
)


def faults_of(reading: Reading) -> list[Finding]:
    """The findings about one engine's version.

    A version that is not stated, or not one, is inconclusive where a fault would depend on it.
    """
    rows = [f for f in FAULTS if f.engine == reading.engine and reading.role in f.roles]
    try:
        version = Version(reading.version)
    except InvalidVersion:
        if not rows:
            return []
        why = f"version {reading.version!r} cannot be compared" if reading.version else "no version"
        worst = rows[0]
        return [
            Finding(
                rule="GATE007",
                severity=Severity.INCONCLUSIVE,
                model=reading.model,
                source=reading.source,
                message=f"{why}: whether {worst.report} ({worst.what}) applies cannot be told",
                report=worst.report,
            )
        ]
    return [
        Finding(
            rule="GATE007",
            severity=row.severity,
            model=reading.model,
            source=reading.source,
            message=f"{row.engine} {reading.version} as {reading.role}: {row.what}",
            report=row.report,
        )
        for row in rows
        if (row.since is None or version >= row.since) and version < row.before
    ]
