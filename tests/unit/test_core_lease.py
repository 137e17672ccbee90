"""Leases: counted within an incarnation, never twice, never outside u64."""

import pytest

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.lease import U64_MAX, Lease, LeaseMint


def test_serials_count_up_from_one() -> None:
    mint = LeaseMint(7)
    assert [mint.next() for _ in range(3)] == [Lease(7, 1), Lease(7, 2), Lease(7, 3)]


@pytest.mark.parametrize("incarnation", [0, -1, U64_MAX + 1])
def test_an_incarnation_outside_u64_is_refused(incarnation: int) -> None:
    with pytest.raises(LocalOwnershipError, match="not in 1"):
        LeaseMint(incarnation)


@pytest.mark.parametrize("incarnation", [1, U64_MAX])
def test_both_ends_of_u64_are_incarnations(incarnation: int) -> None:
    assert U64_MAX == 0xFFFF_FFFF_FFFF_FFFF
    assert LeaseMint(incarnation).next() == Lease(incarnation, 1)


def test_the_last_serial_is_given_and_then_none() -> None:
    mint = LeaseMint(1)
    mint._serial = U64_MAX - 1
    assert mint.next().serial == U64_MAX
    for _ in range(2):
        with pytest.raises(LocalOwnershipError, match="serials"):
            mint.next()
    assert mint._serial == U64_MAX


def test_incarnations_share_no_lease() -> None:
    mints = [LeaseMint(incarnation) for incarnation in (1, 2, U64_MAX)]
    leases = [mint.next() for mint in mints for _ in range(50)]
    assert len(set(leases)) == len(leases)


def test_a_lease_is_a_value_and_prints_unambiguously() -> None:
    lease = Lease(0xAB, 12)
    assert str(lease) == "00000000000000ab.12"
    with pytest.raises(AttributeError):
        lease.serial = 13  # type: ignore[misc]
