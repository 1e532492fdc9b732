"""kvindex as a whole: reports over HTTP, questions over gRPC, a real NATS and a real Postgres."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal_contracts.errors import Unavailable
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, kvindex_pb2, kvindex_pb2_grpc
from shoal_engine.api import EngineRequest, Sampling
from shoal_engine.settings import EngineSettings
from shoal_engine.vllm.engine import VllmEngine
from shoal_kvblocks import block_hashes, split_hashes
from shoal_kvindex.metrics import CATALOGUE, STORES
from shoal_kvindex.service import KvIndexService
from shoal_kvindex.settings import KvIndexSettings
from shoal_runtime import grpc
from shoal_runtime.nats import connect
from shoal_runtime.presence import Fleet
from shoal_runtime.process import Process, new_process, running
from shoal_runtime.servers import free_port
from shoal_testkit.builders import tokens
from shoal_testkit.models import write_tiny_model
from shoal_testkit.processes import service_command, start_process
from shoal_testkit.servers import NatsRunning, lmcache_running, nats_running, postgres_running

PROMPT = block_hashes(bytes(4 * 1000), 128)  # seven whole blocks
POOL = "pool-of-the-test"


@dataclass
class Running:
    """A started service and its two clients."""

    process: Process
    service: KvIndexService
    http: httpx.AsyncClient
    grpc: "kvindex_pb2_grpc.KvIndexAsyncStub"

    async def report(self, seq: int, hashes: bytes, **fields: Any) -> httpx.Response:
        entries = [
            {
                "key": {
                    "chunk_hash_hex": block_hash.hex(),
                    "model_name": POOL,
                    "kv_rank": 0x01000100,
                    "object_group_id": 0,
                    "cache_salt": "",
                },
                "size_bytes": 1024,
                "token_ids": [7] * 128,
            }
            for block_hash in split_hashes(hashes)
        ]
        batch = {"instance_id": "node-a", "incarnation": 1, "seq": seq, "event_type": "store", "tier": "l2"}
        batch |= {"shared": True, "entries": entries} | fields
        return await self.http.post("/events", json={"batches": [batch]})

    async def match(self, hashes: bytes = PROMPT, pool: str = POOL) -> kvindex_pb2.MatchReply:
        request = kvindex_pb2.MatchRequest(pool=pool, block_hashes=hashes, traffic_class=pb.CHAT)
        return await grpc.call(self.grpc.Match, request, timeout_s=2)


@asynccontextmanager
async def kvindex(nats_url: str, database_url: str, coordinator_port: int = 0) -> AsyncIterator[Running]:
    settings = KvIndexSettings(
        nats_url=nats_url,
        postgres={"url": database_url},
        coordinator_port=coordinator_port,
        write_interval_s=0.05,
        drain_s=1,
    )
    service = KvIndexService(settings)
    async with running(service, settings) as process, grpc.connect(service.address) as channel:
        base_url = f"http://127.0.0.1:{service.coordinator_port}"
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
            stub = kvindex_pb2_grpc.KvIndexStub(channel)
            yield Running(process, service, client, stub)


async def eventually(holds: Callable[[], Awaitable[bool]], timeout_s: float = 15) -> None:
    async with asyncio.timeout(timeout_s):
        while not await holds():
            await asyncio.sleep(0.02)


async def loaded(index: Running) -> None:
    async def is_ready() -> bool:
        return index.process.health.is_ready

    await eventually(is_ready)


@pytest.fixture
async def index(nats: NatsRunning, database_url: str) -> AsyncIterator[Running]:
    async with kvindex(nats.url, database_url) as index:
        await loaded(index)
        yield index


async def test_what_is_reported_is_matched(index: Running) -> None:
    assert (await index.match()).hit_blocks == 0
    answer = await index.report(1, PROMPT[: 5 * 32])
    assert answer.json() == {"applied": 1, "duplicates": 0, "stale": 0}
    reply = await index.match()
    assert reply.hit_blocks == 5
    assert [(hit.level, hit.blocks) for hit in reply.levels] == [(pb.L2, 5)]


async def test_await_is_answered_when_the_report_comes(index: Running) -> None:
    request = kvindex_pb2.AwaitRequest(pool=POOL, block_hash=PROMPT[-32:], level=pb.L2)
    waiting = asyncio.ensure_future(grpc.call(index.grpc.Await, request, timeout_s=5))
    await asyncio.sleep(0.05)
    await index.report(1, PROMPT)
    assert (await waiting).is_stored


async def test_await_answers_before_its_deadline(index: Running) -> None:
    request = kvindex_pb2.AwaitRequest(pool=POOL, block_hash=PROMPT[-32:])
    assert not (await grpc.call(index.grpc.Await, request, timeout_s=0.3)).is_stored


async def test_a_restart_gives_map_and_cursors_back(nats: NatsRunning, database_url: str) -> None:
    async with kvindex(nats.url, database_url) as index:
        await loaded(index)
        await index.report(1, PROMPT[: 3 * 32])
        await index.report(2, PROMPT[: 6 * 32], tier="l1", shared=False)
        settle = kvindex_pb2.SettleRequest(pool=POOL, block_hashes=PROMPT, traffic_class=pb.CHAT)
        assert (await grpc.call(index.grpc.Settle, settle, timeout_s=2)).claimed_blocks == 6
    async with kvindex(nats.url, database_url) as index:
        await loaded(index)
        reply = await index.match()
        assert reply.hit_blocks == 6
        assert [(hit.store_instance_id, hit.blocks) for hit in reply.levels] == [("node-a", 6), ("", 3)]
        assert (await index.http.put("/instances/node-a/heartbeat")).status_code == 404
        assert (await index.report(2, b"")).json()["duplicates"] == 1
        assert (await index.report(3, b"")).json()["applied"] == 1
        assert (await index.match()).hit_blocks == 6
        await index.report(5, b"")  # report 4 is lost: the DRAM of the server is unknown
        assert (await index.match()).hit_blocks == 3


async def test_it_announces_itself(index: Running, nats: NatsRunning) -> None:
    watcher = new_process("watcher", index.process.settings.model_copy(update={"instance_id": "watcher"}))
    try:
        fleet = Fleet(watcher, await connect(watcher, nats.url), [fleet_pb2.KVINDEX])
        await fleet.start()

        async def is_seen() -> bool:
            return any(member.address == index.service.address for member in fleet.live(fleet_pb2.KVINDEX))

        await eventually(is_seen)
    finally:
        await watcher.tasks.close()
        await watcher.stack.aclose()


async def test_serving_goes_on_while_postgres_is_away() -> None:
    async with postgres_running() as postgres, nats_running() as nats:
        url = await postgres.create_database()
        async with kvindex(nats.url, url) as index:
            await loaded(index)
            postgres.kill()
            await index.report(1, PROMPT)
            assert (await index.match()).hit_blocks == 7

            async def is_told() -> bool:
                return "postgres" in index.process.health.report

            await eventually(is_told)
            assert (await index.match()).hit_blocks == 7
            await postgres.start()
            await loaded(index)
        async with kvindex(nats.url, url) as index:
            await loaded(index)
            assert (await index.match()).hit_blocks == 7


async def test_without_postgres_at_the_start_it_says_unavailable_until_it_comes() -> None:
    async with postgres_running() as postgres, nats_running() as nats:
        url = await postgres.create_database()
        postgres.kill()
        async with kvindex(nats.url, url) as index:
            with pytest.raises(Unavailable):
                await index.match()
            assert (await index.report(1, PROMPT)).status_code == 503
            assert "directory" in index.process.health.report
            await postgres.start()
            await loaded(index)
            assert (await index.match()).hit_blocks == 0


async def test_as_a_process_it_becomes_ready_and_leaves_with_code_zero(
    nats: NatsRunning, database_url: str, tmp_path: Path
) -> None:
    environ = {"SHOAL_NATS_URL": nats.url, "SHOAL_KVINDEX_POSTGRES_URL": database_url}
    process = await start_process(service_command("kvindex", environ), tmp_path)
    assert await process.stop() == 0
    assert "directory.loaded" in process.output
    assert "ERROR" not in process.output


async def registered_stores(count: int) -> None:
    async def is_so() -> bool:
        return CATALOGUE.value("stores") == count

    await eventually(is_so, timeout_s=30)


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_a_real_lmcache_server_reports_what_a_real_engine_stores(
    nats: NatsRunning, database_url: str, tmp_path: Path
) -> None:
    port = free_port()
    prompt = tokens(1000)
    hashes = block_hashes(pack_u32(prompt), 128)
    model = write_tiny_model(tmp_path / "model")
    async with lmcache_running(
        tmp_path / "store", instance_id="node-real", coordinator_url=f"http://127.0.0.1:{port}"
    ) as store:
        async with kvindex(nats.url, database_url, port) as index:
            await loaded(index)
            await registered_stores(1)
            engine = VllmEngine(
                EngineSettings(
                    model=str(model), dtype="float32", kv_memory_bytes=64 << 20, store_port=store.spec.mq_port
                )
            )
            try:
                await engine.start()
                await engine.prefill(EngineRequest("request-1", prompt, Sampling(temperature=0.0)))
                pool = engine.description.pool
                request = kvindex_pb2.AwaitRequest(pool=pool, block_hash=hashes[-32:], level=pb.L2)
                assert (await grpc.call(index.grpc.Await, request, timeout_s=9)).is_stored
            finally:
                await engine.stop()
            reply = await index.match(hashes, pool)
            assert reply.hit_blocks == 7
            assert {(hit.level, hit.blocks) for hit in reply.levels} >= {(pb.L2, 7)}
        STORES.set(0)  # the metric outlives the service inside this process
        async with kvindex(nats.url, database_url, port) as index:
            await loaded(index)
            assert (await index.match(hashes, pool)).hit_blocks == 7
            await registered_stores(1)  # its next beat is answered 404
            await store.process.stop()
            await registered_stores(0)
            reply = await index.match(hashes, pool)
            assert [(hit.level, hit.blocks) for hit in reply.levels] == [(pb.L2, 7)]
