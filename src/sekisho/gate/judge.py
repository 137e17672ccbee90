"""The judging: pure functions from what was read and claimed to a `Result`.

The arithmetic, for a model with an advertised ``window`` and ``output`` tokens on top of it:

    held by a rank    = (pool - reserved) rounded down to pages, at most its sequence limit
    window of a rank  = held (on decode: less output), at most its prompt limit
    servable          = the smallest window over roles, replicas and ranks

A prompt limit below the window is a shortfall like any other: a prompt in between is within what is
advertised and is refused inside the engine, which is where the over-long path of sglang#30233
begins. Two things replace the window in that one comparison: a stated ``prompt`` (refused in front
of the engine when longer), and, where nobody but the engine states the window, its context less the
answer's least part, as that is what its limit of a prompt is made of. Pools and sequence limits are
never compared with less than the window.
"""

import datetime
import math
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import NamedTuple

from sekisho.gate.model import (
    Capacity,
    Claim,
    Finding,
    Rank,
    Reading,
    Result,
    Role,
    Severity,
    Unread,
)
from sekisho.gate.policy import Policy
from sekisho.gate.rules import RULES
from sekisho.gate.versions import faults_of

_SHOWN = 4  # sources named in one message


class Need(NamedTuple):
    """What the claims of one model ask for, together, in tokens. ``prompt`` 0: the window, or
    more."""

    window: int
    output: int
    prompt: int


def judge(
    readings: Sequence[Reading],
    unread: Sequence[Unread],
    claims: Sequence[Claim],
    policy: Policy,
    already: Iterable[Finding] = (),
) -> Result:
    """Judge everything that was read. ``already``: findings from before (a contradicted role).

    An engine's own ``advertised`` is a claim too.
    """
    every = [*claims, *(_own_claim(r) for r in readings if r.advertised is not None)]
    findings = [*already, *(_unread(u) for u in unread)]
    capacities: list[Capacity] = []
    advertised: dict[str, int] = {}
    servable: dict[str, int] = {}
    for model in _names(readings, unread, every):
        mine = [r for r in readings if r.model == model]
        claimed = [c for c in every if c.model == model]
        absent = [u for u in unread if u.model == model]
        need = need_of(claimed)
        decided = capacities_of(model, mine, need)
        capacities += decided
        missing = _missing_roles({c.role for c in decided})
        if need.window:
            advertised[model] = need.window
        if decided and not missing:
            servable[model] = min(c.servable for c in decided)
        findings += _claim_findings(model, claimed, mine)
        findings += _shortfalls(model, mine, need)
        findings += _role_findings(model, mine, missing, absent)
        findings += _margin(model, mine, need, policy)
        findings += [f for reading in mine for f in faults_of(reading)]
        findings += _shared_prefixes(model, mine)
    return Result(
        version=version("sekisho"),
        created=policy.now.isoformat(timespec="seconds"),
        claims=every,
        readings=list(readings),
        unread=list(unread),
        capacities=capacities,
        advertised=advertised,
        servable=servable,
        findings=policy.waive(findings),
    )


def need_of(claims: Sequence[Claim]) -> Need:
    """The largest window, and output such that the largest sum of both is covered."""
    window = max((c.window for c in claims), default=0)
    total = max((c.window + c.output_tokens for c in claims), default=0)
    stated = [c.prompt_max for c in claims if c.prompt_max and not c.own]
    # Whoever knows what is in front of the engine knows it for every claim.
    prompt = max(stated or (c.prompt_max or c.window for c in claims), default=0)
    return Need(window, total - window, prompt if stated or prompt < window else 0)


def window_of(rank: Rank, role: Role, need: Need) -> tuple[int, str]:
    """The longest request, as a window, that ``rank`` holds; and which number decides it."""
    output = 0 if role == "prefill" else need.output
    pages = max(0, rank.pool_tokens - rank.reserved_tokens) // rank.page_size
    less = f", less {output} of output" if output else ""
    kept = f" less {rank.reserved_tokens} reserved" if rank.reserved_tokens else ""
    limits = [
        (
            pages * rank.page_size - output,
            f"the pool of {rank.pool_tokens}{kept}, in pages of {rank.page_size}{less}",
        )
    ]
    if rank.sequence_max is not None:
        limits.append((rank.sequence_max - output, f"the limit of a sequence{less}"))
    if rank.request_max is not None and (not need.prompt or rank.request_max < need.prompt):
        pool = f"beside a pool of {rank.pool_tokens}"
        limits.append((rank.request_max, f"the engine's limit of a prompt, {pool}"))
    servable, because = min(limits, key=lambda limit: limit[0])
    return max(0, servable), because


def capacities_of(model: str, readings: Sequence[Reading], need: Need) -> list[Capacity]:
    """The deciding rank of each role, over all replicas."""
    smallest: dict[Role, Capacity] = {}
    for reading in readings:
        found = _smallest(model, reading, need)
        known = smallest.get(reading.role)
        if known is None or found.servable < known.servable:
            smallest[reading.role] = found
    return [smallest[role] for role in ("prefill", "decode", "both") if role in smallest]


def _smallest(model: str, reading: Reading, need: Need) -> Capacity:
    decided = [(*window_of(rank, reading.role, need), rank.name) for rank in reading.ranks]
    nothing = (0, "no rank was read", "")
    servable, because, rank = min(decided, key=lambda one: one[0], default=nothing)
    return Capacity(
        model=model,
        role=reading.role,
        source=reading.source,
        rank=rank,
        servable=servable,
        because=because,
    )


