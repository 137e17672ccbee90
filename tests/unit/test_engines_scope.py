"""The cache key that a foreign engine is told of a tenant."""

from pathlib import Path

import pytest

from sekisho.gateway.engines.scope import SECRET_FILE, ScopeKeys
from sekisho.gateway.keys import StoreError


def test_two_tenants_have_keys_of_their_own_that_do_not_show_them(tmp_path: Path) -> None:
    keys = ScopeKeys.open(tmp_path)
    first, second = keys.key("tenant:alpha"), keys.key("tenant:beta")
    assert first != second
    assert len(first) == len(second) == 64
    assert "alpha" not in first


def test_a_tenant_keeps_his_key_over_a_restart_and_has_another_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = ScopeKeys.open(tmp_path).key("tenant:alpha")
    assert ScopeKeys.open(tmp_path).key("tenant:alpha") == first
    assert ScopeKeys.open(tmp_path / "other").key("tenant:alpha") != first


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    ScopeKeys.open(tmp_path)
    assert (tmp_path / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / SECRET_FILE).chmod(0o644)
    with pytest.raises(StoreError, match="open to others"):
        ScopeKeys.open(tmp_path)
