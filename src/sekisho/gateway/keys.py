"""API keys: 256 random bits, shown once, kept as a keyed hash.

The hash is keyed BLAKE2b and not a password hash: the key is random, so there is nothing to
guess, and a slow hash on every request would be a denial of service. The key of the hash, the
pepper, lies in a file beside the database, so that the database alone verifies nothing.
"""

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

KEY_START = "sk-sekisho-"
KEY_LENGTH = len(KEY_START) + 43
PREFIX_LENGTH = 8  # characters after KEY_START that the store keeps readable, to find the row
PEPPER_BYTES = 32


class StoreError(Exception):
    """The tenant store cannot be opened or used; one line that says why."""


def mint_key() -> str:
    """A new key: `KEY_START` and 32 random bytes in base64url without padding."""
    random = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    return KEY_START + random


def key_prefix(key: str) -> str | None:
    """What the store finds a key by, or None for what is no key of this server."""
    if len(key) != KEY_LENGTH or not key.startswith(KEY_START) or not key.isascii():
        return None
    return key[len(KEY_START) : len(KEY_START) + PREFIX_LENGTH]


def key_digest(key: str, pepper: bytes) -> bytes:
    """32 bytes: BLAKE2b of the whole key, keyed with the pepper."""
    return hashlib.blake2b(
        key.encode(), key=pepper, digest_size=32, person=b"sekisho-api-key"
    ).digest()


def same_digest(left: bytes, right: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(left, right)


def load_pepper(path: Path, create: bool) -> bytes:
    """The 32 bytes in ``path``, which is made, mode 0600, if missing and ``create``.

    Raises:
        StoreError: missing, of another length, or readable by others than its owner.
    """
    try:
        if create and not path.exists():
            _create_pepper(path)
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            pepper = file.read()
    except OSError as error:
        raise StoreError(f"cannot read the pepper file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise StoreError(f"the pepper file {path} is open to others (mode {mode:04o}, not 0600)")
    if len(pepper) != PEPPER_BYTES:
        raise StoreError(f"the pepper file {path} has {len(pepper)} bytes, not {PEPPER_BYTES}")
    return pepper


def _create_pepper(path: Path) -> None:
    """Appears whole or not at all; of two processes at once, the first one's stays."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(PEPPER_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
