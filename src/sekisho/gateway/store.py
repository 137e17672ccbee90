"""Tenants and their API keys in a database named by URL (SQLite; PostgreSQL by URL)."""

import secrets
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from sekisho.gateway.keys import (
    StoreError,
    key_digest,
    key_prefix,
    load_pepper,
    mint_key,
    same_digest,
)

NAME_MAX = 128

_metadata = sa.MetaData()

# Ids are random and never used twice: a number that the database gives again after a delete
# would hand one tenant's cache scope to another.
_tenant = sa.Table(
    "tenant",
    _metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(NAME_MAX), nullable=False, unique=True),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
)
_api_key = sa.Table(
    "api_key",
    _metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("tenant_id", sa.String(32), sa.ForeignKey("tenant.id"), nullable=False),
    sa.Column("prefix", sa.String(16), nullable=False, index=True),
    sa.Column("digest", sa.LargeBinary(32), nullable=False, unique=True),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("revoked_at", sa.DateTime(timezone=True)),
)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays and who owns pages. ``id`` is random, ``name`` is for people."""

    id: str
    name: str

    @property
    def scope(self) -> str:
        """The cache scope of this tenant's requests; made here, never chosen by a client."""
        return f"tenant:{self.id}"


class TenantStore:
    """Thread-safe; every method blocks, so an event loop calls it from a thread.

    Raises (all methods):
        StoreError: the database fails.
    """

    def __init__(self, engine: sa.Engine, pepper: bytes) -> None:
        self._engine = engine
        self._pepper = pepper

    @classmethod
    def open(cls, url: str, pepper_file: Path) -> Self:
        """Connect, bring the tables up to date, and load or make the pepper.

        The pepper is made only while the database holds no key: with another one, every key
        would fail without a word.
        """
        try:
            engine = sa.create_engine(url)
        except (SQLAlchemyError, ImportError):
            raise StoreError("the database URL is not understood") from None
        if engine.dialect.name == "sqlite":
            _make_transactional(engine)
        try:
            _migrate(engine)
            with engine.connect() as connection:
                empty = connection.execute(sa.select(_api_key.c.id).limit(1)).first() is None
            return cls(engine, load_pepper(pepper_file, create=empty))
        except SQLAlchemyError as error:
            engine.dispose()
            raise _failure(error) from None
        except StoreError:
            engine.dispose()
            raise

    def close(self) -> None:
        self._engine.dispose()

    def create_tenant(self, name: str) -> Tenant:
        """A new tenant.

        Raises:
            StoreError: the name is taken, empty, or above `NAME_MAX` characters.
        """
        if not 0 < len(name) <= NAME_MAX:
            raise StoreError(f"a tenant's name must have 1 to {NAME_MAX} characters")
        tenant = Tenant(secrets.token_hex(16), name)
        row = {"id": tenant.id, "name": name, "created_at": datetime.now(UTC)}
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.insert(_tenant).values(row))
        except IntegrityError:
            raise StoreError(f"a tenant named {name!r} exists") from None
        except SQLAlchemyError as error:
            raise _failure(error) from None
        return tenant

    def ensure_tenant(self, name: str) -> Tenant:
        """The tenant of that name, created if missing."""
        tenant = self._named(name)
        if tenant is not None:
            return tenant
        try:
            return self.create_tenant(name)
        except StoreError:
            tenant = self._named(name)  # another process may have been faster
            if tenant is None:
                raise
            return tenant

    def create_key(self, tenant: Tenant) -> str:
        """A new key of ``tenant``: the only time that anybody sees it."""
        key, insert = self._mint(tenant)
        try:
            with self._engine.begin() as connection:
                connection.execute(insert)
        except SQLAlchemyError as error:
            raise _failure(error) from None
        return key

    def tenant_of(self, key: str) -> Tenant | None:
        """Whose key this is, or None for one that is unknown, malformed or revoked."""
        found = self._find(key)
        return None if found is None else found[1]

    def revoke(self, key: str) -> bool:
        """End ``key`` at once; whether it was valid until now."""
        found = self._find(key)
        if found is None:
            return False
        update = sa.update(_api_key).where(
            _api_key.c.id == found[0], _api_key.c.revoked_at.is_(None)
        )
        try:
            with self._engine.begin() as connection:
                result = connection.execute(update.values(revoked_at=datetime.now(UTC)))
        except SQLAlchemyError as error:
            raise _failure(error) from None
        return result.rowcount == 1

    def replace_keys(self, tenant: Tenant) -> str:
        """End every key that ``tenant`` has, and make one new: both, or neither."""
        update = sa.update(_api_key).where(
            _api_key.c.tenant_id == tenant.id, _api_key.c.revoked_at.is_(None)
        )
        key, insert = self._mint(tenant)
        try:
            with self._engine.begin() as connection:
                connection.execute(update.values(revoked_at=datetime.now(UTC)))
                connection.execute(insert)
        except SQLAlchemyError as error:
            raise _failure(error) from None
        return key

    def _mint(self, tenant: Tenant) -> tuple[str, sa.Insert]:
        """A new key, and the statement that stores it."""
        key = mint_key()
        row = {
            "id": secrets.token_hex(16),
            "tenant_id": tenant.id,
            "prefix": key_prefix(key),
            "digest": key_digest(key, self._pepper),
            "created_at": datetime.now(UTC),
        }
        return key, sa.insert(_api_key).values(row)

    def _find(self, key: str) -> tuple[str, Tenant] | None:
        """Id of the key's row, and its tenant."""
        prefix = key_prefix(key)
        if prefix is None:
            return None
        query = (
            sa.select(_api_key.c.id, _api_key.c.digest, _tenant.c.id, _tenant.c.name)
            .join(_tenant, _tenant.c.id == _api_key.c.tenant_id)
            .where(_api_key.c.prefix == prefix, _api_key.c.revoked_at.is_(None))
        )
        digest = key_digest(key, self._pepper)
        try:
            with self._engine.connect() as connection:
                rows = connection.execute(query).all()
        except SQLAlchemyError as error:
            raise _failure(error) from None
        for key_id, stored, tenant_id, name in rows:
            if same_digest(digest, stored):
                return key_id, Tenant(tenant_id, name)
        return None

    def _named(self, name: str) -> Tenant | None:
        query = sa.select(_tenant.c.id, _tenant.c.name).where(_tenant.c.name == name)
        try:
            with self._engine.connect() as connection:
                row = connection.execute(query).first()
        except SQLAlchemyError as error:
            raise _failure(error) from None
        return None if row is None else Tenant(row[0], row[1])


def _failure(error: SQLAlchemyError) -> StoreError:
    """The driver's own line; SQLAlchemy's would add the statement's parameters, with digests."""
    cause = getattr(error, "orig", None) or type(error).__name__
    return StoreError(f"the tenant database failed: {str(cause).splitlines()[0]}")


def _make_transactional(engine: sa.Engine) -> None:
    """SQLite: foreign keys on, and BEGIN sent by us, so that a migration is one transaction
    (the driver alone begins none before DDL)."""

    def connected(connection: sa.engine.interfaces.DBAPIConnection, _record: object) -> None:
        connection.isolation_level = None
        with closing(connection.cursor()) as cursor:
            cursor.execute("PRAGMA foreign_keys = ON")
            cursor.execute("PRAGMA busy_timeout = 10000")  # milliseconds

    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    sa.event.listen(engine, "connect", connected)
    sa.event.listen(engine, "begin", begin)


def _migrate(engine: sa.Engine) -> None:
    """Of two processes that open a new database at once, the second waits and finds it done."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    immediate = engine.execution_options(begin="BEGIN IMMEDIATE")
    with immediate.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
