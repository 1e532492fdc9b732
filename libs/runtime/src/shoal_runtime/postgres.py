"""Postgres for services that keep something: the connection, a schema of one's own, and its migrations.

Services may share a database: each has its tables, and alembic's record of their version, in a schema of its name.
Needs the extra ``postgres`` of this package; who keeps nothing does not import this module.
docs/decisions/0009-sql-is-off-the-hot-path.md
"""

import asyncio
from dataclasses import dataclass

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from pydantic import Field, SecretStr, field_validator
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from shoal_runtime import logs
from shoal_runtime.settings import EnvironmentSettings, ServiceSettings

log = logs.get_logger(__name__)

CONNECT_S = 5
COMMAND_S = 60
WAIT_S = 60.0
RETRY_S = 1.0
MIGRATION_S = 3600.0  # for one statement of it, and to wait for another process that migrates

# What a call raises when Postgres is away, slow or leaving. A wrong statement is among them and shows in the log.
STORE_FAILURES = (SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)


class PostgresSettings(EnvironmentSettings):
    """Where a service keeps what must outlive it."""

    url: SecretStr = Field(
        SecretStr("postgresql://postgres@127.0.0.1:5432/postgres"),
        description="Database in which this service keeps its tables, in a schema of its own; set it to yours.",
    )
    password: SecretStr = Field(
        SecretStr(""), description="Its password, when the url holds none; by ..._PASSWORD_FILE from a file."
    )

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(("postgresql://", "postgresql+asyncpg://")):
            raise ValueError("must be postgresql://user@host:port/database")
        return url

    @property
    def database_url(self) -> str:
        """The database with its password, for ``create_engine`` and for nobody's log."""
        url = make_url(self.url.get_secret_value())
        if password := self.password.get_secret_value():
            url = url.set(password=password)
        return url.render_as_string(hide_password=False)


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one service. ``lock`` is any number that no other program on this database locks."""

    name: str
    migrations: str  # where alembic finds them: "package:folder"
    lock: int


def create_engine(postgres_url: str, connections: int = 3, command_s: float = COMMAND_S) -> AsyncEngine:
    """Connects on first use. The scheme may be plain ``postgresql``. Whoever may wait for nobody takes an engine of
    its own. A statement may take ``command_s``."""
    url = make_url(postgres_url).set(drivername="postgresql+asyncpg")
    return create_async_engine(
        url,
        pool_size=connections,
        max_overflow=0,
        hide_parameters=True,  # no row of a statement that failed belongs in a log
        pool_timeout=CONNECT_S,
        connect_args={"timeout": CONNECT_S, "command_timeout": command_s},
    )


async def upgrade(engine: AsyncEngine, schema: Schema) -> str:
    """Bring the schema to the newest version, and tell which that is; one process at a time does it."""
    async with engine.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": schema.lock})
        await connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {schema.name}"))
        return await connection.run_sync(_run_migrations, schema)


def _run_migrations(connection: Connection, schema: Schema) -> str:
    config = Config()
    config.set_main_option("script_location", schema.migrations)
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    context = MigrationContext.configure(connection, opts={"version_table_schema": schema.name})
    return str(context.get_current_revision())


def run_migration(settings: ServiceSettings, database: PostgresSettings, schema: Schema) -> int:
    """``python -m shoal_<service> migrate``: the exit code, 1 when Postgres did not let us within ``WAIT_S``; the log
    says what to do.

    For rollouts of several instances: it runs once before them, so that a migration that takes long or fails shows as
    itself, and not as instances that never become ready. They migrate at their start all the same, which then does
    nothing; so a single instance needs nobody to run this first. It waits for a Postgres that is still starting.
    """
    logs.configure(settings.log_level, schema.name, settings.instance_id or "migrate")
    return asyncio.run(migrate(database.database_url, schema))


async def migrate(postgres_url: str, schema: Schema, *, wait_s: float = WAIT_S) -> int:
    """Try until it works or ``wait_s`` has passed. A migration is one transaction, so a failed one leaves nothing."""
    until_s = asyncio.get_running_loop().time() + wait_s
    engine = create_engine(postgres_url, connections=1, command_s=MIGRATION_S)
    try:
        log.info("schema.migrated", version=await _upgrade_until(engine, schema, until_s))
    except STORE_FAILURES as failure:
        advice = f"check SHOAL_{schema.name.upper()}_POSTGRES_URL and Postgres"
        log.error("schema.not_migrated", reason=str(failure), do=advice)
        return 1
    finally:
        await engine.dispose()
    return 0


async def _upgrade_until(engine: AsyncEngine, schema: Schema, until_s: float) -> str:
    while True:
        try:
            return await upgrade(engine, schema)
        except STORE_FAILURES as failure:
            if asyncio.get_running_loop().time() >= until_s:
                raise
            log.warning("schema.waiting", reason=type(failure).__name__)
        await asyncio.sleep(RETRY_S)
