"""Tenants and keys in a real SQLite file."""

import re
import stat
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from sekisho.gateway import store as store_module
from sekisho.gateway.keys import StoreError, key_digest
from sekisho.gateway.store import Tenant, TenantStore


def open_store(folder: Path) -> TenantStore:
    return TenantStore.open(f"sqlite:///{folder / 'tenants.db'}", folder / "pepper")


def test_a_key_finds_its_tenant_only(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    alpha, beta = store.create_tenant("alpha"), store.create_tenant("beta")
    keys = {store.create_key(tenant): tenant for tenant in (alpha, beta, alpha)}
    assert len(keys) == 3
    for key, tenant in keys.items():
        assert re.fullmatch(r"sk-sekisho-[A-Za-z0-9_-]{43}", key)
        assert store.tenant_of(key) == tenant
    assert alpha.scope == f"tenant:{alpha.id}" != beta.scope
    store.close()


def test_no_other_text_is_a_key(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    key = store.create_key(store.create_tenant("alpha"))
    last = "A" if key[-1] != "A" else "B"
    wrong = [
        "",
        key[:-1],
        key + "A",
        key[:-1] + last,
        key.upper(),
        " " + key[1:],
        key[:20] + "é" * 34,
    ]
    assert [store.tenant_of(each) for each in wrong] == [None] * len(wrong)
    store.close()


def test_keys_of_one_prefix_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    alpha, beta = store.create_tenant("alpha"), store.create_tenant("beta")
    start = "sk-sekisho-" + "P" * 8
    minted = iter([start + "a" * 35, start + "b" * 35])
    monkeypatch.setattr(store_module, "mint_key", lambda: next(minted))
    first, second = store.create_key(alpha), store.create_key(beta)
    assert (store.tenant_of(first), store.tenant_of(second)) == (alpha, beta)
    assert store.tenant_of(start + "c" * 35) is None
    store.close()


def test_revoking_ends_one_key(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    alpha = store.create_tenant("alpha")
    first, second = store.create_key(alpha), store.create_key(alpha)
    assert store.revoke(first)
    assert not store.revoke(first)
    assert not store.revoke("sk-sekisho-" + "A" * 43)
    assert store.tenant_of(first) is None
    assert store.tenant_of(second) == alpha
    store.close()


def test_replacing_keys_ends_those_of_one_tenant(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    alpha, beta = store.create_tenant("alpha"), store.create_tenant("beta")
    old, other = store.create_key(alpha), store.create_key(beta)
    new = store.replace_keys(alpha)
    assert [store.tenant_of(key) for key in (old, new, other)] == [None, alpha, beta]
    store.close()


def test_all_is_there_after_reopening(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    alpha = store.ensure_tenant("alpha")
    key = store.create_key(alpha)
    store.close()
    again = open_store(tmp_path)
    assert again.ensure_tenant("alpha") == alpha
    assert again.tenant_of(key) == alpha
    again.close()


def test_neither_file_alone_holds_a_key(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    key = store.create_key(store.create_tenant("alpha"))
    store.close()
    database = (tmp_path / "tenants.db").read_bytes()
    pepper = (tmp_path / "pepper").read_bytes()
    assert stat.S_IMODE((tmp_path / "pepper").stat().st_mode) == 0o600
    assert len(pepper) == 32
    assert pepper not in database
    assert key.encode() not in database
    assert key.encode()[20:] not in database
    assert key_digest(key, pepper) in database
    assert key_digest(key, bytes(32)) not in database


@pytest.mark.parametrize(("content", "mode"), [(b"short", 0o600), (bytes(32), 0o644)])
def test_a_bad_pepper_refuses_to_open(tmp_path: Path, content: bytes, mode: int) -> None:
    (tmp_path / "pepper").write_bytes(content)
    (tmp_path / "pepper").chmod(mode)
    with pytest.raises(StoreError, match="pepper"):
        open_store(tmp_path)


def test_a_lost_pepper_is_not_replaced_while_keys_exist(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.create_key(store.create_tenant("alpha"))
    store.close()
    (tmp_path / "pepper").unlink()
    with pytest.raises(StoreError, match="pepper"):
        open_store(tmp_path)
    assert not (tmp_path / "pepper").exists()


@pytest.mark.parametrize("url", ["", "nonsense", "nosuch://x", "sqlite:////nonexistent/x/t.db"])
def test_a_bad_url_is_one_line(tmp_path: Path, url: str) -> None:
    with pytest.raises(StoreError) as caught:
        TenantStore.open(url, tmp_path / "pepper")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "x" * 129, "alpha"])
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path)
    store.create_tenant("alpha")
    with pytest.raises(StoreError, match="tenant"):
        store.create_tenant(name)
    store.close()


def test_a_key_needs_its_tenant(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreError):
        store.create_key(Tenant("0" * 32, "ghost"))
    store.close()


def test_many_open_a_new_database_at_once(tmp_path: Path) -> None:
    found: list[Tenant | Exception] = []
    keys: list[str] = []

    def work() -> None:
        try:
            store = open_store(tmp_path)
            found.append(store.ensure_tenant("alpha"))
            keys.append(store.create_key(store.ensure_tenant("alpha")))
            store.close()
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(repr, found))) == 1
    store = open_store(tmp_path)
    assert [store.tenant_of(key) for key in keys] == [found[0]] * 6
    store.close()


def test_the_migrations_make_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'tenants.db'}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, store_module._metadata) == []
    engine.dispose()
