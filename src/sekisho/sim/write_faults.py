"""What a strike does to a transfer that is about to leave.

Each effect changes a `Write` in place and may return a second write that nobody is told of. It
returns `SKIP` where it could not show (a batch or a pool too small, no digests to catch it).
"""

import enum
from collections.abc import Callable
from dataclasses import replace

from sekisho.sim.model import PAGE_SIZE
from sekisho.sim.transport import Write, header_fields
from sekisho.transport import Status


class Skip(enum.Enum):
    SKIP = "no effect here"


SKIP = Skip.SKIP
Effect = Callable[[Write, float], Write | Skip | None]


def apply(effect: str, write: Write, amount: float, previous: Write | None) -> Write | Skip | None:
    """Apply the named effect; ``previous`` is an earlier write of the same transport."""
    if effect == "old":
        return _old(write, previous)
    return EFFECTS[effect](write, amount)


def _fail(write: Write, amount: float) -> None:
    write.lands, write.status = False, Status.FAILED


def _lie(write: Write, amount: float) -> None:
    write.lands = False


def _stall(write: Write, amount: float) -> None:
    write.payload_at += amount
    write.header_at += amount
    write.told_at += amount


def _unknown(write: Write, amount: float) -> None:
    write.doubt_at = write.payload_at
    _stall(write, amount)


def _late(write: Write, amount: float) -> None:
    """The word comes first. What lands was read early and lands at once, payload and header: a
    payload without its header, after the word, is not promised to be seen."""
    write.content = write.source.slots[write.sources]
    write.payload_at = write.header_at = write.told_at + amount


def _duplicate(write: Write, amount: float) -> Write:
    at = write.told_at + amount
    content = write.source.slots[write.sources]
    return replace(write, payload_at=at, header_at=at, content=content, silent=True)


def _short(write: Write, amount: float) -> None:
    """The last half of the pages, rounded up, is never written."""
    _keep(write, range(len(write.targets) // 2))


def _gap(write: Write, amount: float) -> None:
    """One page in the middle is never written."""
    middle = len(write.targets) // 2
    _keep(write, [row for row in range(len(write.targets)) if row != middle])


def _keep(write: Write, rows: range | list[int]) -> None:
    kept = list(rows)
    write.sources = [write.sources[row] for row in kept]
    write.targets = [write.targets[row] for row in kept]
    write.headers = write.headers[kept]
    write.lands = bool(kept)


def _layout(write: Write, amount: float) -> None:
    write.headers = write.headers.copy()
    header_fields(write.headers)["layout"] ^= 1


def _unfilled(write: Write, amount: float) -> None:
    write.headers = write.headers.copy()
    header_fields(write.headers)["filled"][-1] -= 1


def _misdirect(write: Write, amount: float) -> Skip | None:
    """The last page lands ``amount`` pages above, in a page that was not offered. At once: its
    payload without its header is no more promised to be seen than a late one."""
    page = (write.targets[-1] + int(amount)) % write.target.page_count
    return _redirect(write, len(write.targets) - 1, page)


def _unit(write: Write, amount: float) -> Skip | None:
    """A page index is taken for a token index."""
    page = write.targets[0] * PAGE_SIZE % write.target.page_count
    return _redirect(write, 0, page)


def _redirect(write: Write, row: int, page: int) -> Skip | None:
    if page in write.targets:
        return SKIP
    write.targets = [*write.targets[:row], page, *write.targets[row + 1 :]]
    write.payload_at = write.header_at
    return None


def _permute(write: Write, amount: float) -> Skip | None:
    if len(write.targets) < 2:
        return SKIP
    write.targets = [*write.targets[1:], write.targets[0]]
    return None


def _torn_header(write: Write, amount: float) -> None:
    """The last page's payload lands, its header does not."""
    write.headers_lost = 1


def _torn_payload(write: Write, amount: float) -> Skip | None:
    """Half of the last page's payload lands, its header does (where a digest is asked for)."""
    if not write.headers[-1, 6:8].any() or header_fields(write.headers)["filled"][-1] <= 8:
        return SKIP
    write.halves = 1
    return None


def _wrong_source(write: Write, amount: float) -> Skip | None:
    """A page with a new owner is read (where a payload digest is asked for)."""
    if not write.headers[-1, 6:8].any():
        return SKIP
    page = (write.sources[-1] + 1) % write.source.page_count
    if page in write.sources:
        return SKIP
    write.sources = [*write.sources[:-1], page]
    return None


def _old(write: Write, previous: Write | None) -> Skip | None:
    """What an earlier write carried is sent again, to where this one should go."""
    if previous is None:
        return SKIP
    rows = min(len(write.targets), len(previous.headers))
    _keep(write, range(rows))
    write.headers = previous.headers[:rows]
    write.content = previous.source.slots[previous.sources[:rows]]
    return None


EFFECTS: dict[str, Effect] = {
    "fail": _fail,
    "lie": _lie,
    "stall": _stall,
    "unknown": _unknown,
    "late": _late,
    "duplicate": _duplicate,
    "short": _short,
    "gap": _gap,
    "layout": _layout,
    "unfilled": _unfilled,
    "misdirect": _misdirect,
    "unit": _unit,
    "permute": _permute,
    "torn-header": _torn_header,
    "torn-payload": _torn_payload,
    "wrong-source": _wrong_source,
}
