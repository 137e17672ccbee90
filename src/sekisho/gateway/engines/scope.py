"""The cache key of a tenant, as a foreign engine is told it."""

import hashlib
from pathlib import Path

from sekisho.gateway.keys import load_pepper

SECRET_FILE = "scope-secret"


class ScopeKeys:
    """Keyed hashes of scopes: equal for a tenant's requests, and nobody outside can compute one.

    The scope itself never leaves the gateway, and nothing of a client's request enters the hash.
    (vllm#53347: where a client chooses the salt, a prefix cache is no boundary.)
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def open(cls, state_dir: Path) -> "ScopeKeys":
        """With the secret of this deployment, made at the first start; a lost one costs cached
        prefixes and nothing else.

        Raises:
            StoreError: it is unreadable, or others can read it.
        """
        return cls(load_pepper(state_dir / SECRET_FILE, create=True))

    def key(self, scope: str) -> str:
        """64 hexadecimal digits: BLAKE2b of ``scope``, keyed."""
        return hashlib.blake2b(
            scope.encode(), key=self._secret, digest_size=32, person=b"sekisho-scope"
        ).hexdigest()
