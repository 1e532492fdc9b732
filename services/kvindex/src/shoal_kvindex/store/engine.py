"""The connection to Postgres: its deadlines, its schema, and which exceptions mean that it is away."""

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from shoal_kvindex.store.tables import SCHEMA

CONNECT_S = 5
COMMAND_S = 60
MIGRATION_LOCK = 0x5_0A1_D1C7  # any number that no other program on this database locks

# What a call raises when Postgres is away, slow or leaving. A wrong statement is among them and shows in the log.
STORE_FAILURES = (SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)


def create_engine(postgres_url: str, connections: int = 3, command_s: float = COMMAND_S) -> AsyncEngine:
    """Connects on first use. The scheme may be plain ``postgresql``. Connections: one each for writing, for the
    housekeeping and for what a match recalls; whoever may wait for nobody takes an engine of its own. A statement may
    take ``command_s``."""
    url = make_url(postgres_url).set(drivername="postgresql+asyncpg")
    return create_async_engine(
        url,
        pool_size=connections,
        max_overflow=0,
        hide_parameters=True,  # no row of a statement that failed belongs in a log
        pool_timeout=CONNECT_S,
        connect_args={"timeout": CONNECT_S, "command_timeout": command_s},
    )


async def upgrade(engine: AsyncEngine) -> str:
    """Bring the schema to the newest version, and tell which that is; one process at a time does it."""
    async with engine.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        await connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        return await connection.run_sync(_run_migrations)


def _run_migrations(connection: Connection) -> str:
    config = Config()
    config.set_main_option("script_location", "shoal_kvindex:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    return str(MigrationContext.configure(connection, opts={"version_table_schema": SCHEMA}).get_current_revision())
