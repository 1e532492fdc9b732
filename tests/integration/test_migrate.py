"""Schemas are migrated by a command of their own, once for all instances, and by several at the same time."""

import asyncio
import subprocess
import sys

import pytest
from sqlalchemy import text

from shoal_gateway.store.engine import RESPONSES
from shoal_kvindex.store.engine import DIRECTORY
from shoal_runtime.postgres import Schema, create_engine, migrate
from shoal_testkit.servers import PostgresRunning, postgres_running

SCHEMAS = [pytest.param(schema, id=schema.name) for schema in (DIRECTORY, RESPONSES)]
NOWHERE = "postgresql://nobody@127.0.0.1:9/none"


@pytest.fixture
async def empty_url(postgres: PostgresRunning) -> str:
    return await postgres.create_database()


async def version_of(database_url: str, schema: Schema) -> str:
    engine = create_engine(database_url)
    async with engine.connect() as connection:
        found = await connection.execute(text(f"SELECT version_num FROM {schema.name}.alembic_version"))
    await engine.dispose()
    return str(found.scalar_one())


def run(service: str, database_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {f"SHOAL_{service.upper()}_POSTGRES_URL": database_url, "PATH": ""}
    argv = (sys.executable, "-m", f"shoal_{service}", *arguments)
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_the_command_migrates_an_empty_database_and_a_second_one_changes_nothing(
    schema: Schema, empty_url: str
) -> None:
    first = await asyncio.to_thread(run, schema.name, empty_url, "migrate")
    assert first.returncode == 0, first.stdout + first.stderr
    version = await version_of(empty_url, schema)
    assert f'"version":"{version}"' in first.stdout + first.stderr
    assert (await asyncio.to_thread(run, schema.name, empty_url, "migrate")).returncode == 0
    assert await version_of(empty_url, schema) == version


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_several_at_the_same_time_wait_for_each_other(schema: Schema, empty_url: str) -> None:
    assert await asyncio.gather(*(migrate(empty_url, schema) for _ in range(4))) == [0, 0, 0, 0]


async def test_services_share_a_database(empty_url: str) -> None:
    for schema in (DIRECTORY, RESPONSES):
        assert await migrate(empty_url, schema) == 0
    assert [await version_of(empty_url, schema) for schema in (DIRECTORY, RESPONSES)] == ["0002", "0001"]


async def test_a_postgres_that_starts_later_is_waited_for() -> None:
    async with postgres_running() as postgres:
        database_url = await postgres.create_database("later")
        postgres.kill()
        migrating = asyncio.create_task(migrate(database_url, DIRECTORY))
        await asyncio.sleep(0.1)
        await postgres.start()
        assert await migrating == 0


@pytest.mark.logs_error("schema.not_migrated")
async def test_without_postgres_it_fails_in_time() -> None:
    assert await migrate(NOWHERE, DIRECTORY, wait_s=0) == 1


@pytest.mark.parametrize("schema", SCHEMAS)
def test_any_other_word_is_refused(schema: Schema) -> None:
    result = run(schema.name, NOWHERE, "migrat")
    assert (result.returncode, result.stderr.strip()) == (1, f"usage: python -m shoal_{schema.name} [migrate]")
