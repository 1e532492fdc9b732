"""The directory comes back: from a dump, from a dump that is old, and from a listing of the store alone."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from lmcache.v1.distributed.api import ObjectKey
from sqlalchemy import text

from shoal_contracts.v1 import common_pb2 as pb
from shoal_engine.scripted import (
    BlockKey,
    BlockStore,
    Prefetcher,
    ReporterSettings,
    ServedPool,
    SharedFolder,
    StoreReporter,
    StoreServer,
    Timing,
)
from shoal_kvblocks import block_hashes, split_hashes
from shoal_kvindex.settings import DAY_S
from shoal_kvindex.store.engine import create_engine
from shoal_kvstore.folder import ObjectFolder, Stored
from shoal_kvstore.object_file import HEADER_BYTES
from shoal_runtime.clock import SystemClock
from shoal_runtime.servers import free_port, postgres_program
from shoal_testkit.servers import PostgresRunning, lmcache_running, nats_running

POOL = "pool-of-the-test"
PROMPT = block_hashes(bytes(4 * 128 * 20), 128)
OTHER = block_hashes(b"\1\0\0\0" * 128 * 20, 128)
BLOCK_BYTES = 1024
KV_RANK = 0x01000100

IndexInstance: TypeAlias = Any  # of conftest.py, which cannot be imported
StartKvindex: TypeAlias = Callable[..., AbstractAsyncContextManager[IndexInstance]]
Eventually: TypeAlias = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
Becomes: TypeAlias = Callable[[int, Callable[[], Awaitable[int]]], Awaitable[None]]


@dataclass
class Store:
    """A simulated lmcache server on a folder, which outlives it."""

    blocks: BlockStore

    def keep(self, hashes: bytes) -> None:
        self.blocks.store(keys_of(hashes))

    def lose(self, hashes: bytes) -> None:
        self.blocks.delete(keys_of(hashes), "l2")

    def shared(self) -> set[bytes]:
        return {found.key.block_hash for found in self.blocks.objects("l2")}


@asynccontextmanager
async def store_running(folder: Path, port: int) -> AsyncIterator[Store]:
    """Registered; beats fast, so that a new index knows it soon."""
    clock = SystemClock()
    settings = ReporterSettings(
        "node-a", f"http://127.0.0.1:{port}", heartbeat_s=0.2, flush_s=0.05, block_bytes=BLOCK_BYTES
    )
    reporter = StoreReporter(settings, clock)
    blocks = BlockStore(SharedFolder(folder), block_bytes=BLOCK_BYTES, listener=reporter.listen)
    server = StoreServer(blocks, ServedPool(POOL, 128), Prefetcher(blocks, Timing(), clock).bring, reporter)
    await server.start()
    try:
        yield Store(blocks)
    finally:
        await server.stop()


def keys_of(hashes: bytes) -> list[BlockKey]:
    return [BlockKey(POOL, block_hash) for block_hash in split_hashes(hashes)]


async def hit(index: IndexInstance, hashes: bytes = PROMPT) -> int:
    return int((await index.match(hashes, traffic_class=pb.PROBE)).hit_blocks)


async def rows(database_url: str) -> dict[bytes, int]:
    """The shared level as Postgres has it: expiry by block."""
    statement = text("""
        SELECT b.block_hash, b.expires_at_s FROM kvindex.blocks b
        JOIN kvindex.objects o USING (namespace_id, block_hash) JOIN kvindex.places p USING (place_id) WHERE p.level = 2
    """)
    engine = create_engine(database_url)
    try:
        async with engine.connect() as connection:
            return {bytes(row.block_hash): row.expires_at_s for row in await connection.execute(statement)}
    finally:
        await engine.dispose()


async def run(program: str, database_url: str, *arguments: str) -> None:
    """A program of Postgres, as the operations page gives it."""
    url = database_url.replace("postgresql+asyncpg", "postgresql")
    argv = [postgres_program(program), "--dbname", url, *arguments]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


async def dump(database_url: str, file: Path) -> None:
    await run("pg_dump", database_url, "--schema", "kvindex", "--format", "custom", "--file", str(file))


async def restore(database_url: str, file: Path) -> None:
    await run("pg_restore", database_url, "--clean", "--if-exists", "--exit-on-error", str(file))


@dataclass
class Site:
    """What outlives the processes: a folder of blocks, and the port where stores report."""

    folder: Path
    port: int
    start_kvindex: StartKvindex

    @asynccontextmanager
    async def running(self, database_url: str) -> AsyncIterator[tuple[IndexInstance, Store]]:
        """An index that knows only what this database tells (its NATS is new), and one store."""
        async with nats_running() as nats:
            changes = {"nats_url": nats.url, "postgres": {"url": database_url}, "coordinator_port": self.port}
            async with (
                self.start_kvindex("kvindex-1", **changes) as index,
                store_running(self.folder, self.port) as store,
            ):
                yield index, store


@pytest.fixture
def site(tmp_path: Path, start_kvindex: StartKvindex) -> Site:
    return Site(tmp_path / "blocks", free_port(), start_kvindex)


@pytest.fixture
async def filled_url(site: Site, postgres: PostgresRunning, becomes: Becomes) -> str:
    """A database with the prompt's blocks, claimed by a chat, as a system leaves it that was stopped in order."""
    database_url = await postgres.create_database()
    async with site.running(database_url) as (index, store):
        store.keep(PROMPT)
        await becomes(20, lambda: hit(index))
        assert await index.settle(PROMPT, pb.CHAT) == 20

        async def durable() -> int:
            return sum(expires_at_s > time.time() + 6 * DAY_S for expires_at_s in (await rows(database_url)).values())

        await becomes(20, durable)  # an index writes nothing before it has the lease, which it gets within seconds
    return database_url


