"""``sekisho sim``: the simulated cluster under every fault of the catalogue."""

import datetime
import itertools
import json
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sekisho.cli.progress import clear, progress

if TYPE_CHECKING:
    from sekisho.sim.campaign import Plan, Tally
    from sekisho.sim.known_answers import Known
    from sekisho.sim.scenario import Failure

app = typer.Typer(
    help="Run the real node code as a simulated cluster under seeded faults.",
    invoke_without_command=True,
)

_TOLD_EVERY_S = 20.0
_MANY = 2000  # seeds after which every fault should have been drawn and injected

_Names = Annotated[str, typer.Option(help="Names, separated by commas; all by default.")]


@app.callback()
def sim(
    context: typer.Context,
    *,
    seed: Annotated[int | None, typer.Option(min=0, help="First seed, or the only one.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Stop after this long.")] = None,
    faults: _Names = "",
    without: Annotated[str, typer.Option(help="Defences to take away, by name.")] = "",
    summary: Annotated[Path | None, typer.Option(help="Append a line of JSON here.")] = None,
) -> None:
    """Without --seeds, --seed or --minutes it runs until it is stopped.

    Exit code 1: a finding, which is shrunk and saved for `sekisho sim replay`; 3: a fault was never
    injected in a run of thousands of seeds.
    """
    if context.invoked_subcommand is not None:
        return
    from sekisho.sim import campaign as c

    plan = c.Plan(_named(faults, "faults") or _all("faults"), _named(without, "without"))
    count = 1 if seed is not None and seeds is None and minutes is None else seeds
    first = seed
    if first is None:
        first = 0 if count is not None else secrets.randbelow(2**40)
    print(f"seeds from {first}, {len(plan.faults)} fault(s) to draw from", flush=True)
    began = time.monotonic()
    numbers = itertools.count(first) if count is None else iter(range(first, first + count))
    total, say = c.Tally(), progress(_TOLD_EVERY_S)
    of = "" if count is None else f" of {count}"
    try:
        c.campaign(
            plan,
            numbers,
            total,
            until=None if minutes is None else began + 60 * minutes,
            cores=c.core_count(),
            progress=lambda: say(_line(total, of, time.monotonic() - began)),
        )
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    silent = _report(plan, total, time.monotonic() - began, summary)
    if total.failed is None and silent and total.seeds >= _MANY:
        raise typer.Exit(3)
    raise typer.Exit(0 if total.failed is None else 1)


@app.command()
def replay(file: Annotated[Path, typer.Argument(help="A run that `sekisho sim` saved.")]) -> None:
    """Run a saved failure again and print all that happens. Exit code 1 if it fails again."""
    from sekisho.sim.run import run
    from sekisho.sim.shrink import TraceError, load

    _quiet()
    try:
        saved = load(file)
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None
    print(f"saved by version {saved.version}: {saved.failure.checker}: {saved.failure.message}")
    result = run(saved.scenario, print)
    if result.failure is None:
        print("it does not fail any more")
        return
    print(f"{result.failure.checker}: {result.failure.message}\nrun {result.digest}")
    raise typer.Exit(1)


@app.command("known-answers")
def known_answers(
    *,
    without: Annotated[str, typer.Option(help="Defences, by name; all by default.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds to try for each.")] = 400,
) -> None:
    """Take each defence away and show who notices. Exit code 1 if nobody does."""
    from sekisho.sim.known_answers import known_answers as search

    _quiet()
    names = _named(without, "without") or _all("without")
    answers = search(names, seeds, _tell_known)
    missing = [known.defence.name for known in answers if known.failure is None]
    broken = [known.defence.name for known in answers if known.with_it is not None]
    if missing:
        print(f"nobody noticed the absence of: {', '.join(missing)}")
    if broken:
        print(f"fails with the defence in place too: {', '.join(broken)}")
    raise typer.Exit(1 if missing or broken else 0)


@app.command()
def atlas() -> None:
    """Print docs/faults.md: every fault, its report, where it comes in, and what stops it."""
    from sekisho.sim.tables import faults_document

    print(faults_document(), end="")


def _tell_known(known: "Known") -> None:
    name = f"without {known.defence.name:16}"
    if known.failure is None:
        print(f"{name} NOT NOTICED in {known.seed} seeds", flush=True)
        return
    found = f"{known.failure.checker}: {known.failure.message}"
    print(f"{name} seed {known.seed:3} {known.fault:22} {found}", flush=True)


def _all(option: str) -> tuple[str, ...]:
    from sekisho.sim.atlas import ATLAS
    from sekisho.sim.defences import DEFENCES

    return tuple(ATLAS if option == "faults" else DEFENCES)


def _named(text: str, option: str) -> tuple[str, ...]:
    """The names in ``text``, each known."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    known = _all(option)
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(known)}", param_hint=f"--{option}"
            )
    return names


def _line(tally: "Tally", of: str, seconds: float) -> str:
    speed = tally.handoffs / max(tally.core_seconds, 1e-9)
    return (
        f"{tally.seeds}{of} seeds, {tally.handoffs} hand-offs, {speed:.0f} a second and core, "
        f"{len(tally.fired)} faults fired, {seconds:.0f} s"
    )


def _report(plan: "Plan", total: "Tally", seconds: float, summary: Path | None) -> list[str]:
    """Print the table; return the faults that never fired."""
    from sekisho.sim.tables import campaign_table

    clear()
    print("\n".join(campaign_table(total, plan.faults)))
    silent = [name for name in plan.faults if not total.fired[name]]
    per_hour = total.seeds / max(seconds, 1e-9) * 3600
    print(
        f"\n{total.seeds} seeds, {total.requests} requests, {total.handoffs} hand-offs in "
        f"{seconds:.0f} s: {per_hour:.0f} seeds an hour, "
        f"{total.handoffs / max(total.core_seconds, 1e-9):.0f} hand-offs a second and core"
    )
    if silent:
        print(f"never fired: {', '.join(silent)}")
    if total.failed is not None:
        _save(plan, *total.failed)
    if summary is not None:
        line = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seeds": total.seeds,
            "handoffs": total.handoffs,
            "seconds": round(seconds),
            "seeds_per_hour": round(per_hour),
            "failed_seed": None if total.failed is None else total.failed[0],
        }
        with summary.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return silent


def _save(plan: "Plan", seed: int, failure: "Failure") -> None:
    """Shrink a failed run and keep it."""
    from importlib.metadata import version

    from sekisho.sim.generate import generate
    from sekisho.sim.run import run
    from sekisho.sim.shrink import save, shrink, size_of

    _quiet()
    print(f"\nseed {seed}: {failure.checker}: {failure.message}")
    whole = generate(seed, plan.faults, plan.without)
    small = shrink(whole, failure.checker)
    found = run(small).failure or failure
    path = Path(f"sim-{seed}.json")
    save(small, found, size_of(whole), version("sekisho"), path)
    print(f"shrunk from {size_of(whole)} to {size_of(small)} asks, strikes and events")
    print(f"sekisho sim replay {path}")


def _quiet() -> None:
    import logging

    logging.disable(logging.CRITICAL)  # the roster logs each injected death
