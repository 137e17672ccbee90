"""What strikes do outside the transport: to messages, block tables, source pages and cache keys."""

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sekisho.core.handoff import AbortOffer, Answer, Complete, Offer
from sekisho.core.table import BlockTable
from sekisho.engine.batch import Batch
from sekisho.sim.atlas import Seam
from sekisho.sim.model import PAGE_SIZE, VOCABULARY
from sekisho.sim.process import Process
from sekisho.sim.transport import Write
from sekisho.sim.write_faults import Skip
from sekisho.sim.write_faults import apply as apply_to_write

if TYPE_CHECKING:
    from sekisho.sim.cluster import Cluster

_AGAIN_S = 0.02


def write(cluster: "Cluster", leaving: Write, previous: Write | None) -> Write | None:
    """A transfer is about to leave; returns a second one that follows it."""
    struck = cluster.strikes.take(Seam.WRITE)
    if struck is None:
        return None
    fault, strike = struck
    result = apply_to_write(fault.effect, leaving, strike.amount, previous)
    if isinstance(result, Skip):
        cluster.strikes.postpone(Seam.WRITE, strike)
        return None
    request = cluster.judges.request_of(leaving.lease)
    cluster.strikes.fire(fault.name, request)
    if fault.effect == "late":
        cluster.judges.late(leaving)
    return result


def to_prefill(
    cluster: "Cluster", message: Offer | AbortOffer
) -> list[tuple[Offer | AbortOffer, float]]:
    """What really goes to prefill instead of ``message``, and how much later than usual."""
    plain: list[tuple[Offer | AbortOffer, float]] = [(message, 0.0)]
    struck = cluster.strikes.take(Seam.OFFER)
    if struck is None:
        return plain
    fault, strike = struck
    changed = plain
    match message:
        case AbortOffer() if fault.effect == "abort-late":
            changed = [(message, strike.amount)]
        case Offer() if fault.effect == "repeat":
            changed = [(message, 0.0), (message, 0.0)]
        case Offer() if fault.effect == "flip":
            tokens = list(message.tokens)
            tokens[len(tokens) // 2] = (tokens[len(tokens) // 2] + 1) % VOCABULARY
            changed = [(replace(message, tokens=tokens), 0.0)]
        case Offer() if fault.effect == "scope":
            changed = [(replace(message, scope=f"{message.scope}-other"), 0.0)]
        case Offer() if fault.effect == "skip" and len(message.pages) > 1:
            part = replace(
                message, first_ordinal=message.first_ordinal + 1, pages=message.pages[1:]
            )
            changed = [(part, 0.0)]
    if changed is plain:
        cluster.strikes.postpone(Seam.OFFER, strike)
    else:
        cluster.strikes.fire(fault.name, cluster.judges.request_of(message.lease))
    return changed


def to_decode(
    cluster: "Cluster", process: Process, peer: str, answer: Answer
) -> list[tuple[Answer, float]]:
    """What really goes to decode instead of ``answer``; a repetition comes by itself."""
    plain = [(answer, 0.0)]
    struck = cluster.strikes.take(Seam.ANSWER)
    if struck is None:
        return plain
    fault, strike = struck
    request = cluster.judges.request_of(answer.lease)
    if fault.effect == "repeat":
        cluster.strikes.fire(fault.name, request)
        cluster.clock.after(
            _AGAIN_S + strike.amount,
            lambda: cluster.at_decode(process.name, peer, answer),
        )
        return plain
    other = cluster.other_lease(process, peer, answer.lease)
    if other is None or not isinstance(answer, Complete):
        cluster.strikes.postpone(Seam.ANSWER, strike)
        return plain
    cluster.strikes.fire(fault.name, cluster.judges.request_of(other))
    return [(replace(answer, lease=other), 0.0), (answer, _AGAIN_S)]


def step(cluster: "Cluster", process: Process, batch: Batch) -> None:
    """A decode step is about to run: its block tables may be changed in place."""
    if process.role != "decode":
        return
    struck = cluster.strikes.take(Seam.STEP)
    if struck is None:
        return
    fault, strike = struck
    rng = random.Random(f"{cluster.seed}:{fault.name}:{strike.n}")
    row = rng.randrange(len(batch.tables))
    counts = batch.positions[batch.sequence_starts[1:] - 1] // PAGE_SIZE + 1
    victim = process.pages.writer_of(int(batch.tables[row, counts[row] - 1])).request
    if _change_table(fault.effect, batch, counts.tolist(), row, process, rng):
        cluster.strikes.fire(fault.name, victim)
    else:
        cluster.strikes.postpone(Seam.STEP, strike)


def _change_table(
    effect: str, batch: Batch, counts: list[int], row: int, process: Process, rng: random.Random
) -> bool:
    tables = batch.tables
    own = tables[row, : counts[row]].tolist()
    others = [i for i in range(len(tables)) if i != row]
    at = rng.randrange(counts[row])
    if effect == "row-swap":
        other = next((i for i in others if counts[i] == counts[row]), None)
        if other is None or tables[other, : counts[other]].tolist() == own:
            return False
        tables[[row, other]] = tables[[other, row]]
        return True
    if effect == "row-alias":
        pages = [int(p) for i in others for p in tables[i, : counts[i]] if int(p) not in own]
        if not pages:
            return False
        tables[row, at] = rng.choice(pages)
        return True
    page = 0 if effect == "row-zero" else rng.randrange(process.memory.page_count)
    if page in own:
        return False
    tables[row, at] = page
    return True


def source(cluster: "Cluster", process: Process, table: BlockTable) -> None:
    """A prefill node is about to send pages of ``table``: somebody writes one of them."""
    if process.role != "prefill" or not len(table.pages):
        return
    struck = cluster.strikes.take(Seam.CHUNK)
    if struck is None:
        return
    fault, strike = struck
    page = int(table.pages[0])
    # One that is being sent already was compared, and then only its digest (strict) can tell.
    if process.memory.open_reads[page]:
        cluster.strikes.postpone(Seam.CHUNK, strike)
        return
    process.memory.words[page, 1:3] ^= np.uint64(2**64 - 1)
    process.memory.slots[page] = process.memory.slots[page - 1]
    cluster.strikes.fire(fault.name, table.request)


def key_scope(cluster: "Cluster", process: Process, scope: str) -> str:
    """The tenant that goes into a cache key; a node that forgot it leaves it out for good."""
    struck = cluster.strikes.take(Seam.KEY)
    if struck is not None:
        fault, _ = struck
        cluster.forgetful = ["decode"] if fault.effect == "forget-decode" else ["decode", "prefill"]
        cluster.strikes.fire(fault.name)
    return "" if process.role in cluster.forgetful else scope
