"""The schema is migrated by a command of its own, once for all instances, and by several at the same time."""

import asyncio
import subprocess
import sys

import pytest
from sqlalchemy import text

from shoal_kvindex.store.engine import DIRECTORY, create_engine
from shoal_runtime.postgres import migrate
from shoal_testkit.servers import postgres_running


async def version_of(database_url: str) -> str:
    engine = create_engine(database_url)
    async with engine.connect() as connection:
        version = (await connection.execute(text("SELECT version_num FROM kvindex.alembic_version"))).scalar_one()
    await engine.dispose()
    return str(version)


def run(database_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {"SHOAL_KVINDEX_POSTGRES_URL": database_url, "PATH": ""}
    argv = (sys.executable, "-m", "shoal_kvindex", *arguments)
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=50, check=False)


async def test_the_command_migrates_an_empty_database_and_a_second_one_changes_nothing(database_url: str) -> None:
    first = await asyncio.to_thread(run, database_url, "migrate")
    assert first.returncode == 0, first.stdout + first.stderr
    version = await version_of(database_url)
    assert f'"version":"{version}"' in first.stdout + first.stderr
    assert (await asyncio.to_thread(run, database_url, "migrate")).returncode == 0
    assert await version_of(database_url) == version


async def test_several_at_the_same_time_wait_for_each_other(database_url: str) -> None:
    assert await asyncio.gather(*(migrate(database_url, DIRECTORY) for _ in range(4))) == [0, 0, 0, 0]


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
    assert await migrate("postgresql://nobody@127.0.0.1:9/none", DIRECTORY, wait_s=0) == 1


def test_any_other_word_is_refused() -> None:
    result = run("postgresql://nobody@127.0.0.1:9/none", "migrat")
    assert (result.returncode, result.stderr.strip()) == (1, "usage: python -m shoal_kvindex [migrate]")
