"""Fail the n-th statement or commit of the tenant store: the old state or the new, never half."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nth_kit import Nth, fail_each, failing_sqlite
from sekisho.gateway.keys import StoreError
from sekisho.gateway.store import Tenant, TenantStore

Rows = dict[str, set[tuple[Any, ...]]]
ID, REVOKED = 0, 5  # columns of api_key


class World(NamedTuple):
    """A store with two tenants, made once and copied for every run."""

    folder: Path
    alpha: Tenant
    beta: Tenant
    alphas: tuple[str, str]
    betas: str


def open_store(folder: Path) -> TenantStore:
    return TenantStore.open(f"sqlite:///{folder / 'tenants.db'}", folder / "pepper")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("store")
    store = open_store(folder)
    alpha, beta = store.create_tenant("alpha"), store.create_tenant("beta")
    keys = store.create_key(alpha), store.create_key(alpha)
    made = World(folder, alpha, beta, keys, store.create_key(beta))
    store.close()
    return made


def rows(folder: Path) -> Rows:
    """Every row of every table, read without the store."""
    with closing(sqlite3.connect(folder / "tenants.db")) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {
            name: set(connection.execute(f"SELECT * FROM {name}")) for (name,) in names.fetchall()
        }


def live(found: Rows, tenant: Tenant) -> set[str]:
    """Ids of a tenant's keys that are not revoked."""
    return {row[ID] for row in found["api_key"] if row[1] == tenant.id and row[REVOKED] is None}


class Change(NamedTuple):
    """What an act does to the store, as its caller may see it afterwards."""

    tenants: int = 0
    keys: int = 0
    revoked: int = 0


class Act(NamedTuple):
    """One call, the change it makes, and whether its answer is right."""

    call: Callable[[TenantStore, World], Any]
    change: Change
    right: Callable[[Any, World], bool]


ACTS: dict[str, Act] = {
    "create_tenant": Act(
        lambda store, _: store.create_tenant("gamma"),
        Change(tenants=1),
        lambda answer, _: answer.name == "gamma",
    ),
    "ensure_tenant, new": Act(
        lambda store, _: store.ensure_tenant("gamma"),
        Change(tenants=1),
        lambda answer, _: answer.name == "gamma",
    ),
    "ensure_tenant, there": Act(
        lambda store, _: store.ensure_tenant("alpha"),
        Change(),
        lambda answer, world: answer == world.alpha,
    ),
    "create_key": Act(
        lambda store, world: store.create_key(world.alpha),
        Change(keys=1),
        lambda answer, _: answer.startswith("sk-sekisho-"),
    ),
    "tenant_of": Act(
        lambda store, world: store.tenant_of(world.alphas[0]),
        Change(),
        # A database that fails must not look like a key that nobody has.
        lambda answer, world: answer == world.alpha,
    ),
    "revoke": Act(
        lambda store, world: store.revoke(world.alphas[0]),
        Change(revoked=1),
        lambda answer, _: answer is True,
    ),
    "replace_keys": Act(
        lambda store, world: store.replace_keys(world.alpha),
        Change(keys=1, revoked=2),
        lambda answer, _: answer.startswith("sk-sekisho-"),
    ),
}


def change(before: Rows, after: Rows) -> Change:
    """How two states differ; every row that is in both but for its revocation counts as kept."""
    kept = {row[:REVOKED] for row in before["api_key"]}
    assert kept <= {row[:REVOKED] for row in after["api_key"]}
    assert before["tenant"] <= after["tenant"]
    assert before["alembic_version"] == after["alembic_version"]
    ended = {row[ID] for row in after["api_key"] if row[REVOKED] is not None}
    return Change(
        tenants=len(after["tenant"]) - len(before["tenant"]),
        keys=len(after["api_key"]) - len(before["api_key"]),
        revoked=len(ended),
    )


def check_error(error: StoreError, world: World) -> None:
    """One line that names the cause, and no key, digest or id."""
    text = str(error)
    assert "\n" not in text
    assert "disk I/O error" in text
    secrets = [*world.alphas, world.betas, world.alpha.id, "INSERT", "SELECT", "UPDATE"]
    assert not [secret for secret in secrets if secret in text]


@pytest.mark.parametrize("too_late", [False, True], ids=["fails", "fails too late"])
@pytest.mark.parametrize("name", ACTS)
def test_every_failing_statement_leaves_the_old_or_the_new_state(
    name: str,
    too_late: bool,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    act = ACTS[name]

    def run(nth: Nth) -> None:
        folder = tmp_path / str(nth.n)
        shutil.copytree(world.folder, folder)
        before = rows(folder)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3.dbapi2, "connect", failing_sqlite(nth, too_late))
            try:
                store = open_store(folder)
            except StoreError as error:
                check_error(error, world)
                assert rows(folder) == before
                return
            try:
                answer = act.call(store, world)
            except StoreError as error:
                assert nth.fired
                check_error(error, world)
                assert change(before, rows(folder)) in (Change(), act.change)
            else:
                assert act.right(answer, world)
                assert change(before, rows(folder)) == act.change
            finally:
                store.close()
        assert live(rows(folder), world.beta) == live(before, world.beta)
        # The next process finds a store that works.
        store = open_store(folder)
        assert store.tenant_of(world.betas) == world.beta
        assert store.tenant_of(store.replace_keys(world.alpha)) == world.alpha
        assert [store.tenant_of(key) for key in world.alphas] == [None, None]
        store.close()
        shutil.rmtree(folder)

    points = fail_each(run)
    with capsys.disabled():
        print(f"\n{name}: {points} statements and commits failed, one a run", end=" ")
    assert points > 5


@pytest.mark.parametrize("too_late", [False, True], ids=["fails", "fails too late"])
def test_every_failing_statement_of_a_first_start_leaves_no_half_made_tables(
    too_late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = {"tenant", "api_key", "alembic_version"}

    def run(nth: Nth) -> None:
        folder = tmp_path / str(nth.n)
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3.dbapi2, "connect", failing_sqlite(nth, too_late))
            try:
                open_store(folder).close()
            except StoreError as error:
                assert nth.fired
                assert "\n" not in str(error)
                assert "disk I/O error" in str(error)
            else:
                assert set(rows(folder)) == whole
        found = rows(folder)
        assert set(found) in (set(), whole)
        store = open_store(folder)  # the next start repairs or finds it
        tenant = store.create_tenant("alpha")
        assert store.tenant_of(store.create_key(tenant)) == tenant
        store.close()
        shutil.rmtree(folder)

    points = fail_each(run)
    with capsys.disabled():
        print(f"\nfirst start: {points} statements and commits failed, one a run", end=" ")
    assert points > 10
