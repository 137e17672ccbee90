"""What a guarded connector must do with what can go wrong. Each case is one request at decode,
and the verdict is a client's: the right text, another one, or an error."""

from collections.abc import Iterator
from typing import Any

import pytest

FIELD = "sekisho_manifest"


@pytest.fixture(autouse=True)
def _nothing_is_lost(deployment: Any) -> Iterator[None]:
    """Whatever a case did: all blocks of both roles come back."""
    yield
    deployment.lost = None
    deployment.held.clear()
    for role in (deployment.decode, deployment.prefill):
        pool = role.scheduler.kv_cache_manager.block_pool
        for name in [n for n, r in role.scheduler.requests.items() if not r.is_finished()]:
            role.abort(name)
        if role is deployment.decode:
            deployment.until(lambda pool=pool: _used(pool) == 0)
        role.guard.keeper.ledger.check_integrity()


def _used(pool: Any) -> int:
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def _is(found: object, expected: object) -> None:
    if found != expected:
        pytest.fail(f"a client sees {found!r}, and should see {expected!r}")


@pytest.mark.parametrize("length", [1, 31, 32, 33, 96, 257])
def test_a_whole_transfer_is_answered_right(deployment: Any, length: int) -> None:
    """Blocks full and in part: what decode finds is what its prompt means."""
    tokens = deployment.prompt(length, 5000 + length)
    _, params = deployment.compute(tokens)
    _is(deployment.answer(deployment.ask(tokens, params)), "right")


def test_the_same_prompt_again_is_answered_from_the_prefix_cache(deployment: Any) -> None:
    """Both roles find the first blocks; only the rest is moved."""
    tokens = deployment.prompt(100, 7000)
    for _ in range(2):
        _, params = deployment.compute(tokens)
        _is(deployment.answer(deployment.ask(tokens, params)), "right")


@pytest.mark.parametrize("missing", [1, 31, 32, 64])
def test_a_shorter_prompt_at_prefill_fails(deployment: Any, missing: int) -> None:
    """Fewer tokens, in as many blocks or fewer."""
    tokens = deployment.prompt(128, 8000)
    _, params = deployment.compute(tokens[:-missing])
    _is(deployment.answer(deployment.ask(tokens, params)), "error")


def test_a_longer_prompt_at_prefill_fails(deployment: Any) -> None:
    """A connector that takes the last n blocks would fill all that decode reserved."""
    tokens = deployment.prompt(128, 8000)
    _, params = deployment.compute([*deployment.prompt(40, 9000), *tokens])
    _is(deployment.answer(deployment.ask(tokens, params)), "error")


def test_parameters_of_two_requests_that_are_swapped_fail(deployment: Any) -> None:
    """Of the same length, so that counts agree."""
    one, two = deployment.prompt(100, 10000), deployment.prompt(100, 11000)
    (_, of_one), (_, of_two) = deployment.compute(one), deployment.compute(two)
    names = [deployment.ask(one, of_two), deployment.ask(two, of_one)]
    _is([deployment.answer(name) for name in names], ["error", "error"])


def test_a_transfer_that_is_asked_for_twice_is_given_once(deployment: Any) -> None:
    """A proxy that tries again, or a client that replays."""
    tokens = deployment.prompt(100, 12000)
    _, params = deployment.compute(tokens)
    names = [deployment.ask(tokens, params) for _ in range(2)]
    _is([deployment.answer(name) for name in names], ["right", "error"])


@pytest.mark.parametrize("written", [0, 1, 3])
def test_success_that_was_told_and_not_written_fails(deployment: Any, written: int) -> None:
    """The connector reports that all is over, and the last blocks are as they were."""
    tokens = deployment.prompt(128, 13000 + written)
    _, params = deployment.compute(tokens)
    deployment.lost = written
    _is(deployment.answer(deployment.ask(tokens, params)), "error")


@pytest.mark.parametrize("change", [{FIELD: None}, {FIELD: {"tokens": 100}}])
def test_without_a_genuine_manifest_it_fails(deployment: Any, change: dict[str, Any]) -> None:
    """Prefill never ran under guard, or somebody else says that it did."""
    tokens = deployment.prompt(100, 14000)
    _, params = deployment.compute(tokens)
    _is(deployment.answer(deployment.ask(tokens, params | change)), "error")


def test_a_transfer_that_is_late_gets_its_blocks_back_last(deployment: Any) -> None:
    """Its request is aborted; until the connector says that it is over, nobody has its blocks."""
    tokens = deployment.prompt(128, 15000)
    _, params = deployment.compute(tokens)
    late = deployment.ask(tokens, params)
    deployment.held.add(late)
    deployment.until(lambda: late in deployment.decode.guard._pins)
    blocks = set(deployment.decode.pages(late))
    deployment.decode.abort(late)
    for number in range(8):
        other = deployment.prompt(200, 16000 + 1000 * number)
        _, asked = deployment.compute(other)
        name = deployment.ask(other, asked)
        deployment.until(
            lambda name=name: (
                name in deployment.decode.guard._pins or name in deployment.decode.answers
            )
        )
        if name in deployment.decode.scheduler.requests:
            _is(blocks & set(deployment.decode.pages(name)), set())
        _is(deployment.answer(name), "right")


def test_a_salt_that_the_prefix_cache_ignores_is_not_ignored(deployment: Any) -> None:
    """Blocks of one tenant are found by another's hashes: prefill fails, and decode does."""
    tokens = deployment.prompt(128, 30000)
    first, _ = deployment.compute(tokens, "a")
    found = deployment.prefill.scheduler.requests[first]
    _, params = deployment.compute(tokens, "b", like=found)
    _is(FIELD in params, False)
    _is(deployment.answer(deployment.ask(tokens, params, "b")), "error")


def test_an_adapter_that_the_prefix_cache_ignores_is_not_ignored(deployment: Any) -> None:
    """The same salt, and KV that another adapter computed."""
    tokens = deployment.prompt(128, 32000)
    first, _ = deployment.compute(tokens)
    found = deployment.prefill.scheduler.requests[first]
    from sekisho.guard.conformance.deployment import lora_request

    adapter = lora_request("an-adapter")
    _, params = deployment.compute(tokens, like=found, lora=adapter)
    _is(FIELD in params, False)
    _is(deployment.answer(deployment.ask(tokens, params, lora=adapter)), "error")


def test_without_a_salt_nothing_begins(deployment: Any) -> None:
    """Neither at prefill nor at decode."""
    tokens = deployment.prompt(64, 34000)
    _, params = deployment.compute(tokens, "")
    _is(FIELD in params, False)
    _is(deployment.answer(deployment.ask(tokens, params, "")), "error")
