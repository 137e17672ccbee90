"""Prompts of an exact number of tokens, for tests with real vLLM."""

import functools
from typing import Any

from sekisho.engine.demo import ensure_demo_model

STORY = "The harbour lay quiet under a grey sky while the ferry turned slowly against the tide. "
OTHER = "Minutes of the budget meeting: the committee agreed to postpone the new library roof. "


@functools.cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ensure_demo_model())


def tokens(text: str, count: int) -> list[int]:
    """Exactly ``count`` tokens of a text that is repeated for as long as it takes."""
    ids = _tokenizer()(text * (count // 8 + 2))["input_ids"]
    assert len(ids) >= count
    return list(ids[:count])


def tokens_of(text: str) -> list[int]:
    """All tokens of a text."""
    return list(_tokenizer()(text)["input_ids"])
