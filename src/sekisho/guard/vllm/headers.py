"""Headers for any ordinals at once, and the comparison of what a transfer brought.

Of a header that prefill wrote, decode knows all but the serial: prefill's blocks are shared by the
requests of a scope, and carry the lease of whoever computed them first.
"""

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sekisho.core.errors import Evidence
from sekisho.core.ledger import Pages
from sekisho.core.memory import ORDINAL_WORD, WORDS, Words, make_headers
from sekisho.core.page import MAGIC, PageLayout
from sekisho.core.table import evidence_of

SERIAL_WORD = 2
_FEW = 64  # as a step of decode writes: then it is numpy's calls that cost, not the rows
_ROW = struct.Struct("<4Q16s16x")
_LIMIT = 16
"""Evidence of so many pages is kept of one request."""


def headers_at(
    layout: PageLayout,
    incarnation: int,
    serials: Sequence[int],
    ordinals: Sequence[int],
    filled: Sequence[int],
    digests: list[bytes],
) -> Words:
    """Headers [n, 8] of pages that need not follow each other."""
    if len(ordinals) <= _FEW:
        first = MAGIC | (layout.fingerprint << 32)
        rows = [
            _ROW.pack(first, incarnation, serial, ordinal | count << 32, digest)
            for serial, ordinal, count, digest in zip(
                serials, ordinals, filled, digests, strict=True
            )
        ]
        return np.frombuffer(bytearray().join(rows), "<u8").reshape(-1, WORDS)
    full = np.array(filled, np.uint64)
    words = make_headers(layout, incarnation, np.array(serials, np.uint64), 0, full, digests)
    words[:, ORDINAL_WORD] = np.array(ordinals, np.uint64) | full << np.uint64(32)
    return words


def differences(
    pages: NDArray[np.integer] | Pages, expected: Words, found: Words, *, any_serial: bool = False
) -> tuple[Evidence, ...]:
    """Evidence of the pages whose headers are not as expected, at most 16; empty if all are.

    With ``any_serial`` a header may be under any lease, but must be under one.
    """
    if any_serial:
        expected = expected.copy()
        expected[:, SERIAL_WORD] = np.maximum(found[:, SERIAL_WORD], 1)
    if np.array_equal(found, expected):
        return ()
    wrong = np.flatnonzero((found != expected).any(axis=1))[:_LIMIT]
    return tuple(evidence_of(0, int(pages[i]), expected[i], found[i]) for i in wrong)
