"""From settings to a fleet of foreign servers."""

from sekisho.config import Settings, parse_servers
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gateway.engines.fleet import EngineFleet
from sekisho.gateway.engines.replica import Replica, Role
from sekisho.gateway.engines.scope import ScopeKeys
from sekisho.gateway.engines.sglang import SglangEngine


def sglang_fleet(settings: Settings, tokenizer: Tokenizer, window: int | None) -> EngineFleet:
    """The SGLang servers of ``settings``, not examined yet.

    Raises:
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
    return EngineFleet(SglangEngine(tokenizer), replicas, scopes, window)
