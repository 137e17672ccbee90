"""``sekisho gate``: no deployment whose advertised window its KV pools cannot hold.

``sekisho gate`` alone is ``sekisho gate check``; the group is there for its other commands.
"""

import asyncio
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sekisho.cli.conventions import default_to, one_line, write_result

if TYPE_CHECKING:
    from sekisho.gate.model import Claim, Engine, Result, Role
    from sekisho.gate.run import Plan, Target


app = typer.Typer(cls=default_to("check"))


@app.callback()
def _group() -> None:
    """Compare the physical KV capacity of running engines with every advertised window.

    Without a command: check, whose options `sekisho gate check --help` lists.
    """


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"
    SARIF = "sarif"
    GITHUB = "github"
    MARKDOWN = "markdown"


class NamedRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


Urls = list[str] | None
SglangUrls = Annotated[Urls, typer.Option(metavar="URL", help="An SGLang node that does both.")]
SglangPrefillUrls = Annotated[Urls, typer.Option(metavar="URL", help="An SGLang prefill node.")]
SglangDecodeUrls = Annotated[Urls, typer.Option(metavar="URL", help="An SGLang decode node.")]
VllmUrls = Annotated[Urls, typer.Option(metavar="URL", help="A vLLM node that does both.")]
VllmPrefillUrls = Annotated[Urls, typer.Option(metavar="URL", help="A vLLM prefill node.")]
VllmDecodeUrls = Annotated[Urls, typer.Option(metavar="URL", help="A vLLM decode node.")]
SekishoUrls = Annotated[Urls, typer.Option(metavar="URL", help="A Sekisho gateway.")]
LlamaCppUrls = Annotated[Urls, typer.Option(metavar="URL", help="A llama.cpp server.")]
TgiUrls = Annotated[Urls, typer.Option(metavar="URL", help="A Text Generation Inference server.")]
EngineUrls = Annotated[Urls, typer.Option(metavar="URL", help="An engine of any kind, detected.")]
File = Annotated[
    Path | None, typer.Argument(help="Models, windows and engines: .toml, .json or .yaml.")
]
Saved = Annotated[list[Path] | None, typer.Option(help="A saved /metrics of vLLM or SGLang.")]
Roles = Annotated[
    NamedRole | None, typer.Option(help="The role of every --engine and --metrics-file.")
]
Model = Annotated[
    str, typer.Option(help="Judge all of these under this name, not the one they state.")
]
Window = Annotated[
    int | None, typer.Option(min=1, max=2**50, help="The advertised window, in tokens.")
]
Output = Annotated[
    int, typer.Option(min=0, max=2**50, help="Answer promised on top of the window, in tokens.")
]
Prompt = Annotated[
    int, typer.Option(min=0, max=2**50, help="The longest prompt let through; 0: the window.")
]
Config = Annotated[
    Path | None, typer.Option(help="A config.json, or its folder: its window is a claim.")
]
KeyEnv = Annotated[
    Urls, typer.Option(metavar="URL=NAME", help="The variable with the key for this URL.")
]
KeyFile = Annotated[
    Urls, typer.Option(metavar="URL=FILE", help="The file with the key for this URL.")
]
Margin = Annotated[
    float | None,
    typer.Option(min=0, help="Windows that the smallest pool should hold (2 by default)."),
]
Required = Annotated[
    bool, typer.Option("--margin-is-required", help="A margin below it is an error.")
]
Timeout = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds, an engine.")]
Format_ = Annotated[Format, typer.Option("--format", help="Of the result.")]
Written = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
Watch = Annotated[
    float | None, typer.Option(min=1, max=86400, help="Check again every so many seconds.")
]
Host = Annotated[str, typer.Option(help="Where --watch-port binds.")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Serve Prometheus metrics there (0: do not).")
]


@app.command()
def check(
    catalogue: File = None,
    *,
    sglang: SglangUrls = None,
    sglang_prefill: SglangPrefillUrls = None,
    sglang_decode: SglangDecodeUrls = None,
    vllm: VllmUrls = None,
    vllm_prefill: VllmPrefillUrls = None,
    vllm_decode: VllmDecodeUrls = None,
    sekisho: SekishoUrls = None,
    llama_cpp: LlamaCppUrls = None,
    tgi: TgiUrls = None,
    engine: EngineUrls = None,
    metrics_file: Saved = None,
    role: Roles = None,
    model: Model = "",
    advertised: Window = None,
    output_tokens: Output = 0,
    prompt: Prompt = 0,
    config: Config = None,
    key_env: KeyEnv = None,
    key_file: KeyFile = None,
    margin: Margin = None,
    margin_is_required: Required = False,
    timeout: Timeout = 10.0,
    output_format: Format_ = Format.TEXT,
    output: Written = None,
    watch: Watch = None,
    watch_host: Host = "127.0.0.1",
    watch_port: Port = 0,
) -> None:
    """Read the engines, compare with what is advertised, say which role decides.

    Exit code 0: every window is held; 1: a finding; 2: it could not run; 3: inconclusive.
    """
    from sekisho.gate.model import GateError

    kinds: list[tuple[Engine, Role | None, Urls]] = [
        ("sglang", "both", sglang),
        ("sglang", "prefill", sglang_prefill),
        ("sglang", "decode", sglang_decode),
        ("vllm", "both", vllm),
        ("vllm", "prefill", vllm_prefill),
        ("vllm", "decode", vllm_decode),
        ("sekisho", None, sekisho),
        ("llama.cpp", None, llama_cpp),
        ("tgi", None, tgi),
    ]
    with one_line(GateError):
        keys = _keys(key_env, key_file)
        targets = _targets(kinds, engine, metrics_file, role, model, keys)
        claimed = _claims(model, advertised, output_tokens, prompt, config)
        plan = _plan(catalogue, targets, claimed, margin, margin_is_required, timeout)
        code = _run(plan, output_format.value, output, watch, watch_host, watch_port)
    raise typer.Exit(code)


