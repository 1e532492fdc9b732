"""The gateway's part of the database, and its deadlines: clients wait for these statements."""

from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_gateway.store.tables import SCHEMA
from shoal_runtime import postgres

RESPONSES = postgres.Schema(SCHEMA, "shoal_gateway:migrations", lock=0x5_0A1_6A7E)
CONNECTIONS = 8
COMMAND_S = 5.0


def create_engine(postgres_url: str) -> AsyncEngine:
    """Connects on first use."""
    return postgres.create_engine(postgres_url, CONNECTIONS, COMMAND_S)


async def upgrade(postgres_url: str) -> str:
    """Bring the schema to the newest version, on a connection whose statements may take long."""
    engine = postgres.create_engine(postgres_url, connections=1, command_s=postgres.MIGRATION_S)
    try:
        return await postgres.upgrade(engine, RESPONSES)
    finally:
        await engine.dispose()
