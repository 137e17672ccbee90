"""A real SGLang prefill/decode pair over real Mooncake.

with SglangPair("0.5.19") as pair:
    answers = asyncio.run(ask_pair(pair, {"text": "Once", "sampling_params": {}}))
"""

import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rig import (
    STAND_INS,
    Answer,
    EngineProcess,
    Engines,
    environment,
    free_port,
    installed,
    post,
)

from sekisho.engine.demo import ensure_demo_model

OVERLAY = "transformers-5.12.1"
_OVERLAY_UP_TO = (0, 5, 19)
_BACKUP = "disaggregation_decode_retraction_backup"


class PairAnswers(NamedTuple):
    """Decode's answer is the client's."""

    prefill: Answer
    decode: Answer
    room: int


class SglangPair(Engines):
    """``prefill`` and ``decode`` are the processes; their ``url``, ``log``, ``kill`` are of use.

    ``env`` and ``flags`` go to both, those with a role's name to that role alone. Logs go to
    ``folder``, a new one below the system's folder for temporary files by default.

    Raises:
        EngineError: the version is not installed.
    """

    def __init__(
        self,
        version: str,
        *,
        prefill_tokens: int = 1024,
        decode_tokens: int = 8192,
        context: int = 4096,
        page_size: int = 16,
        running_max: int = 4,
        waiting_s: int = 60,
        env: Mapping[str, str] | None = None,
        prefill_env: Mapping[str, str] | None = None,
        decode_env: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        folder: Path | None = None,
        model: Path | None = None,
    ) -> None:
        self.version = version
        self.context = context
        self.folder = folder or Path(tempfile.mkdtemp(prefix=f"sglang-{version}-"))
        self.bootstrap_port = free_port()
        self._source = installed("sglang", version, ask=f"sglang {version}")
        self._python = installed("sglang", "venv", ask=f"sglang {version}") / "bin" / "python"
        self._shared_env = {**_ENV, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(waiting_s)}
        self._shared_env |= env or {}
        self._shared_flags = [
            *("--model-path", str(model or ensure_demo_model())),
            *("--context-length", str(context)),
            *("--page-size", str(page_size)),
            *("--max-running-requests", str(running_max)),
            *_FLAGS,
            *flags,
        ]
        backup = [f"--{_BACKUP.replace('_', '-')}", "cpu_tensor"] if self._has_backup() else []
        self.prefill = self._process(
            "prefill",
            prefill_env,
            [
                *("--disaggregation-bootstrap-port", str(self.bootstrap_port)),
                *("--max-total-tokens", str(prefill_tokens)),
                *prefill_flags,
            ],
        )
        self.decode = self._process(
            "decode", decode_env, [*backup, "--max-total-tokens", str(decode_tokens), *decode_flags]
        )
        super().__init__((self.prefill, self.decode))

    def _process(
        self, role: str, env: Mapping[str, str] | None, flags: Sequence[str]
    ) -> EngineProcess:
        port = free_port()
        command = [
            *(str(self._python), "-m", "sglang.launch_server"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--disaggregation-mode", role),
            *self._shared_flags,
            *flags,
        ]
        full = environment(self._pythonpath(), self._shared_env | dict(env or {}))
        return EngineProcess(f"{role} {self.version}", command, full, port, self._log(role))

    def _log(self, role: str) -> Path:
        return self.folder / f"{role}.log"

    def _pythonpath(self) -> list[Path]:
        numbers = tuple(int(part) for part in self.version.split(".")[:3])
        if numbers > _OVERLAY_UP_TO:
            return [STAND_INS, self._source]
        overlay = installed("sglang", OVERLAY, ask=f"sglang {self.version}")
        return [STAND_INS, overlay, self._source]

    def _has_backup(self) -> bool:
        """Whether decode's host pool for retracted requests, which pins memory, can be replaced."""
        srt = self._source / "sglang" / "srt"
        places = [srt / "server_args.py", *(srt / "arg_groups").rglob("*.py")]
        return any(_BACKUP in place.read_text() for place in places if place.is_file())


_ENV = {
    "ENGINE_STAND_INS": "sglang",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",  # else the page allocator's kernel finds no driver
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "SGLANG_LOCAL_IP_NIC": "lo",
}
_FLAGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    *("--disaggregation-transfer-backend", "mooncake"),
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--enable-metrics",
]


async def ask_pair(
    pair: SglangPair,
    body: Mapping[str, Any],
    path: str = "/generate",
    *,
    room: int | None = None,
    timeout_s: float = 600.0,
) -> PairAnswers:
    """What SGLang's router does: the same body to both, with the address of prefill's bootstrap
    server and a number for the hand-off."""
    room = random.getrandbits(63) if room is None else room
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.bootstrap_port}
    full = {**body, **where, "bootstrap_room": room}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        prefill, decode = await asyncio.gather(
            post(session, pair.prefill.url + path, full),
            post(session, pair.decode.url + path, full),
        )
    return PairAnswers(prefill, decode, room)
