"""The connection to Postgres and the directory's schema in it."""

from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_kvindex.store.tables import SCHEMA
from shoal_runtime import postgres
from shoal_runtime.postgres import STORE_FAILURES, create_engine

__all__ = ["DIRECTORY", "STORE_FAILURES", "create_engine", "upgrade"]

DIRECTORY = postgres.Schema(SCHEMA, "shoal_kvindex:migrations", lock=0x5_0A1_D1C7)


async def upgrade(engine: AsyncEngine) -> str:
    """Bring the schema to the newest version, and tell which that is; one process at a time does it."""
    return await postgres.upgrade(engine, DIRECTORY)
