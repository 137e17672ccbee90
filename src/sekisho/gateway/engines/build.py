"""From settings to a fleet of foreign servers."""

from pathlib import Path

from sekisho.config import Settings, parse_servers
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gate.model import ClaimError
from sekisho.gate.run import read_key
from sekisho.gateway.engines.fleet import EngineFleet
from sekisho.gateway.engines.replica import EngineError, Replica, Role
from sekisho.gateway.engines.scope import ScopeKeys
from sekisho.gateway.engines.sglang import SglangEngine


def sglang_fleet(settings: Settings, tokenizer: Tokenizer, window: int | None) -> EngineFleet:
    """The SGLang servers of ``settings``, not examined yet.

    Raises:
        EngineError: the file of their key cannot be used.
        StoreError: the secret of the scopes cannot be used.
    """
    named: list[tuple[Role, str]] = [
        ("prefill", settings.sglang_prefill),
        ("decode", settings.sglang_decode),
    ]
    replicas = [
        Replica(role, url, f"{role}-{number}", port)
        for role, text in named
        for number, (url, port) in enumerate(parse_servers(text), start=1)
    ]
    scopes = ScopeKeys.open(settings.state_dir)
    try:
        key = read_key("", settings.sglang_key_file, {}, Path())
    except ClaimError as error:
        raise EngineError(f"sglang_key_file: {error}") from None
    return EngineFleet(SglangEngine(tokenizer, key), replicas, scopes, window)
