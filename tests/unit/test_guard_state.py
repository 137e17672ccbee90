"""Which request a page of SGLang's allocator is for: cells in, pages under leases out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guard_kit import SIZE, new_keeper
from sekisho.core.ledger import State as PageState
from sekisho.guard.sglang.state import State


class _Report:
    """Notes violations."""

    def __init__(self) -> None:
        self.violations: list[tuple[str, str, list[int]]] = []

    def violation(self, name: str, evidence: Any, at: str) -> None:
        self.violations.append((name, at, [e.page for e in evidence]))


@pytest.fixture
def state() -> State:
    pool = SimpleNamespace(req_to_token=torch.zeros((4, 8 * SIZE), dtype=torch.int32))
    scheduler: Any = SimpleNamespace(token_to_kv_pool_allocator=None, req_to_token_pool=pool)
    made = State.__new__(State)
    made.scheduler, made.rows, made.page_size = scheduler, pool.req_to_token, SIZE
    made.keeper, made.report = new_keeper(), _Report()  # type: ignore[assignment]
    made._held, made._handing = {}, []
    made._nobody = made.keeper.open("engine", "")
    return made


def request(row: int) -> Any:
    return SimpleNamespace(rid=f"r{row}", extra_key=f"t{row}", kv=SimpleNamespace(req_pool_idx=row))


def cells(*pages: int, last: int = SIZE) -> list[int]:
    """Cells of whole pages, of the last one only ``last``."""
    whole = [page * SIZE + slot for page in pages for slot in range(SIZE)]
    return whole[: len(whole) - SIZE + last]


def test_each_page_goes_to_the_request_whose_cells_it_begins(state: State) -> None:
    first, second, third = (request(row) for row in range(3))
    # The second continues a page that it has: of the cells it gets, none begins one.
    parts = [cells(3, 5, last=4), [9 * SIZE + 7, 9 * SIZE + 8], cells(2, last=1)]
    with state.handing([first, second, third]):
        state.handed(torch.tensor([*parts[0], *parts[1], *parts[2]]), [len(part) for part in parts])
    assert state.holding(first).fresh == [3, 5]
    assert state.holding(second).fresh == []
    assert state.holding(third).fresh == [2]
    assert state.keeper.ledger.state_of(9) is PageState.FREE
    assert not state.report.violations  # type: ignore[attr-defined]


def test_a_step_without_a_new_page_claims_nothing(state: State) -> None:
    with state.handing([request(0)]):
        state.handed(torch.tensor([3 * SIZE + 1]), [1])
    assert state.keeper.ledger.counts()["free"] == 12


@pytest.mark.parametrize("handing", [[], [request(0)]])
def test_cells_for_nobody_known_are_still_somebodys(state: State, handing: list[Any]) -> None:
    """Or their return would look like a page that is freed twice."""
    with state.handing(handing):
        state.handed(torch.tensor(cells(3, 4)), [])
    assert state.keeper.ledger.counts()["leased"] == 2
    assert state.keeper.release(torch.tensor([3, 4]).numpy()).tolist() == [3, 4]


def test_a_page_that_has_an_owner_stays_that_owners(state: State) -> None:
    first, second = request(0), request(1)
    for each in (first, second):
        with state.handing([each]):
            state.handed(torch.tensor(cells(3)), [SIZE])
    assert state.holding(first).fresh == [3]
    assert state.holding(second).fresh == []
    assert state.report.violations == [("r1", "allocation", [3])]  # type: ignore[attr-defined]


def test_rows_of_a_batch_end_where_its_tokens_do(state: State) -> None:
    for row, pages in ((0, (3, 1, 2)), (2, (5, 4))):
        state.rows[row, : len(pages) * SIZE] = torch.tensor(cells(*pages))
    batch = SimpleNamespace(
        seq_lens_cpu=torch.tensor([2 * SIZE + 1, SIZE]), req_pool_indices=torch.tensor([0, 2])
    )
    assert [row.tolist() for row in state.rows_of(batch)] == [[3, 1, 2], [5]]
