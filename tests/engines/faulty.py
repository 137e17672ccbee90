"""A pair with the faults of `stand_ins/engine_faults.py` in it, and prompts to ask it with."""

import asyncio
import functools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rig import Answer, EngineProcess
from rig_sglang import PairAnswers, SglangPair, ask_pair

from sekisho.engine.demo import ensure_demo_model

Traced = dict[str, Any]


class FaultyPair(SglangPair):
    """`SglangPair` whose processes read a file of faults; see `engine_switch`.

    ``guard``: whether the guard is in. ``trace`` grows over the pair's life.
    """

    def __init__(self, version: str, *, guard: bool, folder: Path, **more: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.trace_file = folder / "trace.jsonl"
        self._switch = folder / "switch.json"
        self.guarded = guard
        env = {"ENGINE_SWITCH": str(self._switch), "ENGINE_TRACE": str(self.trace_file)}
        env |= {"SEKISHO_GUARD": "on"} if guard else {}
        for role in ("prefill", "decode"):
            more[f"{role}_env"] = {"ENGINE_ROLE": role, **more.get(f"{role}_env", {})}
        self.switch()
        super().__init__(version, env=env | more.pop("env", {}), folder=folder, **more)

    def switch(self, faults: Mapping[str, Any] | None = None, off: Sequence[str] = ()) -> None:
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

    def evidence(self, rid: str) -> list[dict[str, Any]]:
        """What the guards of both roles wrote about a request."""
        mark, found = "sekisho evidence ", []
        for process in (self.prefill, self.decode):
            for line in process.log.read_text(errors="replace").splitlines():
                if mark in line:
                    found.append(json.loads(line.partition(mark)[2]))
        return [one for one in found if one["request"] == rid]


@dataclass(frozen=True)
class Ask:
    """One request: its prompt as token ids, and names that hooks and logs know it by."""

    rid: str
    room: int
    tokens: tuple[int, ...]
    answer: int = 16
    scope: str = ""

    def body(self) -> dict[str, Any]:
        said: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": list(self.tokens),
            "sampling_params": {"temperature": 0, "max_new_tokens": self.answer},
        }
        if self.scope:
            said["extra_key"] = self.scope
        return said


def make(tokens: Sequence[int], **more: Any) -> Ask:
    """An `Ask` with fresh names."""
    room = random.getrandbits(62) | 1
    return Ask(f"r{room:016x}", room, tuple(tokens), **more)


async def ask(pair: SglangPair, one: Ask, timeout_s: float = 150.0) -> PairAnswers:
    """Decode's answer is the client's."""
    return await ask_pair(pair, one.body(), room=one.room, timeout_s=timeout_s)


def ask_now(pair: SglangPair, *asks: Ask, timeout_s: float = 150.0) -> list[PairAnswers]:
    """All of them at once."""

    async def together() -> list[PairAnswers]:
        return await asyncio.gather(*(ask(pair, one, timeout_s) for one in asks))

    return asyncio.run(together())


def text_of(answer: Answer) -> str:
    """The text of a 200; empty for anything else."""
    return str(answer.json()["text"]) if answer.status == 200 else ""


def message_of(answer: Answer) -> str:
    """What an answer that is an error says."""
    said = answer.json()
    inner = said.get("error", said)
    return str(inner.get("message", "")) if isinstance(inner, dict) else str(inner)


# -- prompts


@functools.cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ensure_demo_model())


def tokens_of(text: str) -> list[int]:
    return [int(token) for token in _tokenizer().encode(text)]


def text_from(tokens: Sequence[int]) -> str:
    """The text of a prompt."""
    return str(_tokenizer().decode(list(tokens)))


_PEOPLE = [
    "Amara",
    "Bjorn",
    "Chiyo",
    "Dmitri",
    "Elif",
    "Farid",
    "Greta",
    "Hana",
    "Ivo",
    "Jun",
    "Katya",
    "Liam",
    "Mei",
    "Nadia",
]
_PLACES = ["harbour", "archive", "foundry", "orchard", "observatory", "depot", "mill", "clinic"]
_DOINGS = (
    "asked for two more weeks to finish the survey of the",
    "showed the new drawings of the",
    "reported that the roof of the",
    "proposed to move the budget of the",
    "wants a second opinion about the",
)
_ENDS = (
    "before the rain starts",
    "and nobody objected",
    "which the board will discuss on Friday",
    "because the supplier was late again",
    "and will send a summary to everybody",
)


def notes(seed: int, count: int) -> tuple[list[int], str]:
    """Meeting notes of exactly ``count`` tokens, and the random code that stands in every third
    item of them."""
    rng = random.Random(seed)
    where = rng.choice(_PLACES)
    code = f"{rng.randrange(1000, 9999)}-{rng.randrange(1000, 9999)}"
    text = f"Minutes of meeting {rng.randrange(100, 999)}.\n"
    found = tokens_of(text)
    item = 0
    while len(found) < count:
        item += 1
        line = f"{item}. {rng.choice(_PEOPLE)} {rng.choice(_DOINGS)} {rng.choice(_PLACES)} "
        line += f"{rng.choice(_ENDS)}."
        if item % 3 == 0:
            line += f" The access code of the {where} is {where.upper()}-{code}."
        found += tokens_of(line + "\n")
    return found[:count], code


# -- the pools


def guard_says(process: EngineProcess) -> dict[str, Any]:
    """The guard's entry in ``/server_info``."""
    [state] = json.loads(process.get("/server_info"))["internal_states"]
    return dict(state["sekisho_guard"])


def pool_of(process: EngineProcess) -> dict[str, Any]:
    """Pages of an engine: all, free, listed as free twice, kept by the prefix cache; and the
    guard's ledger where there is one."""
    [state] = json.loads(process.get("/server_info", 60.0))["internal_states"]
    return dict(state["pool"])


def adds_up(pool: Mapping[str, Any]) -> bool:
    """Nothing runs: every page is free or cached, and the ledger says the same."""
    held = pool["pages"] - pool["cached"]
    if pool["free"] != held or pool["free_twice"]:
        return False
    ledger = pool.get("ledger")
    if ledger is None:
        return True
    # Page 0, which SGLang keeps for padding, is the ledger's alone.
    kept = ledger["leased"] + ledger["sealed"]
    counted = (kept, ledger["quarantined"], ledger["free"])
    return counted == (pool["cached"], 0, held + 1)


def wait_whole(pair: SglangPair, seconds: float = 30.0) -> None:
    """Until the pools of both roles add up."""
    for process in (pair.prefill, pair.decode):
        end = time.monotonic() + seconds
        while not adds_up(pool := pool_of(process)):
            assert time.monotonic() < end, f"{process.name} does not add up: {pool}"
            time.sleep(0.25)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Until ``condition`` holds; `AssertionError` names ``what`` otherwise."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.25)
