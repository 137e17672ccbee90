"""Where decode reads prefill's blocks: what is bound to a hand-off, and whether they were held."""

import threading
from typing import Any

import numpy as np
import pytest

from guard_vllm_kit import KEY, LAYOUT
from sekisho.guard.vllm import nixl
from sekisho.guard.vllm import witness as witnessing
from sekisho.guard.vllm import worker as working
from sekisho.guard.vllm.drain import DrainServer, Flights, drained, held
from sekisho.guard.vllm.kind import InnerError, ParamsError
from sekisho.guard.vllm.messages import Load, StepMeta
from sekisho.guard.vllm.nixl import Nixl
from sekisho.guard.vllm.witness import Witness
from sekisho.guard.vllm.worker import Worker

GIVEN: dict[str, Any] = {
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_block_ids": [[3, 4]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 40,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "transfer_mode": "pull",
}


def test_what_prefill_states_is_what_decode_is_asked_to_fetch() -> None:
    stated = Nixl().stated("request", {}, GIVEN)
    assert Nixl().transfer("decode", GIVEN | {"do_remote_prefill": True}, 2) == stated


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [[3, 5]]},
        {"remote_request_id": "other"},
        {"remote_host": "there"},
        {"remote_port": 5601},
        {"tp_size": 2},
        {"pp_size": 2},
        {"remote_num_tokens": 41},
    ],
)
def test_a_hand_off_in_which_anything_was_changed_is_another(change: dict[str, Any]) -> None:
    assert Nixl().transfer("decode", GIVEN | change, 2) != Nixl().stated("request", {}, GIVEN)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": None},
        {"remote_block_ids": [[3]]},
        {"remote_block_ids": [[3, 4], [5]]},
        {"remote_block_ids": [[3, -1]]},
        {"remote_block_ids": [[3, True]]},
        {"remote_block_ids": [["3", "4"]]},
        {"remote_request_id": ""},
        {"remote_host": 7},
        {"remote_port": float("nan")},
    ],
)
def test_what_is_no_list_of_this_prompts_blocks_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ParamsError):
        Nixl().transfer("decode", GIVEN | change, 2)


def test_prefill_reads_from_nobody() -> None:
    assert Nixl().transfer("prefill", {"remote_block_ids": None}, 2) is None
    with pytest.raises(ParamsError, match="asked to read"):
        Nixl().transfer("prefill", GIVEN, 2)
    with pytest.raises(InnerError, match="bidirectional"):
        Nixl().check_options({"num_threads": 0, "bidirectional_kv_xfer": True})


def test_ucx_alone_and_without_a_pool_of_threads_is_followed() -> None:
    """vLLM's default is four threads, whose idle sockets always hold something unread."""
    Nixl().check_options({"num_threads": 0})
    Nixl().check_options({"num_threads": 0, "backends": ["UCX"]})
    for extra in ({}, {"num_threads": 4}):
        with pytest.raises(InnerError, match="num_threads is not 0"):
            Nixl().check_options(extra)
    with pytest.raises(InnerError, match="backends"):
        Nixl().check_options({"num_threads": 0, "backends": ["UCX", "GDS"]})


class Table:
    """NIXL's worker, as far as it is looked at."""

    def __init__(self, *names: str) -> None:
        self._reqs_to_process = set(names)
        self.connector_worker = self

    def read(self, name: str) -> set[str]:
        self._reqs_to_process.discard(name)
        return {name}


def test_blocks_were_held_until_they_were_read_and_not_beyond_a_lease() -> None:
    table = Table("waiting", "read", "lapsed")
    held_by = Nixl().holder(table)
    assert [held_by(name) for name in ("waiting", "read", "lapsed")] == [True] * 3
    nixl._get_new_notifs(lambda worker: worker.read("read"), table)
    table._reqs_to_process.discard("lapsed")  # NIXL's time is over
    assert held_by("waiting")
    assert held_by("read")
    assert not held_by("lapsed")
    assert not held_by("never heard of")


@pytest.fixture
def server() -> DrainServer:
    return DrainServer(Nixl(), KEY, "127.0.0.1", {"held"}.__contains__)


