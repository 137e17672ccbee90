"""``sekisho probe``: does one account ever see what another sent? Asked of any endpoint, over HTTP.

``sekisho probe`` alone is ``sekisho probe run``; the group is there for its other commands.
"""

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sekisho.cli.conventions import default_to, one_line

app = typer.Typer(cls=default_to("run"))


@app.callback()
def _group() -> None:
    """Two accounts, planted secrets: does one ever see what the other sent?

    Without a command: run, whose options `sekisho probe run --help` lists.
    """


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"
    SARIF = "sarif"
    GITHUB = "github"
    MARKDOWN = "markdown"
    HTML = "html"


class SizeName(StrEnum):
    QUICK = "quick"
    STANDARD = "standard"
    THOROUGH = "thorough"


Url = Annotated[str, typer.Option(metavar="URL", help="As an OpenAI client takes it, with /v1.")]
ModelName = Annotated[str, typer.Option(help="The model to ask.")]
KeyEnv = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The variable with this account's key (SEKISHO_PROBE_KEY_A and _B by default).",
    ),
]
KeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The file with this account's key.")
]
KeyItself = Annotated[str | None, typer.Option(hidden=True)]
AuthorisedBy = Annotated[
    str, typer.Option(help='"who, when": who allows it. Needed where the host is not this machine.')
]
Techniques = Annotated[list[str] | None, typer.Option(help="Only this technique; may be repeated.")]
Size_ = Annotated[SizeName, typer.Option(help="How many trials.")]
Window = Annotated[
    int | None, typer.Option(min=64, max=2**26, help="The advertised window, in tokens.")
]
LengthMax = Annotated[
    int | None, typer.Option(min=64, max=2**26, help="No prompt has more tokens.")
]
Requests = Annotated[int | None, typer.Option(min=1, max=10**7, help="Requests at most.")]
Tokens = Annotated[int | None, typer.Option(min=1, max=10**11, help="Tokens at most.")]
Concurrency = Annotated[
    int | None, typer.Option(min=1, max=256, help="Requests at once at most (8 by default).")
]
Money = Annotated[float | None, typer.Option(min=0, help="Money at most, by the two prices.")]
Price = Annotated[float | None, typer.Option(min=0, help="Money for a million tokens.")]
Timeout = Annotated[float, typer.Option(min=1, max=3600, help="Seconds, a request.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would cost; send nothing.")]
StopAtFirst = Annotated[
    bool, typer.Option("--stop-at-first", help="End at the first certain finding.")
]
SelfTest = Annotated[
    bool, typer.Option("--self-test", help="First run the controls; alone without --base-url.")
]
RunFolder = Annotated[
    Path | None, typer.Option(help="Keep the run in this folder (sekisho-probe-TIME by default).")
]
Resume = Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**63 - 1, help="Of everything but the secrets.")
]
Format_ = Annotated[Format, typer.Option("--format", help="Of the result.")]
Written = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
RunPath = Annotated[Path, typer.Argument(help="The folder of a run.")]


@app.command()
def run(
    context: typer.Context,
    *,
    base_url: Url = "",
    model: ModelName = "",
    key_a: KeyItself = None,
    key_b: KeyItself = None,
    key_a_env: KeyEnv = "",
    key_b_env: KeyEnv = "",
    key_a_file: KeyFile = None,
    key_b_file: KeyFile = None,
    authorised_by: AuthorisedBy = "",
    technique: Techniques = None,
    size: Size_ = SizeName.STANDARD,
    window: Window = None,
    length_max: LengthMax = None,
    requests_max: Requests = None,
    tokens_max: Tokens = None,
    concurrency: Concurrency = None,
    money_max: Money = None,
    price_prompt: Price = None,
    price_answer: Price = None,
    timeout: Timeout = 120.0,
    dry_run: DryRun = False,
    stop_at_first: StopAtFirst = False,
    self_test: SelfTest = False,
    run_folder: RunFolder = None,
    resume: Resume = None,
    seed: Seed = None,
    output_format: Format_ = Format.TEXT,
    output: Written = None,
) -> None:
    """Plant secrets with one account, ask with the other, and say what was seen.

    Exit code 0: no leak seen; 1: a finding; 2: it could not run; 3: inconclusive.
    """
    with _errors():
        from sekisho.cli import probe_run as own

        own.refuse_keys(key_a, key_b)
        shown = own.Shown(output_format.value, output)
        keys = own.Keys(key_a_env, key_a_file, key_b_env, key_b_file)
        if resume is not None:
            _refuse_all_but(context, own.RESUME_TAKES)
            raise typer.Exit(own.resumed(resume, keys, shown))
        names = tuple(technique or ())
        if self_test and not base_url:
            _refuse_all_but(context, own.SELF_TEST_TAKES)
            raise typer.Exit(own.only_self_test(names))
        limits = requests_max, tokens_max, concurrency
        money = money_max, price_prompt, price_answer
        planned = own.planned(
            base_url,
            model,
            keys,
            seed=secrets.randbits(63) if seed is None else seed,
            techniques=names,
            size=size.value,
            window=window,
            length_max=length_max,
            budget=own.budget(size.value, limits, money),
            timeout_s=timeout,
            stop_at_first=stop_at_first,
            self_test=self_test,
            authorised_by=authorised_by,
            is_sent=not dry_run,
        )
        if dry_run:
            raise typer.Exit(own.told_costs(planned))
        raise typer.Exit(own.new(planned, keys, run_folder, shown))


@app.command()
def replay(
    folder: RunPath,
    *,
    key_a_env: KeyEnv = "",
    key_b_env: KeyEnv = "",
    key_a_file: KeyFile = None,
    key_b_file: KeyFile = None,
    authorised_by: AuthorisedBy = "",
    run_folder: RunFolder = None,
    output_format: Format_ = Format.TEXT,
    output: Written = None,
) -> None:
    """Do a run again: the same plan and seed, in a new folder, with secrets that are new.

    A secret is never planted twice, or a late leak of the first run would be one of the second.
    """
    with _errors():
        from sekisho.cli import probe_run as own

        keys = own.Keys(key_a_env, key_a_file, key_b_env, key_b_file)
        planned = own.planned_again(folder, keys, authorised_by)
        shown = own.Shown(output_format.value, output)
        raise typer.Exit(own.new(planned, keys, run_folder, shown))


@app.command()
def report(
    folder: RunPath, *, output_format: Format_ = Format.TEXT, output: Written = None
) -> None:
    """Write the result of a run once more, in any format; of one that has not ended, what there is.

    The exit code is that of the run.
    """
    with _errors():
        from sekisho.cli import probe_run as own

        raise typer.Exit(own.told(folder, own.Shown(output_format.value, output)))


def _refuse_all_but(context: typer.Context, names: frozenset[str]) -> None:
    """An option that has no effect here is an error, as it would be missed."""
    from sekisho.probe.plan import PlanError

    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in names:
            flag = name.removeprefix("output_") if name == "output_format" else name
            raise PlanError(f"--{flag.replace('_', '-')} has no effect here: leave it out")


@contextmanager
def _errors() -> Iterator[None]:
    """What the user can mend becomes one line and exit code 2."""
    try:
        from sekisho.cli.probe_run import MENDABLE
    except ModuleNotFoundError as error:
        print(f"sekisho: {error.name} is missing: pip install 'sekisho[probe]'", file=sys.stderr)
        raise typer.Exit(2) from None
    with one_line(*MENDABLE):
        yield
