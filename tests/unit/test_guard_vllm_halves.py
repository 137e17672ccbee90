"""The guard's two halves together, without vLLM: what is vouched for, written, found and given
back. vLLM's side is the model in `guard_vllm_kit`."""

import time
from typing import Any

import numpy as np
import pytest

from guard_vllm_kit import Block, Engine, Request
from sekisho.guard.vllm import worker
from sekisho.guard.vllm.admission import scope_of
from sekisho.guard.vllm.drain import DrainServer, Flights
from sekisho.guard.vllm.messages import Load

TEXT = list(range(1000, 1100))


def _prefilled(
    engine: Engine, tokens: list[int], transfer: str = "t", salt: str = "salt"
) -> tuple[dict[str, Any], list[int]]:
    """A prompt computed by prefill: its manifest's parameter, and its blocks."""
    name = f"prefill {transfer}"
    asked = {"do_remote_decode": True, "transfer_id": transfer}
    request = Request(name, list(tokens), salt, asked)
    assert engine.guard.admit(request)
    pages = engine.allocate(request, -(-len(tokens) // 32))
    engine.step(**{name: len(tokens)})
    request.num_computed_tokens = len(tokens)
    params = engine.guard.ended(request, True)
    assert params is not None
    return params, pages


def _decoding(
    tokens: list[int], params: dict[str, Any], transfer: str = "t", salt: str | None = "salt"
) -> Request:
    where = {"remote_engine_id": "engine", "remote_bootstrap_addr": "http://there"}
    said = {"do_remote_prefill": True, "transfer_id": transfer, **where, **params}
    return Request(f"decode {transfer}", list(tokens), salt, said)


class Pair:
    """A prompt on its way: decode has asked for its blocks, and nothing has come yet."""

    def __init__(self, tokens: list[int] = TEXT) -> None:
        self.prefill, self.decode = Engine("prefill"), Engine("decode")
        params, self.source = _prefilled(self.prefill, tokens)
        self.request = _decoding(tokens, params)
        assert self.decode.guard.admit(self.request), self.decode.guard.failing
        self.pages = self.decode.allocate(self.request, len(self.source))
        self.decode.guard.allocated(self.request, len(tokens))
        self.decode.step()

    def move(self, count: int | None = None) -> None:
        """What the inner connector does with the side-car, for the first ``count`` blocks."""
        source, target = self.prefill.worker.headers, self.decode.worker.headers
        target.words[self.pages[:count]] = source.words[self.source[:count]]

    def arrive(self) -> set[str]:
        failing = self.decode.worker.arrived({self.request.request_id})
        self.decode.hear()
        return failing

    def run(self, steps: int) -> None:
        """Decode computes the last prompt token, and then one after the other."""
        name = self.request.request_id
        self.request.num_computed_tokens = self.request.num_prompt_tokens - 1
        for number in range(steps):
            if self.request.num_computed_tokens + 1 > 32 * len(self.pages):
                self.pages += self.decode.allocate(self.request, 1)
            self.decode.step(**{name: 1})
            self.request.num_computed_tokens += 1
            self.request.tokens.append(2000 + number)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 96, 100])
def test_a_whole_transfer_is_committed_and_every_step_of_it_passes(length: int) -> None:
    pair = Pair(TEXT[:length])
    pair.move()
    assert pair.arrive() == set()
    pair.run(70)
    assert pair.decode.guard.failing == {}
    counts = pair.decode.guard.report.take()
    assert (counts["commits"], counts["steps"]) == (1, 70)


@pytest.mark.parametrize("moved", [0, 1, 3])
def test_a_transfer_that_filled_less_fails(moved: int) -> None:
    pair = Pair()
    pair.move(moved)
    assert pair.arrive() == {pair.request.request_id}
    assert pair.decode.guard.failing == {pair.request.request_id: "unwritten"}


def test_blocks_of_another_prompt_fail_on_arrival() -> None:
    pair = Pair()
    _, other = _prefilled(pair.prefill, [token + 1 for token in TEXT], "other")
    pair.source = other
    pair.move()
    assert pair.arrive() == {pair.request.request_id}


def test_a_write_during_a_step_is_seen_before_its_token_leaves() -> None:
    pair = Pair()
    pair.move()
    pair.arrive()
    pair.run(3)
    pair.move()  # the very same transfer again, late
    pair.decode.step(**{pair.request.request_id: 1})
    assert pair.decode.guard.failing == {pair.request.request_id: "foreign"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sekisho_manifest": None}, "no manifest"),
        ({"transfer_id": "u"}, "another transfer"),
        ({"remote_engine_id": "e"}, "another transfer"),
        ({"remote_bootstrap_addr": None}, "no remote_bootstrap_addr"),
        ({"transfer_id": 7}, "no transfer_id"),
        ({"do_remote_decode": True}, "was asked of a decode server"),
    ],
)
def test_decode_refuses_what_prefill_did_not_state(change: dict[str, Any], reason: str) -> None:
    params, _ = _prefilled(Engine("prefill"), TEXT)
    request, engine = _decoding(TEXT, params), Engine("decode")
    assert request.kv_transfer_params is not None
    request.kv_transfer_params |= change
    assert not engine.guard.admit(request)
    assert reason in engine.guard.failing[request.request_id]
    assert engine.guard.fails_now({request.request_id: request}) == {request.request_id}


@pytest.mark.parametrize(
    ("tokens", "salt", "reason"),
    [
        (TEXT[:-1], "salt", "computed 100 tokens"),
        ([*TEXT, 1], "salt", "computed 100 tokens"),
        ([*TEXT[:-1], 1], "salt", "another prompt"),
        (TEXT, "other", "another prompt"),
        (TEXT, "", "no cache_salt"),
        (TEXT, None, "no cache_salt"),
    ],
)
def test_decode_refuses_a_manifest_of_another_prompt(
    tokens: list[int], salt: str | None, reason: str
) -> None:
    params, _ = _prefilled(Engine("prefill"), TEXT)
    engine, request = Engine("decode"), _decoding(tokens, params, salt=salt)
    assert not engine.guard.admit(request)
    assert reason in engine.guard.failing[request.request_id]


