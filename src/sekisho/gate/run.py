"""One run: read every engine at once, collect the claims, judge."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from sekisho.gate.claims import Catalogue, claims_of, load_catalogue
from sekisho.gate.fetch import BODY_MAX, Client, Key, parse_url
from sekisho.gate.judge import judge, utc_now
from sekisho.gate.model import (
    Claim,
    ClaimError,
    Engine,
    Finding,
    ReadError,
    Reading,
    Result,
    Role,
    Unread,
)
from sekisho.gate.policy import MARGIN, Policy, Waiver
from sekisho.gate.readers import sglang, vllm
from sekisho.gate.readers.base import Ask, Get, models, tokens
from sekisho.gate.readers.detect import read
from sekisho.gate.rules import RULES

TIMEOUT_S = 10.0
"""For one engine, over all of its answers."""
TARGETS_MAX = 10_000
_KEY_FILE_MAX = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Something to read. ``what``: an engine, a gateway (for its claim), or a file of metrics.

    ``model``: the name it is judged under; empty: what it states itself.
    """

    source: str
    what: Literal["engine", "gateway", "file"] = "engine"
    role: Role | None = None
    kind: Engine | None = None
    model: str = ""
    key: Key | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything a run needs; can be run again (``--watch``).

    ``everywhere``: claims from the command line, about every model that is named or found where
    their own ``model`` is empty.
    """

    targets: Sequence[Target]
    claims: Sequence[Claim] = field(default=())
    everywhere: Sequence[Claim] = field(default=())
    margin: float = MARGIN
    margin_is_required: bool = False
    waivers: Sequence[Waiver] = field(default=())
    timeout_s: float = TIMEOUT_S


def plan_of(path: Path, environ: Mapping[str, str]) -> Plan:
    """The plan of a catalogue file.

    Raises:
        ClaimError: it cannot be used, or a key is not where it says.
    """
    catalogue: Catalogue = load_catalogue(path)
    targets: list[Target] = []
    claims: list[Claim] = []
    for entry in catalogue.models:
        claims += claims_of(entry, path)
        if entry.gateway is not None:
            address = entry.gateway
            targets.append(
                Target(
                    source=parse_url(address.url),
                    what="gateway",
                    model=entry.name,
                    key=read_key(address.key_env, address.key_file, environ, path.parent),
                )
            )
        for engine in entry.engines:
            targets.append(
                Target(
                    source=(
                        parse_url(engine.url)
                        if engine.url
                        else str(path.parent / engine.metrics_file)
                    ),
                    what="engine" if engine.url else "file",
                    role=engine.role,
                    kind=engine.kind,
                    model=entry.name,
                    key=read_key(engine.key_env, engine.key_file, environ, path.parent),
                )
            )
    return Plan(
        targets=targets,
        claims=claims,
        margin=MARGIN if catalogue.margin is None else catalogue.margin,
        margin_is_required=catalogue.margin_is_required,
        waivers=catalogue.waivers,
    )


def read_key(name: str, file: str, environ: Mapping[str, str], folder: Path) -> Key | None:
    """The key in the variable ``name`` or in ``file``; None where neither is given.

    Raises:
        ClaimError: it is not there, or cannot be sent in a header. The value is not shown.
    """
    if not name and not file:
        return None
    if name:
        place, value = f"the variable {name}", environ.get(name, "")
    else:
        place = str(folder / file)
        try:
            with (folder / file).open("rb") as opened:
                value = opened.read(_KEY_FILE_MAX).decode("ascii", "replace").strip()
        except OSError as error:
            raise ClaimError(f"{place}: {error.strerror}") from None
    if not value:
        raise ClaimError(f"{place} holds no key")
    if not (value.isascii() and value.isprintable()):
        raise ClaimError(f"{place} holds characters that no header can carry")
    return Key(value)


def check(plan: Plan) -> Result:
    """Run once.

    Raises:
        GateError: the plan cannot be run at all.
    """
    return asyncio.run(check_async(plan))


async def check_async(plan: Plan) -> Result:
    """`check`, within a running loop.

    Raises:
        ClaimError: nothing to read, or more than `TARGETS_MAX`, or a margin that is none.
    """
    if not 1 <= len(plan.targets) <= TARGETS_MAX:
        raise ClaimError(f"{len(plan.targets)} engines to read, 1 to {TARGETS_MAX} wanted")
    if not 0 <= plan.margin <= 1e6:
        raise ClaimError("margin is none: want a number of windows, 0 or more")
    async with Client() as client:
        told = await asyncio.gather(*(_one(client, t, plan.timeout_s) for t in plan.targets))
    readings = [r for one in told if isinstance(one, list) for r in one]
    claims = [*plan.claims, *(c for c in told if isinstance(c, Claim))]
    names = dict.fromkeys(
        name for name in (*(c.model for c in claims), *(r.model for r in readings)) if name
    )
    for claim in plan.everywhere:
        about = [claim.model] if claim.model else list(names)
        claims += [msgspec.structs.replace(claim, model=name) for name in about]
    policy = Policy(
        now=utc_now(),
        margin=plan.margin,
        margin_is_required=plan.margin_is_required,
        waivers=plan.waivers,
    )
    contradicted = [
        found
        for target, one in zip(plan.targets, told, strict=True)
        if isinstance(one, list) and (found := _contradiction(target, one))
    ]
    unread = [u for u in told if isinstance(u, Unread)]
    return judge(readings, unread, claims, policy, contradicted)


async def _one(client: Client, target: Target, timeout_s: float) -> list[Reading] | Claim | Unread:
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            told = await _read(client, target)
        if isinstance(told, Claim):
            return told
        seconds = round(time.monotonic() - began, 4)
        return [_named(target, reading, seconds) for reading in told]
    except TimeoutError:
        reason, inconclusive = f"no whole answer within {timeout_s:g} s", True
    except ReadError as error:
        reason, inconclusive = str(error), error.inconclusive
    return Unread(
        source=target.source,
        reason=reason,
        inconclusive=inconclusive,
        model=target.model,
        role=target.role or "",
    )


def _named(target: Target, reading: Reading, seconds: float) -> Reading:
    name = target.model or reading.model
    if not name:
        raise ReadError("it states no model: name it in a catalogue or by --model")
    return msgspec.structs.replace(reading, model=name, seconds=seconds)


async def _read(client: Client, target: Target) -> list[Reading] | Claim:
    if target.what == "file":
        return [_read_file(target)]
    ask = Ask(target.source, _getter(client, target), target.role)
    if target.what == "gateway":
        return await _gateway(ask, target.model)
    return await read(ask, target.kind)


def _getter(client: Client, target: Target) -> Get:
    """Asks for each path once: telling the engine and reading it want the same answer."""
    asked: dict[str, asyncio.Task[bytes]] = {}

    async def get(path: str) -> bytes:
        if path not in asked:
            work = client.get(target.source, path, target.key)
            asked[path] = asyncio.create_task(work)
        return await asked[path]

    return get


async def _gateway(ask: Ask, model: str) -> Claim:
    listed = await models(ask.get)
    found = next((e for e in listed if e.id == model), listed[0] if len(listed) == 1 else None)
    if found is None:
        raise ReadError("/v1/models does not list this model")
    window = found.window()
    if window is None:
        raise ReadError("/v1/models states no window")
    where = f"{ask.source}/v1/models"
    return Claim(model=model, window=tokens(window, "the window of /v1/models"), source=where)


def _read_file(target: Target) -> Reading:
    try:
        with Path(target.source).open("rb") as file:
            body = file.read(BODY_MAX + 1)
    except OSError as error:
        raise ReadError(f"the file cannot be read: {error.strerror}") from None
    if len(body) > BODY_MAX:
        raise ReadError(f"the file is larger than {BODY_MAX >> 20} MiB")
    ask = Ask(target.source, _no_network, target.role)
    is_sglang = target.kind == "sglang" or (target.kind is None and b"\nsglang:" in body)
    return sglang.read_file(ask, body) if is_sglang else vllm.read_file(ask, body)


async def _no_network(path: str) -> bytes:
    raise ReadError(f"{path}: a file has no other paths")


def _contradiction(target: Target, readings: list[Reading]) -> Finding | None:
    role = readings[0].role if len(readings) == 1 else "both"
    if target.role is None or target.role == role:
        return None
    return Finding(
        rule="GATE012",
        severity=RULES["GATE012"].default_severity,
        model=readings[0].model,
        source=readings[0].source,
        message=f"named as {target.role}, but it states that it is {role}",
    )
