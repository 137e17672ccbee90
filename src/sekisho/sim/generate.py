"""From a seed to a scenario."""

import random
from collections.abc import Sequence

from sekisho.sim.atlas import ATLAS, Fault, Seam
from sekisho.sim.draft import START_S, Draft, everyday, need
from sekisho.sim.scenario import Event, Scenario, Strike
from sekisho.sim.workloads import WORKLOADS

_FAULTS_A_RUN = [0, 1, 1, 1, 1, 2, 2, 3]
# Seams that are passed at every step or key are struck later than those of a whole hand-off.
_SPREAD = {Seam.STEP: 40, Seam.KEY: 12, Seam.CHUNK: 10}


def generate(seed: int, faults: Sequence[str], without: Sequence[str] = ()) -> Scenario:
    """The scenario of ``seed`` under some of ``faults``; with one fault only, under that one."""
    rng = random.Random(f"{seed}:scenario")
    count = 1 if len(faults) == 1 else rng.choice(_FAULTS_A_RUN)
    chosen = [ATLAS[name] for name in rng.sample(list(faults), min(count, len(faults)))]
    draft = everyday(rng)
    for fault in chosen:
        for name in fault.needs:
            need(draft, name)
    for fault in chosen:
        _plant(draft, fault)
    return draft.finish(seed, list(without))


def _plant(draft: Draft, fault: Fault) -> None:
    rng = draft.rng
    match fault.seam:
        case Seam.ASK:
            WORKLOADS[fault.effect](draft, fault.name)
        case Seam.EVENT:
            for _ in range(rng.randint(1, 2)):
                draft.events.append(_event(draft, fault))
        case seam:
            for _ in range(rng.randint(1, 3)):
                n = rng.randrange(_SPREAD.get(seam, 9))
                draft.strikes.append(Strike(fault.name, n, _amount(rng, fault)))


def _event(draft: Draft, fault: Fault) -> Event:
    rng = draft.rng
    roles = {"kill-keep": ["decode"], "kill": ["prefill", "prefill", "decode"]}
    role = rng.choice(roles.get(fault.effect, ["prefill", "decode"]))
    slot = f"{role}-{rng.randrange(draft.shape[role])}"
    return Event(fault.name, round(START_S + rng.uniform(0.0, 0.3), 4), slot, _amount(rng, fault))


def _amount(rng: random.Random, fault: Fault) -> float:
    low, high = fault.amount
    return round(rng.uniform(low, high), 4)
