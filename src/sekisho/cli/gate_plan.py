"""``sekisho gate plan``: from ``config.json`` and memory to the largest honest window."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sekisho.cli.conventions import one_line

if TYPE_CHECKING:
    from sekisho.gate.plan import PoolPlan


def plan(
    config: Annotated[Path, typer.Argument(help="A model's config.json, or its folder.")],
    *,
    memory: Annotated[str, typer.Option(help="Of a rank, such as 80GiB.")],
    decode_memory: Annotated[
        str, typer.Option(help="Of a rank of the decode node; by default --memory.")
    ] = "",
    weights: Annotated[str, typer.Option(help="Taken by weights and workspace, a rank.")] = "0",
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Tensor-parallel ranks.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="Of the KV cache: auto (the model's), bfloat16, fp8 and others.")
    ] = "auto",
    page_size: Annotated[int, typer.Option(min=1, max=65536, help="Tokens of a page.")] = 16,
) -> None:
    """Say how many tokens a rank's pool holds, and the largest window worth advertising."""
    from sekisho.gate.model import GateError
    from sekisho.gate.plan import load_config, parse_bytes, plan_pool

    with one_line(GateError):
        fields, trained = load_config(config)
        found = plan_pool(
            fields,
            trained,
            memory=parse_bytes(memory, "--memory"),
            decode_memory=parse_bytes(decode_memory or memory, "--decode-memory"),
            weights=parse_bytes(weights, "--weights"),
            ranks=ranks,
            dtype=dtype,
            page_size=page_size,
        )
    print("\n".join(_lines(found)))


def _lines(found: "PoolPlan") -> list[str]:
    shape = found.shape
    return [
        f"{shape.family}, KV cache in {shape.dtype}",
        f"a token     {shape.bytes_per_token:,} bytes on each rank = {shape.formula}",
        f"prefill     {found.prefill_tokens:,} tokens, a page of {found.page_size} kept back",
        f"decode      {found.decode_tokens:,} tokens, a page of {found.page_size} kept back",
        f"trained     {found.trained:,} tokens",
        f"window      {found.window:,} tokens is the most that can be advertised",
        f"with margin {found.comfortable:,} tokens passes the gate without a warning",
        *(f"note: {note}" for note in shape.notes),
    ]
