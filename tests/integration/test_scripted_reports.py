"""The scripted engine's store reports to a real kvindex, and what was computed is matched there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2, kvindex_pb2, kvindex_pb2_grpc
from shoal_engine.api import EngineRequest, Sampling
from shoal_engine.scripted import (
    BlockStore,
    Prefetcher,
    ReporterSettings,
    ScriptedEngine,
    ScriptedModel,
    ServedPool,
    SharedMemory,
    StoreReporter,
    StoreServer,
    Timing,
)
from shoal_kvblocks import block_hashes
from shoal_kvindex.service import KvIndexService
from shoal_kvindex.settings import KvIndexSettings
from shoal_runtime.clock import SystemClock
from shoal_runtime.grpc import call, connect
from shoal_runtime.process import running
from shoal_testkit.builders import POOL, tokens
from shoal_testkit.servers import NatsRunning

DEADLINE_S = 15.0


@dataclass
class Index:
    """A running kvindex."""

    url: str
    stub: kvindex_pb2_grpc.KvIndexStub

    async def levels(self, token_ids: list[int]) -> dict[tuple[int, str], int]:
        """Leading blocks by level and store."""
        request = kvindex_pb2.MatchRequest(pool=POOL, block_hashes=block_hashes(pack_u32(token_ids), 128))
        reply = await call(self.stub.Match, request, timeout_s=2)
        return {(hit.level, hit.store_instance_id): hit.blocks for hit in reply.levels}

    async def until(self, token_ids: list[int], expected: dict[tuple[int, str], int]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.levels(token_ids) != expected:
                await asyncio.sleep(0.02)


@pytest.fixture
async def index(nats: NatsRunning, database_url: str) -> AsyncIterator[Index]:
    settings = KvIndexSettings.model_validate(
        {"nats_url": nats.url, "postgres": {"url": database_url}, "write_interval_s": 0.05, "drain_s": 1}
    )
    service = KvIndexService(settings)
    async with running(service, settings) as process, connect(service.address) as channel:
        async with asyncio.timeout(DEADLINE_S):
            while not process.health.is_ready:
                await asyncio.sleep(0.02)
        yield Index(f"http://127.0.0.1:{service.coordinator_port}", kvindex_pb2_grpc.KvIndexStub(channel))


@asynccontextmanager
async def engine_on(index: Index, name: str, shared: SharedMemory) -> AsyncIterator[tuple[ScriptedEngine, BlockStore]]:
    clock = SystemClock()
    reporter = StoreReporter(ReporterSettings(name, index.url, flush_s=0.05, block_bytes=1024), clock)
    store = BlockStore(shared, listener=reporter.listen)
    model = ScriptedModel(pool=POOL)
    prefetcher = Prefetcher(store, Timing(), clock)
    server = StoreServer(store, ServedPool(POOL, model.block_tokens), prefetcher.bring, reporter)
    engine = ScriptedEngine(model, clock=clock, store=store, server=server)
    await engine.start()
    try:
        yield engine, store
    finally:
        await engine.stop()


async def test_what_an_engine_computed_is_matched_prompt_and_answer(index: Index) -> None:
    prompt = tokens(300)
    async with engine_on(index, "store-a", SharedMemory()) as (engine, _):
        request = EngineRequest("r", prompt, Sampling(max_tokens=100))
        told = [token_id async for step in engine.generate(request) for token_id in step.token_ids]
        await index.until([*prompt, *told], {(common_pb2.L1, "store-a"): 3, (common_pb2.L2, ""): 3})


async def test_store_that_leaves_takes_its_memory_and_not_what_is_shared(index: Index) -> None:
    prompt, shared = tokens(300), SharedMemory()
    async with engine_on(index, "store-a", shared) as (engine, _):
        await engine.prefill(EngineRequest("r", prompt))
        await index.until(prompt, {(common_pb2.L1, "store-a"): 2, (common_pb2.L2, ""): 2})
    await index.until(prompt, {(common_pb2.L2, ""): 2})
    async with engine_on(index, "store-b", shared) as (engine, _):
        assert (await engine.prefill(EngineRequest("r", prompt))).hit_tokens == 256
        await asyncio.sleep(0.2)  # a load passes through memory and leaves no copy there
        assert await index.levels(prompt) == {(common_pb2.L2, ""): 2}


async def test_dropped_memory_is_dropped_in_the_directory(index: Index) -> None:
    prompt = tokens(300)
    async with engine_on(index, "store-a", SharedMemory()) as (engine, store):
        await engine.prefill(EngineRequest("r", prompt))
        await index.until(prompt, {(common_pb2.L1, "store-a"): 2, (common_pb2.L2, ""): 2})
        store.drop_l1()
        await index.until(prompt, {(common_pb2.L2, ""): 2})
