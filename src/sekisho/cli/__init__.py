"""The command line: one module a verb. Imports nothing heavy before a verb runs."""

import sys
from collections.abc import Sequence

import typer

from sekisho.cli import config, gate, gate_plan, lab, probe, serve, sim
from sekisho.config import ConfigError

app = typer.Typer(
    name="sekisho",
    help="Multi-tenant LLM inference in which every KV-cache page has an owner.",
    add_completion=False,
    rich_markup_mode=None,
    # A pretty traceback can print local variables, and those can be prompts and keys.
    pretty_exceptions_enable=False,
)
app.command()(serve.serve)
app.add_typer(config.app, name="config")
gate.app.command()(gate_plan.plan)
app.add_typer(gate.app, name="gate")
app.add_typer(lab.app, name="lab")
app.add_typer(probe.app, name="probe")
app.add_typer(sim.app, name="sim")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv`` by default) and return the exit code.

    2 means it could not run: a usage or configuration error, told in one line on stderr.
    """
    try:
        code = app(args=arguments, standalone_mode=False)
    except (typer.TyperException, ConfigError) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        print(f"sekisho: {' '.join(message.split())}", file=sys.stderr)
        return 2
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0
