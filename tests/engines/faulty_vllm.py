"""A vLLM pair with the faults of `stand_ins/engine_faults_vllm.py` in it, and ways to ask it."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rig import Answer, EngineProcess, post
from rig_vllm import MOONCAKE, MOVES, NAME, VllmPair, where
from vllm_prompts import OTHER, STORY, tokens

KEY = "a key of the tests, shared by both roles"
BLOCK = 32
Traced = dict[str, Any]
Body = Mapping[str, Any]


def guarded(inner: str) -> dict[str, Any]:
    """``--kv-transfer-config`` of the guard around ``inner``."""
    own = MOVES[inner].get("kv_connector_extra_config", {})
    return {
        **MOVES[inner],
        "kv_connector": "SekishoConnector",
        "kv_connector_module_path": "sekisho.guard.vllm.connector",
        "kv_connector_extra_config": {**own, "inner": inner},
    }


def _with(config: Body, extra: Body | None) -> dict[str, Any]:
    name = "kv_connector_extra_config"
    return {**config, name: {**config.get(name, {}), **(extra or {})}}


GUARD = guarded(MOONCAKE)


class FaultyPair(VllmPair):
    """`VllmPair` whose processes read a file of faults; see `engine_switch`.

    ``guard``: whether the guard is in. ``give_up_s``: how long decode waits for a transfer, over
    Mooncake. ``extra``: more for the connector that moves blocks.
    """

    def __init__(
        self,
        *,
        guard: bool,
        folder: Path,
        give_up_s: int = 6,
        inner: str = MOONCAKE,
        extra: Body | None = None,
        **more: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.trace_file = folder / "trace.jsonl"
        self._switch = folder / "switch.json"
        self.guarded = guard
        self.off: list[str] = []
        self.switch()
        both = {"ENGINE_SWITCH": str(self._switch), "ENGINE_TRACE": str(self.trace_file)}
        both |= {"SEKISHO_GUARD_KEY": KEY} if guard else {}
        # vLLM's decode waits for a minute longer than this says.
        patience = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(give_up_s - 60)}
        super().__init__(
            inner=inner,
            connector=_with(guarded(inner) if guard else MOVES[inner], extra),
            env=both | more.pop("env", {}),
            prefill_env={"ENGINE_ROLE": "prefill"} | more.pop("prefill_env", {}),
            decode_env={"ENGINE_ROLE": "decode"} | patience | more.pop("decode_env", {}),
            folder=folder,
            **more,
        )

    def switch(self, faults: Body | None = None, off: Sequence[str] = ()) -> None:
        """These faults are on and these checks off from now on, and no others."""
        new = self._switch.with_suffix(".new")
        new.write_text(json.dumps({"faults": faults or {}, "off": list(off)}))
        new.replace(self._switch)

    def traced(self, event: str, **about: Any) -> list[Traced]:
        """What the hooks wrote down of one kind, oldest first."""
        lines = self.trace_file.read_text().splitlines() if self.trace_file.exists() else []
        found = [json.loads(line) for line in lines]
        about["event"] = event
        return [one for one in found if all(one.get(k) == v for k, v in about.items())]

    def evidence(self, process: EngineProcess) -> list[dict[str, Any]]:
        """What the guard of one role wrote, oldest first."""
        mark, text = "sekisho evidence ", process.log.read_text(errors="replace")
        return [json.loads(line.partition(mark)[2]) for line in text.splitlines() if mark in line]


@dataclass(frozen=True)
class Outcome:
    """What a client saw: decode's answer, or prefill's where it was not 200."""

    status: int
    text: str
    seconds: float
    said: str

    def __str__(self) -> str:
        return f"{self.status} in {self.seconds:.1f} s"


def outcome(answer: Answer) -> Outcome:
    said = answer.body.decode(errors="replace")[:300]
    text = answer.json()["choices"][0]["text"] if answer.status == 200 else ""
    return Outcome(answer.status, text, answer.seconds, said)


def body(tokens: Sequence[int], answer: int = 16, salt: str = "tenant-a") -> dict[str, Any]:
    """A request for the most likely ``answer`` tokens after a prompt of token ids."""
    said: dict[str, Any] = {"model": NAME, "prompt": list(tokens), "temperature": 0}
    said |= {"max_tokens": answer, "ignore_eos": True}
    return said | ({"cache_salt": salt} if salt else {})


async def ask(
    pair: VllmPair,
    asked: Body,
    prefilled: Body | None = None,
    *,
    change: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
) -> Outcome:
    """As vLLM's proxy does, but prefill may be asked something else than decode.

    ``change`` replaces ``kv_transfer_params`` on their way to decode; None takes one away.
    """
    made = await ask_prefill(pair, asked, prefilled, timeout_s)
    return await ask_decode_for(pair, asked, made, change, timeout_s)


async def ask_prefill(
    pair: VllmPair, asked: Body, prefilled: Body | None = None, timeout_s: float = 120.0
) -> Answer | dict[str, Any]:
    """What decode is to be asked with; prefill's answer where that was not 200."""
    transfer = f"{random.getrandbits(64):016x}"
    begun = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    first = {**(prefilled or asked), "max_tokens": 1, "kv_transfer_params": begun}
    async with _session(timeout_s) as session:
        prefill = await post(session, f"{pair.prefill.url}/v1/completions", first)
        if prefill.status != 200:
            return prefill
        said = prefill.json().get("kv_transfer_params") or {}
        return {**said, **await where(session, pair, transfer)}


