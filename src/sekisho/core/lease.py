"""Leases: who a page belongs to, as a value that is never used twice.

The incarnation is drawn once (by the caller, from the operating system's randomness) when a pool
is created; the serial counts up within it. So a lease never repeats, across restarts too. Only
`Pool` mints leases; a client can never name one.
"""

from typing import NamedTuple

from sekisho.core.errors import check

U64_MAX = 2**64 - 1


class Lease(NamedTuple):
    """16 bytes on the wire: ``incarnation`` and ``serial``, both u64, both above zero."""

    incarnation: int
    serial: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}.{self.serial}"


class LeaseMint:
    """Hands out the leases of one pool, each once.

    Raises:
        LocalOwnershipError: the incarnation is not in 1..2**64-1, or the serials are spent.
    """

    def __init__(self, incarnation: int) -> None:
        check(0 < incarnation <= U64_MAX, f"incarnation {incarnation} is not in 1..2**64-1")
        self.incarnation = incarnation
        self._serial = 0

    def next(self) -> Lease:
        """A lease that no earlier call on any pool has returned."""
        check(self._serial < U64_MAX, "all serials of this incarnation are used")
        self._serial += 1
        return Lease(self.incarnation, self._serial)
