"""The gate's own time: a catalogue of 200 engines, and one engine, answered by a local server.

The server is a process of its own and answers with what real engines answered, at a path for each
engine. The goals: 200 engines in under 2 s; one in under 200 ms beyond its own answer time.
"""

import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from aiohttp import web

from bench.report import BenchError, Row
from sekisho.gate.model import Claim
from sekisho.gate.run import Plan, Target, check

_FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "gate"
_COUNT = 200


def run(rounds: int | None) -> list[Row]:
    """Seconds of a whole run, half of the engines SGLang and half vLLM."""
    rows = []
    with _server() as base:
        for name, count in (("200 engines", _COUNT), ("one engine", 1)):
            plan = _plan(base, count)
            samples = [_seconds(plan) for _ in range(rounds or 5)]
            goal = 2.0 if count > 1 else 0.2
            rows.append(
                Row(
                    "gate",
                    name,
                    "s",
                    median(samples),
                    note=f"read and judged; goal {goal:g} s",
                    samples={"ours": samples},
                )
            )
    return rows


def _plan(base: str, count: int) -> Plan:
    kinds = ("sglang", "vllm")
    targets = [Target(source=f"{base}/{kinds[n % 2]}/{n}", model=f"m{n}") for n in range(count)]
    return Plan(targets=targets, everywhere=[Claim(model="", window=1024, source="bench")])


def _seconds(plan: Plan) -> float:
    began = time.monotonic()
    result = check(plan)
    seconds = time.monotonic() - began
    if result.unread or len(result.readings) != len(plan.targets):
        raise BenchError(f"{len(result.unread)} engines unread: {result.unread[0].reason}")
    return seconds


@contextmanager
def _server() -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(60):
            raise BenchError("the server of the gate's benchmark did not start")
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(told: Connection) -> None:
    sglang = _FIXTURES / "sglang-0.5.20"
    vllm = _FIXTURES / "vllm-0.32"
    bodies = {
        ("sglang", "server_info"): (sglang / "server_info.json").read_bytes(),
        ("sglang", "v1/loads"): (sglang / "v1_loads.json").read_bytes(),
        ("sglang", "v1/models"): (sglang / "v1_models.json").read_bytes(),
        ("vllm", "metrics"): (vllm / "metrics.txt").read_bytes(),
        ("vllm", "v1/models"): (vllm / "v1_models.json").read_bytes(),
        ("vllm", "version"): (vllm / "version.json").read_bytes(),
    }

    async def answer(request: web.Request) -> web.Response:
        kind, path = request.match_info["kind"], request.match_info["path"]
        body = bodies.get((kind, path))
        return web.Response(status=404) if body is None else web.Response(body=body)

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)

    async def tell(_app: web.Application) -> None:
        told.send(f"http://127.0.0.1:{listener.getsockname()[1]}")

    app = web.Application()
    app.router.add_get("/{kind}/{number}/{path:.*}", answer)
    app.on_startup.append(tell)
    web.run_app(app, sock=listener, print=None)
