"""Blocks that the map's bound dropped come back from a real Postgres, in time or not at all."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_kvindex.directory import SHARED, Directory, Level, Namespace, ObjectKey, Part, Place, PlaceCount, Readable
from shoal_kvindex.metrics import RECALLS
from shoal_kvindex.store import recall
from shoal_kvindex.store.engine import create_engine, upgrade
from shoal_kvindex.store.pending import PendingChanges
from shoal_kvindex.store.reader import SharedReader, load_directory
from shoal_kvindex.store.recall import DurableRecall
from shoal_runtime.clock import SystemClock

SPACE, TENANT = Namespace("pool", ""), Namespace("pool", "tenant")
RANKS = (Part(0x02000200, 0), Part(0x02010201, 0))
NODE = Place(Level.L1, "node-a")
FAR_S = 4_000_000_000
WELL_S = 10.0


def block(number: int) -> bytes:
    return bytes([number % 256]) + number.to_bytes(31, "big")


INSERTS = (
    "INSERT INTO kvindex.namespaces (pool, cache_salt) VALUES (:pool, :salt) ON CONFLICT DO NOTHING",
    "INSERT INTO kvindex.places (level, instance_id) VALUES (:level, :at) ON CONFLICT DO NOTHING",
    """
    INSERT INTO kvindex.blocks
    SELECT namespace_id, hash, :expires FROM kvindex.namespaces, unnest(CAST(:hashes AS bytea[])) AS hash
    WHERE pool = :pool AND cache_salt = :salt ON CONFLICT DO NOTHING
    """,
    """
    INSERT INTO kvindex.objects
    SELECT namespace_id, hash, place_id, rank, 0, 10
    FROM kvindex.namespaces, kvindex.places, unnest(CAST(:hashes AS bytea[])) AS hash,
         unnest(CAST(:ranks AS bigint[])) AS rank
    WHERE pool = :pool AND cache_salt = :salt AND level = :level AND instance_id = :at
    """,
)


async def put(
    engine: AsyncEngine, namespace: Namespace, numbers: Iterable[int], place: Place = SHARED, expires_at_s: int = FAR_S
) -> None:
    values = {
        "pool": namespace.pool,
        "salt": namespace.cache_salt,
        "level": int(place.level),
        "at": place.instance_id,
        "hashes": [block(number) for number in numbers],
        "ranks": [part.kv_rank for part in RANKS],
        "expires": expires_at_s,
    }
    async with engine.begin() as connection:
        for insert in INSERTS:
            await connection.execute(text(insert), {name: values[name] for name in values if f":{name}" in insert})


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    await upgrade(engine)
    yield engine
    await engine.dispose()


def a_directory(max_blocks: int = 1000) -> Directory:
    return Directory(PendingChanges(1000), max_blocks)


async def test_the_load_restores_ranks_places_and_sizes(engine: AsyncEngine) -> None:
    await put(engine, SPACE, range(2500))  # more than one step
    await put(engine, SPACE, [7], NODE)
    await put(engine, TENANT, [7], expires_at_s=5)
    directory = a_directory(100_000)
    await load_directory(engine, directory)
    assert directory.block_count == 2501
    assert directory.is_complete("pool")
    run = list(directory.readable_run(SPACE, [block(number) for number in range(2500)]))
    assert run == [Readable(True, frozenset({"node-a"} if number == 7 else ())) for number in range(2500)]
    assert directory.expires_at_s(TENANT, block(7)) == 5
    assert directory.count(SHARED) == PlaceCount(2501, 5002, 50_020)


async def test_a_map_that_is_too_small_keeps_what_is_wanted_longest_and_knows_that_it_is_not_complete(
    engine: AsyncEngine,
) -> None:
    for number in range(60):
        await put(engine, SPACE, [number], expires_at_s=FAR_S + number)
    directory = a_directory(20)
    await load_directory(engine, directory)
    assert not directory.is_complete("pool")
    known = [number for number in range(60) if directory.expires_at_s(SPACE, block(number))]
    assert known == list(range(60))[-len(known) :]
    assert 15 <= len(known) <= 20


async def test_only_shared_copies_that_have_not_expired_are_found_and_none_without_the_first(
    engine: AsyncEngine,
) -> None:
    await put(engine, SPACE, [1, 2, 4])
    await put(engine, SPACE, [3], expires_at_s=1000)
    await put(engine, SPACE, [5], NODE)
    reader = SharedReader(engine)
    everything = [block(number) for number in range(1, 8)]
    found = await reader.find(
        [(SPACE, everything), (SPACE, [block(9), block(1)]), (TENANT, everything), (SPACE, [block(4)])], now_s=2000
    )
    expected = {ObjectKey(SPACE, block(number), part) for number in (1, 2, 4) for part in RANKS}
    assert {key for key, _ in found} == expected
    assert {expires_at_s for _, expires_at_s in found} == {FAR_S}
    assert await reader.find([(TENANT, everything)], now_s=0) == []


async def test_a_recall_brings_blocks_back_and_a_late_one_serves_the_next(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(engine, SPACE, [1, 2])
    directory = a_directory()
    hurried = DurableRecall(engine, directory, SystemClock(), deadline_s=0.0)
    running = asyncio.create_task(hurried.run())
    await hurried.recall(SPACE, [block(1)])
    async with asyncio.timeout(WELL_S):
        while directory.expires_at_s(SPACE, block(1)) is None:
            await asyncio.sleep(0.01)
    running.cancel()

    patient = DurableRecall(engine, directory, SystemClock(), deadline_s=WELL_S)
    running = asyncio.create_task(patient.run())
    await asyncio.gather(*(patient.recall(SPACE, [block(number)]) for number in (2, 3)))
    assert directory.expires_at_s(SPACE, block(2)) == FAR_S
    assert directory.expires_at_s(SPACE, block(3)) is None
    monkeypatch.setattr(recall, "MAX_ASKED_BLOCKS", 1)
    before = RECALLS.labels("refused")._value.get()
    await patient.recall(SPACE, [block(4), block(5)])
    assert RECALLS.labels("refused")._value.get() == before + 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_nobody_waits_for_a_postgres_that_is_away() -> None:
    engine = create_engine("postgresql://postgres@127.0.0.1:1/none")
    away = DurableRecall(engine, a_directory(), SystemClock(), deadline_s=WELL_S)
    running = asyncio.create_task(away.run())
    before = RECALLS.labels("away")._value.get()
    async with asyncio.timeout(WELL_S):
        for _ in range(3):
            await away.recall(SPACE, [block(1)])
    assert RECALLS.labels("away")._value.get() == before + 3
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engine.dispose()
