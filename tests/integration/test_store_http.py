"""The HTTP suite of a store against a real ``lmcache server`` with our adapter and module, filled by a real engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import pytest_asyncio

from shoal_contracts.ids import pack_u32
from shoal_engine import EngineRequest, EngineSettings, Sampling
from shoal_engine.vllm.engine import VllmEngine
from shoal_kvblocks import block_hashes, split_hashes
from shoal_testkit.models import write_tiny_model
from shoal_testkit.servers import LmcacheRunning, lmcache_running
from shoal_testkit.store_http import StoreHttp, store_http
from shoal_testkit.suites.store_http import StoreHttpContract
from shoal_testkit.vllm_probe import forget_engine_copies

START_S = 300.0
STORED_S = 60.0


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.asyncio(loop_scope="class")
class TestLmcache(StoreHttpContract):
    engine: ClassVar[VllmEngine]
    lmcache: ClassVar[LmcacheRunning]

    @pytest_asyncio.fixture(scope="class", loop_scope="class", autouse=True)
    @classmethod
    async def running(cls, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[None]:
        folder: Path = tmp_path_factory.mktemp("store")
        write_tiny_model(folder / "model", context_tokens=2048)
        async with lmcache_running(folder / "shared") as cls.lmcache:
            settings = EngineSettings(
                model=str(folder / "model"),
                dtype="float32",
                kv_memory_bytes=64 << 20,
                store_port=cls.lmcache.spec.mq_port,
                start_timeout_s=START_S,
            )
            cls.engine = VllmEngine(settings)
            try:
                await cls.engine.start()
                cls.pool = cls.engine.description.pool
                yield
            finally:
                await cls.engine.stop()

    async def url(self) -> str:
        return self.lmcache.url

    async def keep(self, token_ids: Sequence[int], cache_salt: str) -> None:
        hashes = {name.hex() for name in split_hashes(block_hashes(pack_u32(token_ids), self.block_tokens))}
        await forget_engine_copies(self.engine)
        await self.engine.prefill(EngineRequest("keep", token_ids, Sampling(temperature=0.0), cache_salt))
        async with store_http(self.lmcache.url) as store, asyncio.timeout(STORED_S):
            while not hashes <= await self._listed(store, cache_salt):
                await asyncio.sleep(0.02)

    async def _listed(self, store: StoreHttp, cache_salt: str) -> set[str]:
        return {name.block_hash_hex for name in await store.objects("l2") if name.cache_salt == cache_salt}
