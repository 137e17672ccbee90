"""A real transfer that lands after decode has given up; run in vLLM's environment.

    python vllm_late.py on|off     with or without the quarantine

Both roles in one process, without a model (`sekisho.guard.conformance.deployment`): real
schedulers, real Mooncake over TCP. Prefill's write stalls beyond decode's patience; other requests
fill the pool meanwhile. Prints one JSON object: block ids, and what clients saw.
"""

import functools
import json
import sys
import time
from typing import Any

from engine_switch import around
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

from sekisho.core.ledger import Ledger
from sekisho.guard.conformance.deployment import Deployment

_PATIENCE_S, _STALL_S = 3, 9.0
_TIMEOUT = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"


class _Envs:
    """vLLM's variables; decode waits for a minute longer than its timeout says."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name != _TIMEOUT:
            return getattr(self._real, name)
        decode = sys._getframe(1).f_code.co_name == "receive_kv_from_single_worker"
        return _PATIENCE_S - 60 if decode else 60


class _Stall:
    """The next write sleeps first. ``landed``: it has been made."""

    def __init__(self) -> None:
        self.next = False
        self.landed = False
        around(mooncake_connector.MooncakeConnectorWorker, "_send_blocks", self._send)

    def _send(self, original: Any, *args: Any) -> Any:
        mine, self.next = self.next, False
        if mine:
            time.sleep(_STALL_S)
        out = original(*args)
        self.landed |= mine
        return out


def drive() -> dict[str, Any]:
    """See the head of this file."""
    stall = _Stall()
    mooncake_connector.envs = _Envs(mooncake_connector.envs)
    made = Deployment({"inner": "MooncakeConnector", "mooncake_protocol": "tcp"})
    guard = made.decode.guard
    tokens = made.prompt(200, 5000)
    _, params = made.compute(tokens)
    stall.next = True
    late = made.ask(tokens, params)
    made.until(lambda: late in guard._pins)
    blocks = made.decode.pages(late)
    answer = made.answer(late)
    waiting, reused = guard.keeper.quarantined(), set[int]()
    others: list[str] = []
    while not stall.landed:
        other = made.prompt(150, 9000 + 300 * len(others))
        _, asked = made.compute(other)
        name = made.ask(other, asked)
        made.until(functools.partial(_begun, made, name))
        if name in made.decode.scheduler.requests:
            reused |= set(made.decode.pages(name)) & set(blocks)
        others.append(made.answer(name))
    made.until(lambda: guard.keeper.quarantined() == 0)
    guard.keeper.ledger.check_integrity()
    free = made.decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    made.close()
    return {
        "late": blocks,
        "answer": answer,
        "quarantined": waiting,
        "reused": sorted(reused),
        "others": {said: others.count(said) for said in set(others)},
        "free": free,
    }


def _begun(made: Deployment, name: str) -> bool:
    return name in made.decode.guard._pins or name in made.decode.answers


def _pin_nothing(original: Any, ledger: Ledger, pages: Any) -> Any:
    return original(ledger, pages[:0])


if __name__ == "__main__":
    if sys.argv[1] == "off":
        around(Ledger, "pin", _pin_nothing)
    print(json.dumps(drive()), flush=True)
