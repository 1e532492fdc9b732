"""The HTTP side of a simulated store answers as a real server does, and what it does is reported."""

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import pytest
import pytest_asyncio

from shoal_contracts.ids import pack_u32
from shoal_engine.scripted import (
    BlockKey,
    BlockStore,
    Prefetcher,
    ServedPool,
    SharedMemory,
    StoreEvent,
    StoreServer,
    Timing,
)
from shoal_kvblocks import block_hashes, split_hashes
from shoal_runtime.clock import SystemClock
from shoal_testkit.store_http import store_http
from shoal_testkit.suites.store_http import StoreHttpContract

POOL = "models/tiny"


class Lab:
    """A store whose HTTP side runs."""

    def __init__(self) -> None:
        self.events: list[StoreEvent] = []
        self.store = BlockStore(SharedMemory(), block_bytes=512, listener=self.events.append)
        prefetcher = Prefetcher(self.store, Timing(), SystemClock())
        self.server = StoreServer(self.store, ServedPool(POOL, 128), prefetcher.bring)


@pytest.mark.asyncio(loop_scope="class")
class TestScriptedStore(StoreHttpContract):
    pool = POOL
    lab: ClassVar[Lab]

    @pytest_asyncio.fixture(scope="class", loop_scope="class", autouse=True)
    @classmethod
    async def running(cls) -> AsyncIterator[None]:
        cls.lab = Lab()
        await cls.lab.server.start()
        yield
        await cls.lab.server.stop()
        await cls.lab.server.stop()

    async def url(self) -> str:
        return self.lab.server.url

    async def keep(self, token_ids: Sequence[int], cache_salt: str) -> None:
        hashes = split_hashes(block_hashes(pack_u32(token_ids), self.block_tokens))
        self.lab.store.store([BlockKey(POOL, block_hash, cache_salt) for block_hash in hashes])

    async def test_deletes_and_prefetches_are_reported(self) -> None:
        token_ids, mine = await self.kept(2)
        keys = [BlockKey(POOL, bytes.fromhex(name.block_hash_hex)) for name in mine]
        self.lab.events.clear()
        async with store_http(self.lab.server.url) as store:
            await store.delete(mine, "l1")
            await store.prefetch(POOL, token_ids)
            await store.delete(mine, "all")
        assert self.lab.events == [
            StoreEvent("delete", "l1", keys),
            StoreEvent("access", "l2", keys),
            StoreEvent("store", "l1", keys),
            StoreEvent("delete", "l1", keys),
            StoreEvent("delete", "l2", keys),
        ]
