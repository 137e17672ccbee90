"""Real vLLM: a prefill/decode pair over real Mooncake or NIXL, or one server that does both.

with VllmPair() as pair:
    answers = asyncio.run(ask_pair(pair, {"prompt": "Once", "max_tokens": 8}))
"""

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import install
from rig import (
    STAND_INS,
    Answer,
    EngineError,
    EngineProcess,
    Engines,
    environment,
    free_port,
    installed,
    post,
)

from sekisho.engine.demo import ensure_demo_model

NAME = "demo"
"""What the model is called in requests."""
MOONCAKE, NIXL = "MooncakeConnector", "NixlConnector"
MOVES: dict[str, dict[str, Any]] = {
    MOONCAKE: {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}},
    NIXL: {"kv_buffer_device": "cpu", "kv_connector_extra_config": {"num_threads": 0}},
}
"""What each connector needs in ``--kv-transfer-config`` here."""
_NIXL_FOLDER = install.NIXL[0].replace("==", "-")
"""Apart from vLLM's environment, as it comes with libraries for every GPU."""
_MOVES_ENV = {
    MOONCAKE: {},
    NIXL: {
        "UCX_TLS": "tcp,self",  # without it UCX reads the other process's memory, not its socket
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    },
}


class PairAnswers(NamedTuple):
    """Decode's answer is the client's; it is None where prefill gave none to go on from."""

    prefill: Answer
    decode: Answer | None
    transfer: str


class _Vllm(Engines):
    def __init__(
        self,
        roles: Mapping[str, Sequence[str]],
        *,
        context: int,
        pool_tokens: Mapping[str, int | None],
        block: int,
        envs: Mapping[str, Mapping[str, str]],
        flags: Sequence[str],
        folder: Path | None,
        model: Path | None,
        beside: Sequence[Path] = (),
    ) -> None:
        self.context = context
        self.folder = folder or Path(tempfile.mkdtemp(prefix="vllm-"))
        venv = installed("vllm", "venv", ask="vllm")
        shared = [
            *(str(venv / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve"),
            *(str(model or ensure_demo_model()), "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager"),
            *("--max-model-len", str(context), "--block-size", str(block)),
            *("--max-num-seqs", "16", *flags),
        ]
        made = []
        for role, own in roles.items():
            port, pool = free_port(), pool_tokens[role]
            # vLLM keeps one block for itself.
            size = [] if pool is None else ["--num-gpu-blocks-override", str(pool // block + 1)]
            made.append(
                EngineProcess(
                    f"vllm {role}",
                    [*shared, "--port", str(port), *size, *own],
                    environment([STAND_INS, *beside], {**_ENV, **envs[role]}),
                    port,
                    self.folder / f"{role}.log",
                )
            )
        super().__init__(made)


class VllmServer(_Vllm):
    """One server on both cores. ``pool_tokens`` None: what 1 GiB holds, 46,592 of the demo model.

    Raises:
        EngineError: vLLM is not installed.
    """

    def __init__(
        self,
        *,
        context: int = 2048,
        pool_tokens: int | None = None,
        block: int = 32,
        env: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        folder: Path | None = None,
        model: Path | None = None,
    ) -> None:
        super().__init__(
            {"server": ()},
            context=context,
            pool_tokens={"server": pool_tokens},
            block=block,
            envs={"server": {"VLLM_CPU_OMP_THREADS_BIND": "0-1", **(env or {})}},
            flags=flags,
            folder=folder,
            model=model,
        )
        [self.server] = self.processes


class VllmPair(_Vllm):
    """``prefill`` and ``decode``, a core each. ``env`` and ``flags`` go to both.

    ``inner`` is what moves blocks; ``connector`` changes both ends' ``--kv-transfer-config``, in
    which ``kv_role`` is the end's.

    Raises:
        EngineError: vLLM is not installed.
    """

    def __init__(
        self,
        *,
        context: int = 2048,
        prefill_tokens: int | None = None,
        decode_tokens: int | None = None,
        block: int = 32,
        abort_s: int = 60,
        inner: str = MOONCAKE,
        connector: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        prefill_env: Mapping[str, str] | None = None,
        decode_env: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        folder: Path | None = None,
        model: Path | None = None,
    ) -> None:
        self.inner = inner
        self.bootstrap_port = free_port()
        both = {
            **_MOVES_ENV[inner],
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap_port),
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(abort_s),
            **(env or {}),
        }

        def transfer(role: str) -> list[str]:
            config = {"kv_connector": inner, **MOVES[inner], **(connector or {}), "kv_role": role}
            return ["--kv-transfer-config", json.dumps(config)]

        super().__init__(
            {
                "prefill": [*transfer("kv_producer"), *prefill_flags],
                "decode": [*transfer("kv_consumer"), *decode_flags],
            },
            context=context,
            pool_tokens={"prefill": prefill_tokens, "decode": decode_tokens},
            block=block,
            envs={
                "prefill": {**both, **_own(0), **(prefill_env or {})},
                "decode": {**both, **_own(1), **(decode_env or {})},
            },
            flags=flags,
            folder=folder,
            model=model,
            beside=[installed("vllm", _NIXL_FOLDER, ask="vllm")] if inner == NIXL else [],
        )
        self.prefill, self.decode = self.processes


_ENV = {
    "ENGINE_STAND_INS": "vllm",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


def _own(core: int) -> dict[str, str]:
    """What the two ends may not share. NIXL's side channel tells its peers how to read."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }


async def ask_pair(
    pair: VllmPair,
    body: Mapping[str, Any],
    path: str = "/v1/completions",
    *,
    transfer: str | None = None,
    timeout_s: float = 600.0,
) -> PairAnswers:
    """What vLLM's proxy does: one token of prefill, then decode with where to fetch its pages."""
    transfer = transfer or f"{random.getrandbits(64):016x}"
    body = {"model": NAME, **body}
    begun = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": begun}
        prefill = await post(session, pair.prefill.url + path, first)
        if prefill.status != 200:
            return PairAnswers(prefill, None, transfer)
        params = {
            **(prefill.json().get("kv_transfer_params") or {}),
            **await where(session, pair, transfer),
        }
        second = {**body, "kv_transfer_params": params}
        decode = await post(session, pair.decode.url + path, second)
    return PairAnswers(prefill, decode, transfer)


async def where(session: aiohttp.ClientSession, pair: VllmPair, transfer: str) -> dict[str, Any]:
    """What a proxy adds for decode. NIXL's prefill has said all of it."""
    if pair.inner == NIXL:
        return {}
    bootstrap = f"http://127.0.0.1:{pair.bootstrap_port}"
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": await engine_of(session, bootstrap),
        "remote_bootstrap_addr": bootstrap,
        "transfer_id": transfer,
    }


async def engine_of(session: aiohttp.ClientSession, bootstrap: str) -> str:
    """The engine's id, as prefill's bootstrap server states it for its first rank."""
    async with session.get(f"{bootstrap}/query") as answer:
        ranks = await answer.json()
    if not ranks:
        raise EngineError("prefill's bootstrap server knows no engine")
    return str(next(iter(ranks.values()))["engine_id"])