@pytest.fixture
def becomes(eventually: Eventually) -> Becomes:
    """Wait until a number is what it should be."""

    async def wait(count: int, ask: Callable[[], Awaitable[int]]) -> None:
        async def is_so() -> bool:
            return await ask() == count

        await eventually(is_so)

    return wait


def lifetimes_s(expiries: dict[bytes, int]) -> set[int]:
    """In whole days from now."""
    return {round((expires_at_s - time.time()) / DAY_S) for expires_at_s in expiries.values()}


async def test_a_dump_brings_the_directory_back_as_it_was(
    site: Site, filled_url: str, postgres: PostgresRunning, tmp_path: Path
) -> None:
    before = await rows(filled_url)
    await dump(filled_url, tmp_path / "kvindex.dump")
    fresh_url = await postgres.create_database()
    await restore(fresh_url, tmp_path / "kvindex.dump")
    assert await rows(fresh_url) == before
    assert lifetimes_s(before) == {7}
    async with nats_running() as nats, site.start_kvindex("a", nats_url=nats.url, postgres={"url": fresh_url}) as index:
        assert await hit(index) == 20  # no store is there that could have been listed


async def test_a_dump_that_is_old_is_mended_by_a_listing(
    site: Site, filled_url: str, tmp_path: Path, becomes: Becomes, eventually: Eventually
) -> None:
    await dump(filled_url, tmp_path / "kvindex.dump")
    async with site.running(filled_url) as (index, store):
        store.keep(OTHER)
        store.lose(PROMPT[10 * 32 :])
        await becomes(20, lambda: hit(index, OTHER))
        await becomes(10, lambda: hit(index))
    await restore(filled_url, tmp_path / "kvindex.dump")
    async with site.running(filled_url) as (index, store):
        await becomes(20, lambda: hit(index, OTHER))
        await becomes(10, lambda: hit(index))
        await eventually(index.is_complete)
        listed = store.shared()
        told = (await index.overview()).sweep
        assert told.orphan_objects == 20
        assert (
            told.phantom_objects >= 10
        )  # and what the dump says of DRAM, unless the store's new life was heard before
    assert (await rows(filled_url)).keys() == listed


async def test_an_empty_postgres_is_rebuilt_from_a_listing_alone(
    site: Site, filled_url: str, postgres: PostgresRunning, becomes: Becomes, eventually: Eventually
) -> None:
    empty_url = await postgres.create_database()
    async with site.running(empty_url) as (index, store):
        await becomes(20, lambda: hit(index))
        await eventually(index.is_complete)
        overview = await index.overview()
        assert (overview.blocks, overview.shared_bytes) == (20, 20 * BLOCK_BYTES)
        assert overview.sweep.orphan_objects == 20
        listed = store.shared()
    expiries = await rows(empty_url)
    assert expiries.keys() == listed
    assert lifetimes_s(expiries) == {1}  # what was claimed is not in the files: the default of unclaimed blocks


async def test_an_index_without_any_store_says_that_it_is_not_complete(site: Site) -> None:
    async with nats_running() as nats, site.start_kvindex("a", nats_url=nats.url) as index:
        overview = await index.overview()
        assert not overview.is_complete
        assert overview.reason
        assert await hit(index) == 0


@pytest.mark.engine
@pytest.mark.timeout(300)
async def test_a_real_store_with_files_of_an_earlier_life_fills_an_empty_postgres(
    site: Site, becomes: Becomes, eventually: Eventually
) -> None:
    files = ObjectFolder(site.folder, "node-of-old")
    files.prepare()
    for block_hash in split_hashes(PROMPT):
        key = ObjectKey(chunk_hash=block_hash, model_name=POOL, kv_rank=KV_RANK, object_group_id=0, cache_salt="")
        assert files.store(key, memoryview(bytes(BLOCK_BYTES))) is Stored.STORED
    async with (
        nats_running() as nats,
        site.start_kvindex("a", nats_url=nats.url, coordinator_port=site.port) as index,
        lmcache_running(site.folder, instance_id="node-a", coordinator_url=f"http://127.0.0.1:{site.port}"),
    ):

        async def has_told_its_capacity() -> bool:
            return (await index.overview()).HasField("shared_capacity_bytes")

        await becomes(20, lambda: hit(index))
        await eventually(index.is_complete)
        await eventually(has_told_its_capacity)
        overview = await index.overview()
    assert overview.shared_bytes == 20 * (BLOCK_BYTES + HEADER_BYTES)
    assert overview.shared_capacity_bytes > overview.shared_bytes  # that of the file system
    assert [store.store_instance_id for store in overview.stores] == ["node-a"]
