"""Servers that integration tests share: started once a session, at the first test that asks.

Tests stay apart by names: a database of its own each, and a pool name of its own on NATS. A test that kills a
server starts one for itself (``shoal_testkit.servers``).
"""

from collections.abc import AsyncIterator

import pytest_asyncio
from nats import connect
from nats.js.errors import NotFoundError

from shoal_contracts import subjects
from shoal_testkit.servers import NatsRunning, PostgresRunning, nats_running, postgres_running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats() -> AsyncIterator[NatsRunning]:
    async with nats_running() as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def postgres() -> AsyncIterator[PostgresRunning]:
    async with postgres_running() as running:
        yield running


@pytest_asyncio.fixture
async def database_url(postgres: PostgresRunning, nats: NatsRunning) -> str:
    """An empty database, as the SQLAlchemy URL that services take, and an empty log: a directory has both."""
    client = await connect(nats.url)
    try:
        await client.jetstream().delete_stream(subjects.INDEX_STREAM)
    except NotFoundError:
        pass
    finally:
        await client.close()
    return await postgres.create_database()
