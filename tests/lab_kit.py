"""The lab's machine over the stand-in model, where every slot read shows in the answer."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sekisho.core.memory import PageMemory
from sekisho.lab.incident import Lab
from sekisho.lab.machine import LabModel
from stand_in import LAYOUT, VOCABULARY, StandInRunner, StandInTokenizer


class WordTokenizer(StandInTokenizer):
    """A token a word, which is a number made of its letters."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [sum(map(ord, word)) * 31 % VOCABULARY for word in text.split()]

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))


class _Model:
    spec = SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=())
    tokenizer = WordTokenizer()
    layout = LAYOUT

    def runner(self, region: NDArray[np.uint8], page_count: int) -> StandInRunner:
        return StandInRunner(PageMemory(region, LAYOUT, page_count))


def stand_in_model() -> LabModel:
    return cast(LabModel, _Model())


def stand_in_lab(seed: int = 1) -> Lab:
    return Lab(stand_in_model(), seed)
