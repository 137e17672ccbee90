"""From settings to a fleet of foreign servers."""

from pathlib import Path

from sekisho.config import Settings, parse_servers
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gate.fetch import Key
from sekisho.gate.model import ClaimError
from sekisho.gate.run import read_key
from sekisho.gateway.engines.fleet import EngineFleet
from sekisho.gateway.engines.local import LocalPair
from sekisho.gateway.engines.replica import EngineError, Replica, Role
from sekisho.gateway.engines.scope import ScopeKeys
from sekisho.gateway.engines.sglang import SglangEngine
from sekisho.gateway.engines.vllm import VllmEngine


def engine_fleet(
    settings: Settings, folder: Path, tokenizer: Tokenizer, window: int | None
) -> EngineFleet:
    """The servers of ``settings``, not examined yet, or with ``local`` not started yet.

    Raises:
        EngineError: the file of their key, or the command that starts them, cannot be used.
        StoreError: the secret of the scopes cannot be used.
    """
    scopes = ScopeKeys.open(settings.state_dir)
    if settings.engine == "sglang":
        servers = _replicas(settings.sglang_prefill, settings.sglang_decode)
        key = _key("sglang_key_file", settings.sglang_key_file)
        return EngineFleet(SglangEngine(tokenizer, key), servers, scopes, window)
    if settings.local:
        pair = LocalPair(folder, settings.state_dir / "logs", window)
        return EngineFleet(VllmEngine(tokenizer, pair.key, pair), pair.replicas(), scopes, window)
    servers = _replicas(settings.vllm_prefill, settings.vllm_decode)
    key = _key("vllm_key_file", settings.vllm_key_file)
    return EngineFleet(VllmEngine(tokenizer, key), servers, scopes, window)


def _replicas(prefill: str, decode: str) -> list[Replica]:
    named: list[tuple[Role, str]] = [("prefill", prefill), ("decode", decode)]
    return [
        Replica(role, url, f"{role}-{number}", port)
        for role, text in named
        for number, (url, port) in enumerate(parse_servers(text), start=1)
    ]


def _key(setting: str, file: str) -> Key | None:
    try:
        return read_key("", file, {}, Path())
    except ClaimError as error:
        raise EngineError(f"{setting}: {error}") from None
