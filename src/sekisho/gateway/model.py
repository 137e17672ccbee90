"""The one model that a gateway serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Tokenizer(Protocol):
    """What the gateway needs of `sekisho.engine.tokenizer.Tokenizer`."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """``created`` is in Unix seconds; ``vocab_size`` bounds the token ids of a prompt."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: Sequence[int]
    created: int
    owned_by: str = "sekisho"
