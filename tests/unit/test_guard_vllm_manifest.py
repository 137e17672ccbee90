"""The signed manifest: what travels comes back, and nothing else is believed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sekisho.guard.vllm.manifest import (
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    KeyMissingError,
    Manifest,
    ManifestError,
    load_key,
    mac,
    open_manifest,
    sign,
)

KEY = load_key({KEY_VARIABLE: "sixteen bytes, at the least"})
PLAIN = Manifest("t1", "engine", 2**64 - 1, 7, 100, 4, "00" * 16, ("127.0.0.1:4",))


def _travelled(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_it_comes_back_as_it_was() -> None:
    assert open_manifest(KEY, _travelled(sign(KEY, PLAIN))) == PLAIN


@pytest.mark.parametrize(
    "change",
    [
        {"transfer": "t2"},
        {"engine": "other"},
        {"incarnation": "1"},
        {"layout": 8},
        {"tokens": 101},
        {"blocks": 5},
        {"digest": "11" * 16},
        {"drain": []},
        {"mac": "00" * 32},
        {"mac": "é"},
        {"mac": 3},
        {"more": 1},
        {"tokens": float("nan")},
    ],
)
def test_no_field_can_be_changed(change: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        open_manifest(KEY, sign(KEY, PLAIN) | change)


@pytest.mark.parametrize("found", [None, "text", 3, [], {}, {"mac": "x"}])
def test_what_is_no_manifest_is_refused(found: object) -> None:
    with pytest.raises(ManifestError):
        open_manifest(KEY, found)


def test_another_deployment_signs_for_itself_alone() -> None:
    other = load_key({KEY_VARIABLE: "another key of another place"})
    with pytest.raises(ManifestError, match="not signed"):
        open_manifest(KEY, sign(other, PLAIN))


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"tokens": True}, {"incarnation": "g"}])
def test_what_our_key_signed_in_another_shape_is_refused(wrong: dict[str, Any]) -> None:
    said = {k: v for k, v in sign(KEY, PLAIN).items() if k != "mac"} | wrong
    with pytest.raises(ManifestError, match="malformed"):
        open_manifest(KEY, said | {"mac": mac(KEY, "manifest", said)})


def test_a_signature_is_for_one_purpose() -> None:
    assert mac(KEY, "drain", "t1") != mac(KEY, "manifest", "t1")
    assert replace(PLAIN, tokens=1) != PLAIN


@pytest.mark.parametrize(
    ("environ", "reason"),
    [({}, "no key"), ({KEY_VARIABLE: "short"}, "less than"), ({KEY_FILE_VARIABLE: "/no"}, "read")],
)
def test_without_a_usable_key_there_is_an_error(environ: dict[str, str], reason: str) -> None:
    with pytest.raises(KeyMissingError, match=reason):
        load_key(environ)


def test_a_key_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sixteen bytes, at the least\n")
    assert load_key({KEY_FILE_VARIABLE: str(tmp_path / "key")}) == KEY
