"""The page and its header: 64 bytes that say whose page this is and what it encodes.

    [ header 64 B | layer 0: K V | layer 1: K V | … ]

The header is written last; it is the release of the payload. All integers are little-endian:

    0  magic            u32   format and version of this header
    4  layout           u32   fingerprint of model and page layout
    8  incarnation      u64   lease, first half
    16 serial           u64   lease, second half
    24 ordinal          u32   which page of the request this is
    28 filled           u32   how many token slots are written
    32 token digest     16 B  chained hash of the token ids up to the end of this page
    48 payload digest   16 B  hash of the payload, or zeros where the policy does not ask for it
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sekisho.core.errors import check

HEADER_SIZE = 64
MAGIC = 0x31504B53  # "SKP1"
DIGEST_SIZE = 16

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("layout", "<u4"),
        ("incarnation", "<u8"),
        ("serial", "<u8"),
        ("ordinal", "<u4"),
        ("filled", "<u4"),
        ("token_digest", "V16"),
        ("payload_digest", "V16"),
    ]
)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of one page. ``page_size`` is in tokens, ``element_size`` in bytes.

    The payload of a layer is K as [kv_head, head_size, page_size] followed by V as
    [kv_head, page_size, head_size]: K lies token-minor, so that a kernel scores the tokens of a
    page in parallel lanes and sums over the head in one fixed order.

    ``model`` is any text that names the weights: two nodes exchange pages only if it agrees.
    """

    page_size: int
    layer_count: int
    kv_head_count: int
    head_size: int
    element_size: int
    model: str

    def __post_init__(self) -> None:
        for name in ("layer_count", "kv_head_count", "head_size", "element_size"):
            check(getattr(self, name) > 0, f"{name} must be above 0")
        check(
            self.page_size > 0 and self.page_size % 16 == 0,
            f"page_size {self.page_size} must be a multiple of 16",
        )

    @property
    def half_layer_elements(self) -> int:
        """Elements of K, or of V, of one layer in one page."""
        return self.kv_head_count * self.head_size * self.page_size

    @property
    def payload_bytes(self) -> int:
        return 2 * self.layer_count * self.half_layer_elements * self.element_size

    @property
    def page_bytes(self) -> int:
        return HEADER_SIZE + self.payload_bytes

    @property
    def fingerprint(self) -> int:
        """u32 over every field: pages of another shape or model never match."""
        text = "\x1f".join(
            str(part)
            for part in (
                self.page_size,
                self.layer_count,
                self.kv_head_count,
                self.head_size,
                self.element_size,
                self.model,
            )
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")

    def pages_for(self, token_count: int) -> int:
        """Pages that hold ``token_count`` tokens, the last one perhaps in part."""
        return -(-token_count // self.page_size)


def chain_root(scope: str, model: str) -> bytes:
    """Where the token digests of a scope start: unambiguous framing of scope and model.

    Because the chain starts here, equal texts of two scopes have different digests on every page.
    """
    hasher = hashlib.blake2b(digest_size=DIGEST_SIZE, person=b"sekisho-root")
    for part in (scope.encode(), model.encode()):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def chain_next(previous: bytes, tokens: Sequence[int] | NDArray[np.uint32]) -> bytes:
    """Digest after one more page (or part of a page) that holds ``tokens`` (each 0..2**32-1)."""
    data = np.asarray(tokens, dtype="<u4").tobytes()
    return hashlib.blake2b(
        data, digest_size=DIGEST_SIZE, key=previous, person=b"sekisho-page"
    ).digest()


def payload_digest(payload: NDArray[np.uint8]) -> bytes:
    """16-byte BLAKE2b of the payload bytes of one page."""
    return hashlib.blake2b(payload.data, digest_size=DIGEST_SIZE, person=b"sekisho-kv").digest()


def chain(root: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Digest at the end of every page of ``tokens``, the last page perhaps in part."""
    digests, digest = [], root
    ids = np.asarray(tokens, dtype="<u4")
    for start in range(0, len(ids), page_size):
        digest = chain_next(digest, ids[start : start + page_size])
        digests.append(digest)
    return digests
