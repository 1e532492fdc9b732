"""The durable directory on a real Postgres: what was written is there after a restart, and an outage loses nothing."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_kvindex.directory import SHARED, Directory, Level, Namespace, ObjectKey, Part, Place, Readable
from shoal_kvindex.ingest.gate import Cursor
from shoal_kvindex.store.engine import create_engine, upgrade
from shoal_kvindex.store.lease import PostgresLeaseStore
from shoal_kvindex.store.pending import PendingChanges
from shoal_kvindex.store.reader import load_directory
from shoal_kvindex.store.tables import SCHEMA, metadata
from shoal_kvindex.store.writer import DirectoryWriter, Right
from shoal_testkit.servers import postgres_running

SPACE, TENANT = Namespace("pool", ""), Namespace("pool", "tenant")
NODE_A, NODE_B = Place(Level.L1, "node-a"), Place(Level.L1, "node-b")
PART = Part(0x01000100, 0)
RIGHT = Right("holder", 1)


def key(number: int, namespace: Namespace = SPACE, part: Part = PART) -> ObjectKey:
    return ObjectKey(namespace, number.to_bytes(32, "big"), part)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    await upgrade(engine)
    assert await take_lease(engine, "holder") == RIGHT
    yield engine
    await engine.dispose()


async def loaded(engine: AsyncEngine, max_blocks: int = 100_000) -> tuple[Directory, Mapping[str, Cursor]]:
    directory = Directory(PendingChanges(1), max_blocks)
    return directory, (await load_directory(engine, directory)).cursors


def readable(directory: Directory, number: int, namespace: Namespace = SPACE) -> Readable | None:
    return next(directory.readable_run(namespace, [number.to_bytes(32, "big")]), None)


async def rows(engine: AsyncEngine, table: str) -> int:
    async with engine.connect() as connection:
        return int((await connection.execute(text(f"SELECT count(*) FROM kvindex.{table}"))).scalar_one())


async def written(directory_writer: DirectoryWriter, right: Right = RIGHT) -> int:
    result = await directory_writer.flush(right, None)
    assert result.failure is None
    return result.changes


async def take_lease(engine: AsyncEngine, holder: str) -> Right:
    store = PostgresLeaseStore(engine)
    row = await store.take(await store.read(), holder)
    assert row is not None
    return Right(holder, row.term)


async def test_a_restart_gives_the_map_back(engine: AsyncEngine) -> None:
    writer = DirectoryWriter(engine, 100_000)
    directory = Directory(writer, 100_000)
    for number in range(3000):  # more than one piece of the COPY
        directory.store(key(number), SHARED, 10, 1000 + number)
    directory.store(key(1), NODE_A, 10, 5)
    directory.store(key(1, TENANT), NODE_B, 10, 77)
    directory.store(key(9000, part=Part(0x02000200, 0)), SHARED, 10, 5)
    directory.renew(SPACE, [key(2).block_hash], lambda _: 9999)
    writer.cursor_moved("node-a", 3, 14)
    await written(writer)

    again, cursors = await loaded(engine)
    assert again.block_count == directory.block_count == 3002
    for number in range(3000):
        assert readable(again, number) == readable(directory, number)
        block_hash = key(number).block_hash
        assert again.expires_at_s(SPACE, block_hash) == directory.expires_at_s(SPACE, block_hash)
    assert readable(again, 1, TENANT) == Readable(False, frozenset({"node-b"}))
    assert again.expires_at_s(SPACE, key(2).block_hash) == 9999
    assert readable(again, 9000) == Readable(False, frozenset())
    assert cursors == {"node-a": Cursor(3, 14)}


async def test_deletes_and_dropped_servers_are_durable_and_leave_no_rows(engine: AsyncEngine) -> None:
    writer = DirectoryWriter(engine, 1000)
    directory = Directory(writer, 1000)
    for number in range(4):
        directory.store(key(number), NODE_A, 10, 100)
    directory.store(key(0), SHARED, 10, 100)
    directory.store(key(1), NODE_B, 10, 100)
    await written(writer)
    directory.drop_l1("node-a")
    directory.store(key(3), NODE_A, 10, 100)  # the next life, in the same write as the drop
    directory.delete(key(1), NODE_B)
    await written(writer)

    again, _ = await loaded(engine)
    assert readable(again, 0) == Readable(True, frozenset())
    assert readable(again, 3) == Readable(False, frozenset({"node-a"}))
    assert again.block_count == 2
    assert (await rows(engine, "blocks"), await rows(engine, "objects")) == (2, 2)


async def test_a_smaller_map_keeps_what_is_wanted_longest(engine: AsyncEngine) -> None:
    writer = DirectoryWriter(engine, 10_000)
    directory = Directory(writer, 10_000)
    for number in range(1000):
        directory.store(key(number), SHARED, 10, 100 + number)
    await written(writer)
    again, _ = await loaded(engine, max_blocks=200)
    assert again.block_count <= 200
    assert readable(again, 999) is not None
    assert readable(again, 0) is None


async def test_an_expiry_in_postgres_never_goes_back(engine: AsyncEngine) -> None:
    writer = DirectoryWriter(engine, 1000)
    Directory(writer, 10).store(key(1), SHARED, 10, 900)
    await written(writer)
    Directory(writer, 10).store(key(1), NODE_A, 10, 100)  # as after the bound dropped the block from the map
    await written(writer)
    again, _ = await loaded(engine)
    assert again.expires_at_s(SPACE, key(1).block_hash) == 900


async def test_a_write_that_is_cut_short_is_written_by_the_next_one(engine: AsyncEngine) -> None:
    for delay_s in (0.0, 0.002, 0.004, 0.008, 0.016):
        writer = DirectoryWriter(engine, 1000)
        directory = Directory(writer, 1000)
        namespace = Namespace(f"pool-{delay_s}", "")  # a name that the first write has to number
        directory.store(key(1, namespace), SHARED, 10, 100)
        cut_short = asyncio.create_task(writer.flush(RIGHT, None))
        await asyncio.sleep(delay_s)
        cut_short.cancel()
        await asyncio.wait([cut_short])
        await written(writer)
        again, _ = await loaded(engine)
        assert readable(again, 1, namespace) == Readable(True, frozenset())


async def test_many_moves_of_objects_in_one_write_lose_no_block(engine: AsyncEngine) -> None:
    writer = DirectoryWriter(engine, 200_000)
    directory = Directory(writer, 200_000)
    for number in range(12_000):  # more than one slice of a write
        directory.store(key(number), NODE_A, 10, 100)
    await written(writer)
    for number in range(12_000):
        directory.delete(key(number), NODE_A)
    for number in range(12_000):
        directory.store(key(number), SHARED, 10, 100)
    await written(writer)
    assert (await rows(engine, "blocks"), await rows(engine, "objects")) == (12_000, 12_000)
    again, _ = await loaded(engine)
    assert again.block_count == 12_000


async def test_an_outage_keeps_the_changes_and_overflow_is_counted() -> None:
    async with postgres_running() as postgres:
        engine = create_engine(await postgres.create_database())
        await upgrade(engine)
        assert await take_lease(engine, "holder") == RIGHT
        writer = DirectoryWriter(engine, 100)
        directory = Directory(writer, 1000)
        directory.store(key(1), SHARED, 10, 100)
        directory.store(key(1), NODE_A, 10, 100)
        await written(writer)
        postgres.kill()
        directory.drop_l1("node-a")
        directory.store(key(2), SHARED, 10, 100)
        assert (await writer.flush(RIGHT, None)).failure is not None
        for number in range(3, 203):
            directory.store(key(number), SHARED, 10, 100)
        failed = await writer.flush(RIGHT, None)
        assert failed.failure is not None
        assert failed.overflowed_changes == 151  # 49 blocks of two changes each found room
        assert writer.is_full
        await postgres.start()
        async with asyncio.timeout(20):
            while (await writer.flush(RIGHT, None)).failure is not None:
                await asyncio.sleep(0.1)
        assert writer.pending_changes == 0
        again, _ = await loaded(engine)
        assert readable(again, 1) == Readable(True, frozenset())
        assert again.block_count == 1 + 1 + 49
        await engine.dispose()


async def test_the_migrations_make_what_the_tables_say(engine: AsyncEngine) -> None:
    def differences(connection: Connection) -> list[object]:
        options = {
            "include_schemas": True,
            "include_name": lambda name, kind, _: kind != "schema" or name == SCHEMA,
            "version_table_schema": SCHEMA,
        }
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))

    await upgrade(engine)  # again: nothing to do
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_the_load_may_take_longer_than_any_other_command(engine: AsyncEngine, database_url: str) -> None:
    writer = DirectoryWriter(engine, 100_000)
    Directory(writer, 100).store(key(1), SHARED, 10, 100)
    await written(writer)
    command_s = 0.3
    hurried = create_engine(database_url, command_s=command_s)
    try:
        async with engine.begin() as connection:
            await connection.execute(text("LOCK kvindex.objects IN ACCESS EXCLUSIVE MODE"))
            loading = asyncio.ensure_future(loaded(hurried))
            await asyncio.sleep(3 * command_s)
            assert not loading.done()
        directory, _ = await loading
        assert directory.block_count == 1
    finally:
        await hurried.dispose()
