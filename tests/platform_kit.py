"""The platform in this process, its nodes as processes of their own; for tests of faults.

Waits have limits far above what they take: a limit that is reached fails the test, and no test
asserts how long something took.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
import uvicorn

from sekisho.engine.demo import ensure_demo_model
from sekisho.engine.spec import load_spec
from sekisho.engine.tokenizer import load_tokenizer
from sekisho.gateway.app import create_app
from sekisho.gateway.fleet import Fleet
from sekisho.gateway.model import ServedModel
from sekisho.gateway.store import TenantStore
from sekisho.node.build import NodeConfig
from sekisho.node.messages import Loading, Ready, Report
from sekisho.transport import TransportError
from sekisho.transport.mooncake_engine import load_engine

NODE = (sys.executable, "-m", "sekisho.node")
FAULTY_NODE = (sys.executable, str(Path(__file__).with_name("faulty_node.py")))
MODEL = "tiny"
TENANTS = ("tenant-a", "tenant-b")
LIMIT_S = 240.0
LONG: dict[str, Any] = {"logit_bias": {"0": -100, "2": -100}}
"""Fields of a request whose answer does not end by itself: its end tokens are out of reach."""

T = TypeVar("T")


def tiny_model(factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, fixed by their seed, and a real tokenizer; made
    once in a run. The weights are large: another context is another answer.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    folder = factory.getbasetemp() / "tiny-model"
    if folder.exists():
        return folder
    logging.disable_progress_bar()
    torch.manual_seed(20260901)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16384,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    logging.enable_progress_bar()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ensure_demo_model() / name, folder / name)
    return folder


def mooncake_or_skip() -> str:
    """The name of that transport; skips if it is not installed and nobody insists on it."""
    if os.environ.get("SEKISHO_REQUIRE_MOONCAKE") != "1":
        try:
            load_engine("tcp")
        except TransportError as error:
            pytest.skip(str(error))
    return "mooncake"


def words(count: int, salt: int) -> str:
    """A prompt of about ``count`` tokens that shares no page with that of another ``salt``."""
    return " ".join(str((salt * 7919 + i * 104729) % 9973) for i in range(-(-count // 5)))


@dataclass
class Answer:
    """What a client saw. ``finish`` and ``done`` (the [DONE] of a stream) are the marks of a
    whole answer; ``error`` is the error object of the answer or of an event in the stream."""

    status: int = 0
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    done: bool = False
    error: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def code(self) -> str | None:
        return self.error["code"] if self.error else None

    @property
    def content(self) -> tuple[str, list[float], str | None]:
        """What must be the same bit by bit each time it is asked for. The log-probabilities see
        a foreign page even where the most likely token stays the same."""
        return self.text, self.logprobs, self.finish


class Client:
    """A tenant's program: raw HTTP, so that nothing is hidden or tried again."""

    def __init__(self, url: str, key: str, model: str = MODEL) -> None:
        limits = httpx2.Limits(max_connections=None)
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=LIMIT_S,
            limits=limits,
            trust_env=False,
        )
        self._model = model

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> httpx2.Response:
        return await self._http.get(path)

    async def ask(
        self,
        prompt: str | list[int],
        on_text: Callable[[str], Awaitable[None]] | None = None,
        **fields: Any,
    ) -> Answer:
        """A completion with greedy sampling and log-probabilities, unless ``fields`` differ.

        ``on_text`` is called with the text so far after each event of a stream.
        """
        body = {
            "model": self._model,
            "prompt": prompt,
            "temperature": 0,
            "logprobs": 0,
            "max_tokens": 16,
            "stream": on_text is not None,
            **fields,
        }
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            answer = Answer(response.status_code, headers=dict(response.headers))
            if response.headers["content-type"].startswith("text/event-stream"):
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        _take_event(answer, line.removeprefix("data: "))
                        if on_text is not None:
                            await on_text(answer.text)
            else:
                _take(answer, json.loads(await response.aread()))
        return answer

    async def ask_and_leave(self, prompt: str, after: float, **fields: Any) -> Answer | None:
        """Close the connection after so many seconds; None if that was before the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after):
                return await self.ask(prompt, **fields)
        return None


def begins(event: asyncio.Event) -> Callable[[str], Awaitable[None]]:
    """For ``on_text``: sets ``event`` when the first text is there."""

    async def on_text(text: str) -> None:
        if text:
            event.set()

    return on_text


def _take_event(answer: Answer, data: str) -> None:
    if answer.done or answer.error:
        raise AssertionError("an event after the last one")
    if data == "[DONE]":
        answer.done = True
    else:
        _take(answer, json.loads(data))


def _take(answer: Answer, body: dict[str, Any]) -> None:
    if "error" in body:
        answer.error = body["error"]
        return
    for choice in body["choices"]:
        answer.text += choice["text"]
        answer.finish = answer.finish or choice["finish_reason"]
        if choice["logprobs"]:
            answer.logprobs += choice["logprobs"]["token_logprobs"]


class Platform:
    """A fleet and its gateway on a free port; its event loop has a thread of its own."""

    def __init__(self, folder: Path, model: Path, name: str, roles: Sequence[str]) -> None:
        self.model, self.name, self.roles = model, name, list(roles)
        self.log = folder / "nodes.log"
        self.ready: list[tuple[str, Ready]] = []
        """Every node that ever became ready, in order, with what it said."""
        self.pools: dict[str, int] = {}
        """Tokens of the pool by node, where it differs from the others."""
        self.url = ""
        self.keys: dict[str, str] = {}
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._started: Future[None] = Future()
        self._stop = asyncio.Event()

    def client(self, tenant: str = TENANTS[0]) -> Client:
        return Client(self.url, self.keys[tenant], self.name)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the platform's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def reports(self) -> dict[str, Report]:
        """Each node's recount, once all nodes are there."""
        return wait_for(self._all_reports, "every node's report")

    def _all_reports(self) -> dict[str, Report] | None:
        reports = self.call(self.fleet.inspect())
        return reports if len(reports) == len(self.roles) else None

    def wait_reports(
        self, accept: Callable[[dict[str, Report]], bool], what: str
    ) -> dict[str, Report]:
        """Poll until the reports of all nodes are acceptable."""

        def look() -> dict[str, Report] | None:
            reports = self._all_reports()
            return reports if reports is not None and accept(reports) else None

        return wait_for(look, what, lambda: str(self.call(self.fleet.inspect())))

    def wait_settled(self, quarantined: int = 0) -> dict[str, Report]:
        """Until no node has a request, a transfer, or a page that is held by one; what is left
        in use are pages of the prefix cache, and as many quarantined ones as are expected."""
        reports = self.wait_reports(
            lambda found: (
                all(is_quiet(report) for report in found.values())
                and sum(r.pages["quarantined"] for r in found.values()) == quarantined
            ),
            f"all pages free or cached, {quarantined} in quarantine",
        )
        for name, report in reports.items():
            assert sum(report.pages.values()) == self.page_count, name
        return reports

    def kill(self, role: str) -> str:
        """``kill -9`` the first node of a role; returns the name it had."""
        name = min(name for name in self.fleet.pids() if name.startswith(role))
        os.kill(self.fleet.pids()[name], signal.SIGKILL)
        return name

    def wait_replaced(self, name: str) -> str:
        """Until the successor of a node is ready; returns its name."""
        slot, _, generation = name.rpartition(".")
        successor = f"{slot}.{int(generation) + 1}"
        wait_for(lambda: successor in [known for known, _ in self.ready] or None, successor)
        return successor

    # -- life, driven by `platform`

    def start(self, command: Sequence[str], window: int | None, overrides: dict[str, Any]) -> None:
        settings = {**_SETTINGS, **overrides}
        self.page_count = -(-settings["pool_tokens"] // settings["page_size"])
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(command, window, settings),)
        )
        self._thread.start()
        self._started.result(LIMIT_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _run(
        self, command: Sequence[str], window: int | None, settings: dict[str, Any]
    ) -> None:
        def configure(role: str, name: str, gateway: str, address: str) -> NodeConfig:
            return NodeConfig(
                name=name,
                role=role,
                parent=os.getpid(),
                gateway=gateway,
                address=address,
                model=str(self.model),
                node_count=len(self.roles),
                **{**settings, "pool_tokens": self.pools.get(name, settings["pool_tokens"])},
            )

        # The shell replaces itself by the node, which keeps its process id and its parent.
        logged = ("sh", "-c", 'exec "$@" 2>>"$0"', str(self.log), *command)
        self.fleet = Fleet(self.roles, configure, logged, self._progress, window, self.name)
        spec = load_spec(self.model)
        served = ServedModel(
            self.name, load_tokenizer(self.model), spec.vocab_size, spec.eos_token_ids, created=0
        )
        store = TenantStore.open(f"sqlite:///{self._folder}/db", self._folder / "pepper")
        self.keys = {name: store.create_key(store.ensure_tenant(name)) for name in TENANTS}
        try:
            await self.fleet.start()
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                server = uvicorn.Server(
                    uvicorn.Config(
                        create_app(self.fleet, served, store),
                        log_config=None,
                        timeout_graceful_shutdown=1,
                    )
                )
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                self._started.set_result(None)
                await self._stop.wait()
                server.should_exit = True
                await serving
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            await self.fleet.stop(0.0)
            store.close()

    def _progress(self, node: str, step: Loading | Ready) -> None:
        if isinstance(step, Ready):
            self.ready.append((node, step))


_SETTINGS = {
    "dtype": "bfloat16",
    "device": "cpu",
    "isolation": "standard",
    "transport": "memory",
    "mooncake_protocol": "tcp",
    "mooncake_device": "",
    "page_size": 16,
    "pool_tokens": 16384,
    "batch_max": 16,
    "chunk_tokens": 64,
    "queue_max": 512,
    "wait_max": LIMIT_S,
    "threads": 1,
    "log_level": "info",
}


@contextlib.contextmanager
def platform(
    folder: Path,
    model: Path,
    roles: Sequence[str],
    command: Sequence[str] = NODE,
    name: str = MODEL,
    window: int | None = None,
    pools: dict[str, int] | None = None,
    **overrides: Any,
) -> Iterator[Platform]:
    """A platform whose nodes are all ready; ``overrides`` are fields of `NodeConfig`."""
    running = Platform(folder, model, name, roles)
    running.pools.update(pools or {})
    try:
        running.start(command, window, overrides)
        yield running
    finally:
        running.stop()


def is_quiet(report: Report) -> bool:
    """No request waits, runs or is being moved, and none holds a page that it alone fills."""
    return not any(report.requests.values()) and report.pages["leased"] == 0


def wait_for(look: Callable[[], T | None], what: str, state: Callable[[], str] = lambda: "") -> T:
    """Poll until ``look`` returns something other than None."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited in vain for {what}: {state()}")