async def ask_decode_for(
    pair: VllmPair,
    asked: Body,
    made: Answer | dict[str, Any],
    change: Body | None = None,
    timeout_s: float = 120.0,
) -> Outcome:
    """Decode, with what `ask_prefill` gave."""
    if isinstance(made, Answer):
        return outcome(made)
    params = {
        name: value for name, value in {**made, **(change or {})}.items() if value is not None
    }
    async with _session(timeout_s) as session:
        second = {**asked, "kv_transfer_params": params}
        return outcome(await post(session, f"{pair.decode.url}/v1/completions", second))


def _session(timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))


async def ask_decode(pair: VllmPair, asked: Body, timeout_s: float = 60.0) -> Outcome:
    """Without a word of prefill: decode computes the prompt itself."""
    async with _session(timeout_s) as session:
        return outcome(await post(session, f"{pair.decode.url}/v1/completions", asked))


async def ask_decode_alone(pair: VllmPair, asked: Body, timeout_s: float = 60.0) -> Outcome:
    """Prefill never hears of the transfer that decode is told of."""
    async with _session(timeout_s) as session:
        params = await where(session, pair, f"{random.getrandbits(64):016x}")
        second = {**asked, "kv_transfer_params": params}
        return outcome(await post(session, f"{pair.decode.url}/v1/completions", second))


def ask_now(pair: VllmPair, *asked: Body, timeout_s: float = 120.0) -> list[Outcome]:
    """Prefill is asked one by one, and then decode everything at once: they run together there,
    however slow the machine is."""

    async def together() -> list[Outcome]:
        ready = [await ask_prefill(pair, one, None, timeout_s) for one in asked]
        return await asyncio.gather(
            *(
                ask_decode_for(pair, one, made, None, timeout_s)
                for one, made in zip(asked, ready, strict=True)
            )
        )

    return asyncio.run(together())


def ask_with_a_row_of_another(pair: FaultyPair, answer: int) -> list[tuple[Outcome, str]]:
    """A row of the block table leads into the neighbour's block, for as long as both run: what
    came of the victim and of its neighbour, each with what it is answered alone."""
    victim = tokens(STORY, 4 * BLOCK) + tokens(OTHER, BLOCK + 3)
    other = tokens(STORY, 6 * BLOCK + 5)
    alone = [ask_now(pair, body(t, answer, salt="alone"))[0].text for t in (victim, other)]
    pair.switch({"row": {"victim": len(victim), "other": len(other), "page": 4}})
    found = ask_now(pair, body(victim, answer, salt="v"), body(other, answer, salt="o"))
    pair.switch()
    assert pair.traced("row"), "the fault was never in"
    return list(zip(found, alone, strict=True))
