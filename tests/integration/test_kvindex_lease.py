"""The fence of the durable directory on a real Postgres: who may write, and what is kept for whoever may next."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_contracts.errors import Unavailable
from shoal_kvindex.directory import SHARED, Directory, Namespace, ObjectKey, Part
from shoal_kvindex.ingest.gate import Cursor
from shoal_kvindex.ingest.shared_log import LogPosition
from shoal_kvindex.store.engine import create_engine, upgrade
from shoal_kvindex.store.lease import PostgresLeaseStore, check_fence
from shoal_kvindex.store.pending import PendingChanges
from shoal_kvindex.store.reader import load_directory
from shoal_kvindex.store.tables import SCHEMA
from shoal_kvindex.store.writer import DirectoryWriter, Right

SPACE = Namespace("pool", "")
PART = Part(0x01000100, 0)


def key(number: int) -> ObjectKey:
    return ObjectKey(SPACE, number.to_bytes(32, "big"), PART)


def at(seq: int, log_id: str = "log-1") -> LogPosition:
    return LogPosition(log_id, seq)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    await upgrade(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
def store(engine: AsyncEngine) -> PostgresLeaseStore:
    return PostgresLeaseStore(engine)


async def take(store: PostgresLeaseStore, holder: str) -> Right:
    row = await store.take(await store.read(), holder)
    assert row is not None
    return Right(holder, row.term)


async def known(engine: AsyncEngine, numbers: range) -> list[int]:
    directory = Directory(PendingChanges(1), 1000)
    await load_directory(engine, directory)
    return [number for number in numbers if list(directory.readable_run(SPACE, [key(number).block_hash]))]


async def test_the_lease_is_compared_and_swapped(store: PostgresLeaseStore) -> None:
    seen = await store.read()
    assert (seen.holder, seen.term, seen.written) == ("", 0, None)
    assert await store.take(seen, "one") is not None
    assert await store.take(seen, "two") is None
    beaten = await store.beat("one", 1)
    assert beaten is not None
    assert beaten.beat == 2
    assert await store.beat("one", 2) is None
    assert await store.beat("two", 1) is None
    await store.give_back("two", 1)
    assert (await store.read()).holder == "one"
    await store.give_back("one", 1)
    assert (await store.read()).holder == ""


async def test_who_lost_the_lease_writes_nothing_and_keeps_its_changes(
    engine: AsyncEngine, store: PostgresLeaseStore
) -> None:
    old = await take(store, "one")
    writer = DirectoryWriter(engine, 1000)
    directory = Directory(writer, 1000)
    directory.store(key(1), SHARED, 10, 100)
    new = await take(store, "two")
    fenced = await writer.flush(old, at(5))
    assert fenced.is_fenced
    assert await known(engine, range(3)) == []
    assert (await store.read()).written is None
    assert (await writer.flush(new, at(5))).failure is None  # as when it gets the lease again
    assert await known(engine, range(3)) == [1]
    assert (await store.read()).written == at(5)


async def test_a_takeover_waits_for_the_write_and_a_beat_does_not(
    engine: AsyncEngine, store: PostgresLeaseStore
) -> None:
    right = await take(store, "one")
    async with engine.begin() as writing:
        await check_fence(writing, *right)
        async with asyncio.timeout(2):
            assert await store.beat(*right) is not None
        taking = asyncio.ensure_future(take(store, "two"))
        await asyncio.sleep(0.3)
        assert not taking.done()
    assert await taking == Right("two", 2)


async def test_a_holder_that_stopped_in_mid_write_does_not_keep_the_lease(
    engine: AsyncEngine, store: PostgresLeaseStore
) -> None:
    right = await take(store, "one")
    connection = await engine.connect()
    await check_fence(connection, *right)  # and no word more
    async with asyncio.timeout(8):
        assert await take(store, "two") == Right("two", 2)
    await connection.invalidate()
    await connection.close()


async def test_buckets_are_let_go_when_the_holder_has_written_that_far(engine: AsyncEngine) -> None:
    writer = DirectoryWriter(engine, 1000)
    directory = Directory(writer, 1000)
    directory.store(key(1), SHARED, 10, 100)
    writer.seal(at(3), None)
    directory.store(key(2), SHARED, 10, 100)
    writer.seal(None, at(2))  # something of it is not in the log yet
    assert writer.pending_changes == 4
    writer.seal(at(6), at(3))
    assert writer.pending_changes == 2
    writer.seal(at(9), at(8))
    assert writer.pending_changes == 0


async def test_buckets_of_a_log_that_is_gone_wait_for_the_new_one(engine: AsyncEngine) -> None:
    writer = DirectoryWriter(engine, 1000)
    Directory(writer, 1000).store(key(1), SHARED, 10, 100)
    writer.seal(at(30), None)
    writer.seal(at(4, "log-2"), at(3, "log-2"))
    assert writer.pending_changes == 2
    writer.seal(at(5, "log-2"), at(4, "log-2"))
    assert writer.pending_changes == 0


async def test_who_takes_over_writes_what_is_left_in_its_order(engine: AsyncEngine, store: PostgresLeaseStore) -> None:
    writer = DirectoryWriter(engine, 1000)
    directory = Directory(writer, 1000)
    for number in range(4):
        directory.store(key(number), SHARED, 10, 100)
    writer.seal(at(4), None)
    directory.delete(key(1), SHARED)
    writer.cursor_moved("node-a", 1, 7)
    writer.seal(at(5), None)
    directory.delete(key(2), SHARED)
    assert (await writer.flush(await take(store, "two"), at(6))).failure is None
    assert await known(engine, range(5)) == [0, 3]
    loaded = await load_directory(engine, Directory(PendingChanges(1), 1000))
    assert loaded.written == at(6)
    assert loaded.cursors == {"node-a": Cursor(1, 7)}


async def test_how_far_all_is_durable_is_noted_also_when_nothing_changed(
    engine: AsyncEngine, store: PostgresLeaseStore
) -> None:
    right = await take(store, "one")
    writer = DirectoryWriter(engine, 1000)
    assert (await writer.flush(right, at(12))).failure is None
    assert (await store.read()).written == at(12)


async def test_the_bound_counts_sealed_changes_too(engine: AsyncEngine) -> None:
    writer = DirectoryWriter(engine, 10)
    directory = Directory(writer, 1000)
    for number in range(4):
        directory.store(key(number), SHARED, 10, 100)
    writer.seal(at(1), None)
    assert not writer.is_full
    directory.store(key(5), SHARED, 10, 100)
    assert writer.is_full
    directory.store(key(6), SHARED, 10, 100)
    assert writer.pending_changes == 10


async def test_without_postgres_the_lease_is_unavailable() -> None:
    engine = create_engine("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(Unavailable):
        await PostgresLeaseStore(engine).read()
    await engine.dispose()


async def test_a_directory_of_the_first_version_is_upgraded_with_what_it_has(database_url: str) -> None:
    def to_first_version(connection: Connection) -> None:
        config = Config()
        config.set_main_option("script_location", "shoal_kvindex:migrations")
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")

    engine = create_engine(database_url)
    try:
        async with engine.begin() as connection:
            await connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
            await connection.run_sync(to_first_version)
            for statement in (
                "INSERT INTO kvindex.namespaces (pool, cache_salt) VALUES ('pool', '')",
                "INSERT INTO kvindex.places (level, instance_id) VALUES (2, '')",
                "INSERT INTO kvindex.blocks VALUES (1, decode(repeat('00', 31) || '01', 'hex'), 2000000000)",
                "INSERT INTO kvindex.objects VALUES (1, decode(repeat('00', 31) || '01', 'hex'), 1, 16777472, 0, 9)",
                "INSERT INTO kvindex.cursors VALUES ('node-a', 5, 6)",
            ):
                await connection.execute(text(statement))
        await upgrade(engine)
        assert await known(engine, range(3)) == [1]
        loaded = await load_directory(engine, Directory(PendingChanges(1), 1000))
        assert (loaded.cursors, loaded.written) == ({"node-a": Cursor(5, 6)}, None)
        row = await PostgresLeaseStore(engine).read()
        assert (row.holder, row.term) == ("", 0)
    finally:
        await engine.dispose()
