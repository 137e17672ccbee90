"""Real local servers that answer as engines do, or as nothing should."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sekisho.gate.model import Claim, Result
from sekisho.gate.run import Plan, Target, check

FIXTURES = Path(__file__).parent / "fixtures" / "gate"
Speak = Callable[[asyncio.StreamWriter, str], Awaitable[None]]
Answers = Mapping[str, bytes | Speak]


class Engine:
    """One server on a thread of its own. ``requests``: (path, headers) as they came."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Engine":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def keys(self) -> set[str]:
        return {
            headers["authorization"] for _, headers in self.requests if "authorization" in headers
        }

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            try:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await self._answer(reader, writer)
                    writer.close()
                    await writer.wait_closed()
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(hear, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # the loop closes the sockets of what was aborted

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        path = head[0].split(" ")[1]
        pairs = [line.split(": ", 1) for line in head[1:] if ": " in line]
        self.requests.append((path, {name.lower(): value for name, value in pairs}))
        answer = self.answers.get(path, self.answers.get("*"))
        if answer is None:
            writer.write(response(b'{"detail":"Not Found"}', 404))
        elif isinstance(answer, bytes):
            writer.write(response(answer))
        else:
            await answer(writer, path)
        await writer.drain()


def response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> bytes:
    """One whole HTTP answer."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    return head.encode() + body


def saying(raw: bytes) -> Speak:
    """Sends exactly these bytes and closes."""

    async def speak(writer: asyncio.StreamWriter, _path: str) -> None:
        writer.write(raw)

    return speak


def sglang(folder: str, **changed: Any) -> dict[str, bytes | Speak]:
    """The answers of a captured SGLang node, with fields of ``/server_info`` changed."""
    base = FIXTURES / f"sglang-{folder}"
    info = json.loads((base / "server_info.json").read_text())
    info.update(changed)
    return {
        "/server_info": json.dumps(info).encode(),
        "/v1/loads": (base / "v1_loads.json").read_bytes(),
        "/v1/models": (base / "v1_models.json").read_bytes(),
    }


def vllm(metrics: str = "metrics.txt") -> dict[str, bytes | Speak]:
    """The answers of a captured vLLM node."""
    base = FIXTURES / "vllm-0.32"
    return {
        "/metrics": (base / metrics).read_bytes(),
        "/v1/models": (base / "v1_models.json").read_bytes(),
        "/version": (base / "version.json").read_bytes(),
    }


@contextlib.contextmanager
def running(*answers: Answers) -> Iterator[list[Engine]]:
    """An engine for each set of answers."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Engine(one)) for one in answers]


def judged(*targets: Target, window: int | None = None, **settings: Any) -> Result:
    """One run over ``targets``, with a claim about every model found."""
    claims = [] if window is None else [Claim(model="", window=window, source="--advertised")]
    settings.setdefault("timeout_s", 5.0)
    return check(Plan(targets=targets, everywhere=claims, **settings))


def rules(result: Result) -> set[str]:
    """The rules that are broken and not waived."""
    return {finding.rule for finding in result.findings if not finding.waived_until}
