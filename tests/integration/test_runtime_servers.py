"""The third-party servers start, answer, die and come back."""

import asyncio
import stat

import asyncpg
import pytest

from shoal_runtime.servers import (
    ServerCommand,
    ServerUnavailable,
    free_port,
    http_answers,
    postgres_server,
    prepare_postgres,
)
from shoal_testkit.processes import start_process
from shoal_testkit.servers import postgres_running, temporary_directory


async def _select(url: str, query: str) -> object:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


@pytest.mark.chaos
async def test_postgres_keeps_its_databases_over_a_crash_and_serves_as_soon_as_it_says_so() -> None:
    async with postgres_running() as postgres:
        first, second = await postgres.create_database("first"), await postgres.create_database()
        assert first != second
        assert await postgres.create_database("first") == first
        await _select(first, "CREATE TABLE seen (id int)")
        postgres.kill()
        await postgres.start()
        assert await _select(first, "SELECT count(*) FROM seen") == 0
        assert str(await _select(first, "SHOW server_version")).startswith("18.")
        mode = stat.S_IMODE(postgres.directory.stat().st_mode)
        assert mode == 0o700, "nothing is opened to other users for Postgres' sake"


async def test_postgres_serves_from_a_deep_folder_with_spaces() -> None:
    with temporary_directory("deep") as directory:
        home = directory / "a folder of a very long path" / ("x" * 80)
        await asyncio.to_thread(prepare_postgres, home)
        process = await start_process(postgres_server(home, free_port()), home)
        try:
            assert await _select(process.server.url, "SELECT 1") == 1
        finally:
            process.kill()


async def test_a_server_that_ends_while_it_starts_says_what_it_said() -> None:
    async def is_ready() -> bool:
        return False

    command = ServerCommand("broken", ("/bin/sh", "-c", "echo no such disk; exit 3"), is_ready, "")
    with temporary_directory("broken") as directory, pytest.raises(ServerUnavailable, match="no such disk"):
        await start_process(command, directory)


async def test_a_server_that_does_not_answer_is_given_up_and_killed() -> None:
    async def is_ready() -> bool:
        return await http_answers(free_port(), "/")

    command = ServerCommand("silent", ("/bin/sleep", "60"), is_ready, "")
    with temporary_directory("silent") as directory, pytest.raises(ServerUnavailable, match="did not answer"):
        await asyncio.wait_for(start_process(command, directory, timeout_s=0.2), 5)
