"""Outcomes: closed set of codes, one per request, the first for good."""

import dataclasses

import pytest

from sekisho.core.errors import LocalOwnershipError
from sekisho.core.outcome import CODES, Kind, Outcome, OutcomeCell


@pytest.mark.parametrize("code", CODES)
def test_kind_and_status_come_from_the_code(code: str) -> None:
    outcome = Outcome(code, "why")
    assert (outcome.kind, outcome.http_status) == CODES[code]


def test_the_codes_are_these() -> None:
    """Clients, dashboards and bills know them by name: one that goes or changes is a break."""
    assert {code: (kind.value, status) for code, (kind, status) in CODES.items()} == {
        "stop": ("finished", 200),
        "length": ("finished", 200),
        "context_length_exceeded": ("rejected", 400),
        "queue_full": ("rejected", 429),
        "capacity_exceeded": ("rejected", 503),
        "not_ready": ("rejected", 503),
        "client_gone": ("aborted", 499),
        "shutting_down": ("aborted", 503),
        "ownership_violation": ("failed", 500),
        "transfer_failed": ("failed", 502),
        "node_lost": ("failed", 503),
        "internal_error": ("failed", 500),
    }


def test_an_outcome_needs_no_message() -> None:
    assert Outcome("stop").message == ""


@pytest.mark.parametrize("code", ["", "STOP", "ok", "finished"])
def test_an_unknown_code_is_refused(code: str) -> None:
    with pytest.raises(LocalOwnershipError, match="unknown outcome code"):
        Outcome(code)


def test_only_finished_answers_are_a_success() -> None:
    """In the incident failures were served as HTTP 200."""
    for kind, status in CODES.values():
        assert (status == 200) == (kind is Kind.FINISHED)
        assert status == 200 or 400 <= status <= 599


def test_ownership_violation_is_a_failure_of_the_server() -> None:
    assert CODES["ownership_violation"][0] is CODES["transfer_failed"][0] is Kind.FAILED
    assert all(CODES[code][1] >= 500 for code in ("ownership_violation", "transfer_failed"))


def test_the_first_outcome_wins() -> None:
    cell = OutcomeCell()
    assert cell.value is None
    first = Outcome("context_length_exceeded", "1048576 > 681280")
    assert cell.settle(first)
    for code in CODES:
        assert not cell.settle(Outcome(code))
        assert cell.value is first


def test_neither_outcome_nor_cell_can_be_edited() -> None:
    cell = OutcomeCell()
    cell.settle(Outcome("stop"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        cell.value.code = "length"  # type: ignore[union-attr,misc]
    with pytest.raises(AttributeError):
        cell.value = None  # type: ignore[misc]
    with pytest.raises(AttributeError):
        cell.other = 1  # type: ignore[attr-defined]
