"""What prefill states about a hand-off, signed: it travels in ``kv_transfer_params``.

    transfer     the id under which decode may fetch the blocks
    engine       vLLM's id of the prefill engine; incarnation: of its pool, new at every start
    layout       fingerprint of model and block shape
    tokens       length of the prompt that was computed; blocks: how many hold it
    digest       chained over scope, model and every token (`page.chain_root`)
    drain        where the guard of each prefill worker answers `drain.py`

HMAC-SHA256 over the JSON of these, with a key that only the engines of one deployment have.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FIELD = "sekisho_manifest"
"""Its name among the ``kv_transfer_params``."""
KEY_VARIABLE = "SEKISHO_GUARD_KEY"
KEY_FILE_VARIABLE = "SEKISHO_GUARD_KEY_FILE"
_KEY_BYTES_MIN = 16
_TEXT_MAX = 256
_DRAINS_MAX = 1024


class ManifestError(Exception):
    """A manifest is missing, malformed, or not signed with this deployment's key."""


class KeyMissingError(Exception):
    """No usable key; one line says what is expected."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """See above. ``incarnation`` is u64, ``digest`` 16 bytes in hexadecimal."""

    transfer: str
    engine: str
    incarnation: int
    layout: int
    tokens: int
    blocks: int
    digest: str
    drain: tuple[str, ...]


def load_key(environ: Mapping[str, str] = os.environ) -> bytes:
    """The shared key, from a variable or from the file that another names.

    Raises:
        KeyMissingError: neither is set, the file cannot be read, or the key is short.
    """
    text = environ.get(KEY_VARIABLE, "")
    path = environ.get(KEY_FILE_VARIABLE, "")
    if not text and path:
        try:
            text = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise KeyMissingError(f"{KEY_FILE_VARIABLE} cannot be read: {error}") from error
    if not text:
        raise KeyMissingError(
            f"no key: set {KEY_VARIABLE} or {KEY_FILE_VARIABLE}, alike everywhere"
        )
    if len(text.encode()) < _KEY_BYTES_MIN:
        raise KeyMissingError(f"the key has less than {_KEY_BYTES_MIN} bytes")
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"sekisho-guard").digest()


def mac(key: bytes, purpose: str, said: object) -> str:
    """HMAC-SHA256, in hexadecimal, of a JSON value under one purpose."""
    text = json.dumps([purpose, said], sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def signed(key: bytes, purpose: str, said: object, signature: object) -> bool:
    """Whether ``signature``, which may be anything, is `mac` of the rest; in constant time."""
    found = signature.encode(errors="replace") if isinstance(signature, str) else b""
    return hmac.compare_digest(mac(key, purpose, said).encode(), found)


def sign(key: bytes, manifest: Manifest) -> dict[str, Any]:
    """As it travels: JSON values only."""
    said = asdict(manifest) | {"drain": list(manifest.drain)}
    # JSON readers on the way may hold numbers as doubles: u64 travels as text.
    said["incarnation"] = f"{manifest.incarnation:016x}"
    return said | {"mac": mac(key, "manifest", said)}


def open_manifest(key: bytes, found: object) -> Manifest:
    """The manifest in ``found``, which came over the network.

    Raises:
        ManifestError: see there.
    """
    if found is None:
        raise ManifestError("no manifest: prefill did not compute this prompt under guard")
    names = {field.name for field in fields(Manifest)}
    if not isinstance(found, dict) or set(found) != names | {"mac"}:
        raise ManifestError("the manifest is malformed")
    said = {name: found[name] for name in names}
    if not signed(key, "manifest", said, found["mac"]):
        raise ManifestError("the manifest is not signed with this deployment's key")
    return _typed(said)


def _typed(said: dict[str, Any]) -> Manifest:
    """A signature says who wrote it, not that another version wrote it alike."""
    texts = all(
        isinstance(said[name], str) and len(said[name]) <= _TEXT_MAX
        for name in ("transfer", "engine", "incarnation", "digest")
    )
    numbers = all(type(said[name]) is int and said[name] >= 0 for name in _NUMBERS)
    drain = said["drain"]
    lists = isinstance(drain, list) and len(drain) <= _DRAINS_MAX
    if not (texts and numbers and lists and all(isinstance(entry, str) for entry in drain)):
        raise ManifestError("the manifest is malformed")
    try:
        incarnation = int(said["incarnation"], 16)
        bytes.fromhex(said["digest"])
    except ValueError as error:
        raise ManifestError("the manifest is malformed") from error
    return Manifest(**(said | {"incarnation": incarnation, "drain": tuple(drain)}))


_NUMBERS = ("layout", "tokens", "blocks")
