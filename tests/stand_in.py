"""A deterministic stand-in for the model whose keys and values *are* the text.

Every slot holds the token and its position; the next token is a hash of all slots that attention
reads. So reading one wrong slot, of another request or of an older one, changes the answer.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout
from sekisho.engine.batch import Batch
from sekisho.sim.model import SimTokenizer

LAYOUT = PageLayout(16, 1, 1, 2, 4, "stand-in")  # 256 B payload: 16 slots of (token, position)
VOCABULARY = 97


def next_token(text: list[int]) -> int:
    """What the stand-in answers to ``text``, computed without any page."""
    slots = [(token, position) for position, token in enumerate(text)]
    data = np.array(slots, np.uint32).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % VOCABULARY


def answer(prompt: list[int], count: int) -> list[int]:
    """The greedy answer of ``count`` tokens."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


class StandInRunner:
    """A `Runner` over ``memory``; ``rows`` counts what it computed."""

    name = "stand-in"

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self.rows = 0

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        size = LAYOUT.page_size
        self.rows += len(batch.tokens)
        wanted = set(batch.logit_rows.tolist())
        logits = []
        for index in range(len(batch.tables)):
            table = batch.tables[index]
            for row in range(batch.sequence_starts[index], batch.sequence_starts[index + 1]):
                position = int(batch.positions[row])
                slots = self._slots(int(table[position // size]))
                slots[position % size] = (batch.tokens[row], position)
                if row in wanted:
                    pages = [self._slots(int(page)) for page in table[: position // size + 1]]
                    data = np.concatenate(pages)[: position + 1].tobytes()
                    best = hashlib.blake2b(data, digest_size=4).digest()
                    logits.append(np.zeros(VOCABULARY, np.float32))
                    logits[-1][int.from_bytes(best, "little") % VOCABULARY] = 1
        return np.array(logits, np.float32).reshape(-1, VOCABULARY)

    def _slots(self, page: int) -> NDArray[np.uint32]:
        return self._memory.payload(page)[: 16 * 8].view(np.uint32).reshape(16, 2)


class StandInTokenizer(SimTokenizer):
    """Token ids as text: ``<12>``."""

    vocab_size = VOCABULARY
