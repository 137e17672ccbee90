"""A deterministic stand-in for the model: its keys and values *are* the text, and who wrote it.

A slot is four u32: token · state · request · tenant. The state is a running hash of the text up to
this token; the next token is a CRC of all slots that attention reads. So reading one wrong slot, of
another request or of an older one, changes the answer. Request and tenant are the writer's, for the
ownership checker alone; the answer does not depend on them.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from sekisho.core.page import HEADER_SIZE, PageLayout
from sekisho.engine.batch import Batch
from sekisho.engine.tokenizer import Tokenizer

PAGE_SIZE = 16
LAYOUT = PageLayout(PAGE_SIZE, 1, 1, 2, 4, "stand-in")  # a payload of 16 slots of 16 bytes
VOCABULARY = 256

Slots = NDArray[np.uint32]

_POISONED = 2**32 - 1
_TEXT_MAX = 1 << 12
_FACTOR = 2891336453  # odd, so that it has an inverse modulo 2**32 (a multiplier of L'Ecuyer 1999)
_POWERS = np.ones(_TEXT_MAX + 1, np.uint32)
_POWERS[1:] = _FACTOR
np.multiply.accumulate(_POWERS, out=_POWERS)
_INVERSES = np.ones(_TEXT_MAX + 1, np.uint32)
_INVERSES[1:] = pow(_FACTOR, -1, 2**32)
np.multiply.accumulate(_INVERSES, out=_INVERSES)


def states(before: int, tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The running hash after each of ``tokens`` (u32 [n]), from the one before them: h' = h F + t
    + 1 modulo 2**32, solved for all of them at once."""
    count = len(tokens)
    if count == 1:
        return np.array([(before * _FACTOR + int(tokens[0]) + 1) % 2**32], np.uint32)
    sums = np.add.accumulate((tokens + np.uint32(1)) * _INVERSES[1 : count + 1], dtype=np.uint32)
    return cast(NDArray[np.uint32], (sums + np.uint32(before)) * _POWERS[1 : count + 1])


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The greedy answer of ``count`` tokens, computed without any page."""
    text = np.array(prompt, np.uint32)
    state = states(0, text)
    crc = zlib.crc32(np.stack([text, state], axis=1).tobytes())
    last, tokens = int(state[-1]), []
    for _ in range(count):
        token = crc % VOCABULARY
        tokens.append(token)
        last = (last * _FACTOR + token + 1) % 2**32
        crc = zlib.crc32(np.array([token, last], np.uint32).tobytes(), crc)
    return tokens


class Writer(NamedTuple):
    """Whose page it is at present: its request, its tenant's number, and how many leading pages
    of the request come from the prefix cache."""

    request: int
    tenant: int
    shared: int


NOBODY = Writer(2**32 - 2, 0, 0)


class SimRunner:
    """A `Runner` over a pool's region.

    Args:
        writer_of: the present owner of a page index, as the node's books say.
        tamper: called with every batch before it is used; may change its tables.
        wrong: called with (request, pages) when a row of ``request`` reads slots there that were
            not written for it.
        landing: called when all is read and nothing is verified yet.
    """

    name = "stand-in"

    def __init__(
        self,
        region: NDArray[np.uint8],
        page_count: int,
        writer_of: Callable[[int], Writer],
        tamper: Callable[[Batch], None],
        wrong: Callable[[int, list[int]], None],
        landing: Callable[[], None],
    ) -> None:
        self.slots = slots_of(region, page_count)
        self._writer_of = writer_of
        self._tamper = tamper
        self._wrong = wrong
        self._landing = landing

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        starts = batch.sequence_starts
        last = batch.positions[starts[1:] - 1]
        writers = [
            self._writer_of(int(batch.tables[i, position // PAGE_SIZE]))
            for i, position in enumerate(last.tolist())
        ]
        self._tamper(batch)
        wanted = set(batch.logit_rows.tolist())
        tokens = []
        for i, writer in enumerate(writers):
            start, end = int(starts[i]), int(starts[i + 1])
            read = self._row(batch, i, start, end, writer)
            if end - 1 in wanted:
                tokens.append(zlib.crc32(np.ascontiguousarray(read[:, :2]).data) % VOCABULARY)
        logits = np.zeros((len(tokens), VOCABULARY), np.float32)
        logits[np.arange(len(tokens)), tokens] = 1
        self._landing()
        return logits

    def _row(self, batch: Batch, i: int, start: int, end: int, writer: Writer) -> Slots:
        """Write the rows of one sequence; return all slots that its last row reads, [n, 4]."""
        positions = batch.positions[start:end]
        first, count = int(positions[0]), int(positions[-1]) + 1
        pages = batch.tables[i, : -(-count // PAGE_SIZE)]
        read = self.slots[pages].reshape(-1, 4)
        own = writer.shared * PAGE_SIZE
        wrong = read[:first, 2] != writer.request
        wrong[:own] = read[:own, 3][:first] != writer.tenant
        request = writer.request
        if wrong.any():
            self._wrong(request, pages[np.unique(np.flatnonzero(wrong) // PAGE_SIZE)].tolist())
            request = _POISONED  # what is computed from another's slots is another's too
        rows = read[first:count]
        rows[:, 0] = batch.tokens[start:end]
        rows[:, 1] = states(int(read[first - 1, 1]) if first else 0, rows[:, 0])
        rows[:, 2], rows[:, 3] = request, writer.tenant
        self.slots[pages[positions // PAGE_SIZE], positions % PAGE_SIZE] = rows
        return read[:count]


def slots_of(region: NDArray[np.uint8], page_count: int) -> Slots:
    """The slots of a region, a view: u32 [page_count, 16, 4]."""
    strides = (LAYOUT.page_bytes, 16, 4)
    return np.ndarray((page_count, PAGE_SIZE, 4), "<u4", region, HEADER_SIZE, strides)


class SimTokenizer:
    """Token ids as text: ``<12>``."""

    vocab_size = VOCABULARY
    special_ids: frozenset[int] = frozenset()
    leading_spaces = 0
    has_chat_template = False

    def piece(self, token: int) -> bytes:
        return f"<{token}>".encode()


TOKENIZER = cast(Tokenizer, SimTokenizer())