def _claims(
    model: str, window: int | None, output: int, prompt: int, config: Path | None
) -> "list[Claim]":
    """The claims of the command line."""
    from sekisho.gate.claims import checked_claim, config_claim
    from sekisho.gate.model import ClaimError

    if window is None and (output or prompt):
        raise ClaimError("--output-tokens and --prompt need --advertised")
    found: list[Claim] = []
    if window is not None:
        found.append(checked_claim(model, window, output, prompt, "--advertised"))
    if config is not None:
        found.append(config_claim(model, config))
    return found


def _plan(
    catalogue: Path | None,
    targets: "list[Target]",
    claimed: "list[Claim]",
    margin: float | None,
    margin_is_required: bool,
    timeout: float,
) -> "Plan":
    """The catalogue's plan with what the flags add; a flag given wins over the file."""
    import dataclasses

    from sekisho.gate.model import ClaimError
    from sekisho.gate.run import Plan, plan_of

    if catalogue is None and not targets:
        raise ClaimError("nothing to read: give a catalogue, or engines such as --vllm URL")
    base = Plan(targets=[]) if catalogue is None else plan_of(catalogue, os.environ)
    return dataclasses.replace(
        base,
        targets=[*base.targets, *targets],
        everywhere=claimed,
        margin=base.margin if margin is None else margin,
        margin_is_required=margin_is_required or base.margin_is_required,
        timeout_s=timeout,
    )


def _targets(
    kinds: "Sequence[tuple[Engine, Role | None, Urls]]",
    detected: Urls,
    files: Sequence[Path] | None,
    role: NamedRole | None,
    model: str,
    keys: dict[str, tuple[str, str]],
) -> "list[Target]":
    from sekisho.gate.fetch import Key, parse_url
    from sekisho.gate.model import ClaimError
    from sekisho.gate.run import Target, read_key

    unused = set(keys)

    def key_of(url: str) -> Key | None:
        unused.discard(url)
        name, file = keys.get(url, ("", ""))
        return read_key(name, file, os.environ, Path())

    named: Role | None = None if role is None else role.value
    every = [*kinds, (None, named, detected)]
    targets = [
        Target(source=parse_url(url), role=of, kind=kind, model=model, key=key_of(parse_url(url)))
        for kind, of, urls in every
        for url in urls or ()
    ]
    for file in files or ():
        targets.append(Target(source=str(file), what="file", role=named, model=model))
    if unused:
        raise ClaimError(f"a key is given for {min(unused)}, which is not asked")
    return targets


def _keys(names: Urls, files: Urls) -> dict[str, tuple[str, str]]:
    """Name of a variable, or file, by the URL that its key is for."""
    from sekisho.gate.fetch import parse_url
    from sekisho.gate.model import ClaimError

    found: dict[str, tuple[str, str]] = {}
    for given, is_file in ((names, False), (files, True)):
        for text in given or ():
            url, equals, place = text.partition("=")
            if not equals or not place:
                # Not repeated: somebody may have given the key itself.
                raise ClaimError("--key-env wants URL=NAME, --key-file wants URL=FILE")
            if parse_url(url) in found:
                raise ClaimError(f"two keys for {parse_url(url)}")
            found[parse_url(url)] = ("", place) if is_file else (place, "")
    return found


def _run(
    plan: "Plan",
    output_format: str,
    output: Path | None,
    watch: float | None,
    watch_host: str,
    watch_port: int,
) -> int:
    from sekisho.gate.model import ClaimError
    from sekisho.gate.output import render
    from sekisho.gate.run import check as run

    def told(result: "Result") -> None:
        write_result(render(result, output_format), output)

    if watch is None:
        if watch_port:
            raise ClaimError("--watch-port needs --watch")
        result = run(plan)
        told(result)
        return result.exit_code()
    from sekisho.gate.watch import watch as watch_plan

    return asyncio.run(watch_plan(plan, watch, watch_host, watch_port, told))