def test_a_holder_answers_over_a_real_socket_and_only_to_our_own(server: DrainServer) -> None:
    host, _, port = server.address.rpartition(":")
    assert held(KEY, host, int(port), "held") is True
    assert held(KEY, host, int(port), "lapsed") is False
    assert held(b"o" * 32, host, int(port), "held") is None
    # Prefill writes nothing, and so cannot say that a read which failed is over.
    assert not drained(KEY, host, int(port), "held")
    server.close()
    assert held(KEY, host, int(port), "held") is None


def test_whoever_writes_holds_nothing_for_readers() -> None:
    server = DrainServer(Flights(), KEY, "127.0.0.1")
    host, _, port = server.address.rpartition(":")
    assert held(KEY, host, int(port), "any") is False
    server.close()


def _answers(witness: Witness, count: int) -> dict[str, bool]:
    out: dict[str, bool] = {}
    for _ in range(200):
        out |= witness.take()
        if len(out) >= count:
            break
        threading.Event().wait(0.05)
    return out


def test_a_witness_that_is_silent_or_missing_is_none(server: DrainServer) -> None:
    dead = DrainServer(Nixl(), KEY, "127.0.0.1", {"held"}.__contains__)
    dead.close()
    witness = Witness(KEY, patience_s=0.5)
    witness.ask("good", "held", [server.address])
    witness.ask("lapsed", "lapsed", [server.address])
    witness.ask("one of two", "held", [server.address, dead.address])
    witness.ask("nobody", "held", [])
    found = _answers(witness, 4)
    assert found == {"good": True, "lapsed": False, "one of two": False, "nobody": False}
    witness.close()
    server.close()


def test_a_witness_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker under load may not answer in the seconds that one question takes."""
    answers: list[bool | None] = [None, None, True]
    monkeypatch.setattr(witnessing, "held", lambda *_: answers.pop(0))
    witness = Witness(KEY)
    witness.ask("busy", "held", ["127.0.0.1:1"])
    assert _answers(witness, 1) == {"busy": True}
    assert answers == []
    witness.close()


def _worker(server: DrainServer, source: str) -> tuple[Worker, Load]:
    witness = Witness(KEY)
    worker = Worker(LAYOUT, 8, witness)
    words = np.ones((2, 8), np.uint64)
    load = Load(np.array([1, 2]), words, words, source=source, workers=(server.address,))
    worker.bind(StepMeta(None, loads={"request": load}))
    worker.headers.words[[1, 2]] = words
    return worker, load


@pytest.mark.parametrize(("source", "kind"), [("held", None), ("lapsed", "load")])
def test_what_was_read_counts_once_prefill_says_that_it_held_it(
    source: str, kind: str | None
) -> None:
    may_answer = threading.Event()
    server = DrainServer(
        Nixl(), KEY, "127.0.0.1", lambda name: may_answer.wait() and name == "held"
    )
    worker, _ = _worker(server, source)
    arrived = worker.witnessed({"request"})
    assert arrived == set(), "prefill has not answered yet"
    may_answer.set()
    for _ in range(200):
        if arrived := worker.witnessed(set()):
            break
        threading.Event().wait(0.05)
    assert arrived == {"request"}
    assert worker.arrived(arrived) == (set() if kind is None else {"request"})
    said = worker.report()
    assert said is not None
    assert said.landed == {"request": 1}
    assert [e.kind for _, found in said.found.values() for e in found] == ([kind] if kind else [])
    server.close()


def test_a_read_that_failed_waits_for_no_witness(server: DrainServer) -> None:
    worker, load = _worker(server, "held")
    load.failed = True
    assert worker.witnessed({"request", "not ours"}) == {"request", "not ours"}
    server.close()


@pytest.mark.parametrize("begun", [True, False])
def test_a_read_that_failed_is_in_doubt_only_if_it_was_begun(
    server: DrainServer, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Prefill that cannot be reached, and lives, would keep these blocks in quarantine."""
    worker, load = _worker(server, "held")
    monkeypatch.setattr(working, "_worker", worker)
    if begun:
        nixl._read_blocks(lambda *_, **__: True, None, read_spec=None, request_id="request")
    load.failed = True
    assert worker.arrived({"request"}) == (set() if begun else {"request"})
    said = worker.report()
    assert said is not None
    assert (said.in_doubt, said.landed) == (({"request": 1}, {}) if begun else ({}, {"request": 1}))
    assert bool(said.found) is not begun
    server.close()