def test_a_transfer_is_asked_for_once() -> None:
    params, _ = _prefilled(Engine("prefill"), TEXT)
    engine = Engine("decode")
    assert engine.guard.admit(_decoding(TEXT, params))
    assert not engine.guard.admit(_decoding(TEXT, params))


def test_an_adapter_is_part_of_the_scope() -> None:
    class Adapter:
        lora_name = "salt"

    plain, adapted = Request("a", TEXT), Request("b", TEXT, lora_request=Adapter())
    assert scope_of(plain) != scope_of(adapted)
    # A salt that is called like the adapter is not the adapter (vllm#44701).
    assert scope_of(Request("c", TEXT, "x")) != scope_of(Request("d", TEXT, None, None))


# -- the prefix cache


def _shared(salt: str, *, still_held: bool) -> tuple[Engine, Request]:
    """A second request is given the first one's three full blocks."""
    engine = Engine("prefill")
    _, pages = _prefilled(engine, TEXT, salt="salt")
    found: list[Block] = [engine.blocks[page] for page in pages[:3]]
    if not still_held:
        engine.release(Request("prefill t", TEXT), pages)
    second = Request("second", list(TEXT), salt)
    assert engine.guard.admit(second)
    engine.allocate(second, 1, found)
    second.num_computed_tokens = 96
    engine.step(second=4)
    return engine, second


@pytest.mark.parametrize("still_held", [True, False])
def test_a_prefix_of_the_same_scope_is_shared(still_held: bool) -> None:
    engine, _ = _shared("salt", still_held=still_held)
    assert engine.guard.failing == {}


@pytest.mark.parametrize("still_held", [True, False])
def test_a_prefix_of_another_scope_dooms_its_finder(still_held: bool) -> None:
    engine, second = _shared("other", still_held=still_held)
    assert set(engine.guard.failing) == {second.request_id}


# -- what vLLM's pool hands out and takes back


def test_a_block_that_is_handed_out_twice_dooms_the_second() -> None:
    engine = Engine("decode")
    one, two = Request("one", TEXT), Request("two", TEXT)
    assert engine.guard.admit(one)
    assert engine.guard.admit(two)
    pages = engine.allocate(one, 4)
    engine.free.insert(0, engine.blocks[pages[0]])
    engine.allocate(two, 4)
    meta = engine.step(one=100, two=100)
    assert engine.guard.failing == {"two": "handed_twice"}
    assert meta.doomed == {"two"}


def test_a_block_that_is_freed_twice_stays_out_of_the_pool() -> None:
    engine = Engine("decode")
    request = Request("one", TEXT)
    pages = engine.allocate(request, 4)
    engine.release(request, pages)
    assert engine.guard.rows.given_back([engine.blocks[pages[0]]]) == []


def test_blocks_are_not_reused_while_a_writer_may_write() -> None:
    """Time passes, requests come and go: only the writer's own word frees them."""
    pair = Pair()
    flights = Flights()
    flights.begin("t")
    server = DrainServer(flights, b"k" * 32, "127.0.0.1")
    pin, manifest = pair.decode.guard._pins[pair.request.request_id]
    told = type(manifest)(**{**_fields(manifest), "drain": (server.address,)})
    pair.decode.guard._pins[pair.request.request_id] = pin, told
    pair.decode.worker.failed(set(pair.pages), set())
    assert pair.arrive() == set()
    pair.decode.release(pair.request, pair.pages)
    for number in range(3):
        other = Request(f"other {number}", TEXT)
        pages = pair.decode.allocate(other, 20)
        assert not set(pages) & set(pair.pages)
        pair.decode.release(other, pages)
    assert pair.decode.guard.keeper.quarantined() == len(pair.pages)
    flights.end("t")
    for _ in range(200):
        pair.decode.step()
        if not pair.decode.guard.keeper.quarantined():
            break
        time.sleep(0.05)
    assert pair.decode.guard.keeper.quarantined() == 0
    assert set(pair.pages) <= {block.block_id for block in pair.decode.free}
    pair.decode.guard.keeper.ledger.check_integrity()
    server.close()


def test_blocks_of_an_unsound_transfer_wait_until_nothing_is_left_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connector reported success; what it wrote may still stand in a socket."""
    pair, unread = Pair(), [True]
    monkeypatch.setattr(worker, "unread", lambda: unread[0])
    pair.move(1)
    pair.arrive()
    pair.request.finished = True
    pair.decode.release(pair.request, pair.pages)
    for _ in range(3):
        pair.decode.step()
    assert pair.decode.guard.keeper.quarantined() == len(pair.pages)
    unread[0] = False
    pair.decode.step()
    assert pair.decode.guard.keeper.quarantined() == 0
    pair.decode.guard.keeper.ledger.check_integrity()


def _fields(manifest: Any) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}


def test_the_worker_reports_a_failed_load_even_if_told_early() -> None:
    pair = Pair()
    pair.decode.worker.failed({pair.pages[0]}, set())
    pair.move()
    pair.decode.worker.arrived({pair.request.request_id})
    said = pair.decode.worker.report()
    assert said is not None
    assert (said.landed, said.in_doubt) == ({}, {pair.request.request_id: 1})


def test_a_load_keeps_what_it_was_asked_for() -> None:
    words = np.zeros((2, 8), np.uint64)
    assert not Load(np.arange(2), words, words).failed