def _shortfalls(model: str, readings: Sequence[Reading], need: Need) -> Iterable[Finding]:
    """One finding an engine, about its smallest rank."""
    for reading in readings:
        held = _smallest(model, reading, need)
        if held.servable >= need.window:
            continue
        plain = f"{held.role} holds {held.servable} tokens, {need.window} are advertised"
        detail = f"{held.rank}: {held.because}"
        fix = ""
        if all(
            window_of(r, reading.role, need._replace(prompt=1))[0] >= need.window
            for r in reading.ranks
        ):
            fix = (
                f"; the pool would hold it: advertise {held.servable}, or state as prompt what "
                "the gateway in front lets through"
            )
        yield _finding(
            "GATE001",
            model,
            reading.source,
            f"{plain} ({detail}){fix}",
            observed=held.servable,
            required=need.window,
        )


def _missing_roles(present: set[Role]) -> list[Role]:
    if "both" in present:
        return []
    split: tuple[Role, Role] = ("prefill", "decode")
    return [role for role in split if role not in present]


def _role_findings(
    model: str, readings: Sequence[Reading], missing: Sequence[Role], absent: Sequence[Unread]
) -> Iterable[Finding]:
    hidden = {u.role for u in absent}
    for role in missing:
        # An engine that did not answer may be the missing one; GATE003 speaks of it.
        if role not in hidden and "" not in hidden and "both" not in hidden:
            message = f"no {role} engine: nothing is known of what this role can hold"
            yield _finding("GATE002", model, "", message)
    limits: dict[Role, int] = {}
    for reading in readings:
        # Sekisho's gateway refuses at the smaller length, before either role is asked.
        for rank in reading.ranks if reading.engine != "sekisho" else ():
            stated = [n for n in (rank.request_max, rank.sequence_max) if n is not None]
            if stated:
                limits[reading.role] = min(*stated, limits.get(reading.role, stated[0]))
    if "prefill" in limits and "decode" in limits and limits["prefill"] != limits["decode"]:
        low, high = sorted((limits["prefill"], limits["decode"]))
        message = (
            f"prefill refuses above {limits['prefill']} tokens, decode above {limits['decode']}"
        )
        yield _finding("GATE005", model, "", message, observed=low, required=high)


def _margin(
    model: str, readings: Sequence[Reading], need: Need, policy: Policy
) -> Iterable[Finding]:
    pools = [(rank.pool_tokens, r, rank) for r in readings for rank in r.ranks]
    if not pools or not need.window:
        return
    pool, reading, rank = min(pools, key=lambda one: one[0])
    wanted = math.ceil(policy.margin * need.window)
    if need.window <= pool < wanted:  # below the window, GATE001 says it
        severity = Severity.ERROR if policy.margin_is_required else Severity.WARNING
        message = (
            f"{reading.role} {rank.name}: the pool of {pool} tokens is {pool / need.window:.2f} "
            f"windows of {need.window}, {policy.margin:g} are wanted"
        )
        yield _finding(
            "GATE004", model, reading.source, message, severity, observed=pool, required=wanted
        )


def _claim_findings(
    model: str, claims: Sequence[Claim], readings: Sequence[Reading]
) -> Iterable[Finding]:
    if not claims and readings:
        message = "no window is advertised: give it in a catalogue or by --advertised"
        yield _finding("GATE011", model, readings[0].source, message)
    by_window: dict[int, list[str]] = {}
    for claim in claims:
        by_window.setdefault(claim.window, []).append(claim.source)
    if len(by_window) > 1:
        stated = "; ".join(
            f"{window} by {_several(sources)}" for window, sources in sorted(by_window.items())
        )
        low, high = min(by_window), max(by_window)
        message = f"windows differ: {stated}; {high} is judged"
        yield _finding("GATE006", model, by_window[high][0], message, observed=low, required=high)


def _shared_prefixes(model: str, readings: Sequence[Reading]) -> Iterable[Finding]:
    shared = [r.source for r in readings if r.prefix_scope == "shared"]
    if shared:
        message = (
            f"one prefix cache for everybody on {_several(shared)}: "
            "a salt that a client chooses is no boundary"
        )
        yield _finding("GATE008", model, shared[0], message, report="vllm#53347")


def _unread(unread: Unread) -> Finding:
    return _finding("GATE003", unread.model, unread.source, unread.reason)


def _own_claim(reading: Reading) -> Claim:
    window = reading.advertised or 0
    return Claim(
        model=reading.model,
        window=window,
        source=f"{reading.source}/v1/models",
        prompt_max=max(1, window - reading.answer_min),
        own=True,
    )


def _names(
    readings: Sequence[Reading], unread: Sequence[Unread], claims: Sequence[Claim]
) -> list[str]:
    """Every model that anything is known of, in order of appearance. An engine whose model is not
    known is judged all the same, under the empty name."""
    names = [*(c.model for c in claims), *(r.model for r in readings)]
    names += [u.model for u in unread if u.model]
    return list(dict.fromkeys(names))


def _several(sources: Sequence[str]) -> str:
    shown = ", ".join(sources[:_SHOWN])
    rest = len(sources) - _SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _finding(
    rule: str,
    model: str,
    source: str,
    message: str,
    severity: Severity | None = None,
    *,
    observed: int | None = None,
    required: int | None = None,
    report: str = "",
) -> Finding:
    return Finding(
        rule=rule,
        severity=severity or RULES[rule].default_severity,
        model=model,
        source=source,
        message=message,
        observed=observed,
        required=required,
        report=report,
    )


def utc_now() -> datetime.datetime:
    """The time that a run is judged at."""
    return datetime.datetime.now(datetime.UTC)
