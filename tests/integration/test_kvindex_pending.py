"""Pending prefixes at the real index and at the one that gateways are tested with: the same promises."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shoal_contracts.v1 import kvindex_pb2_grpc
from shoal_kvblocks import HASH_BYTES, split_hashes
from shoal_kvindex.service import KvIndexService
from shoal_kvindex.settings import KvIndexSettings
from shoal_runtime.grpc import connect
from shoal_runtime.process import running
from shoal_testkit.fakes import FakeKvIndex, peer_running
from shoal_testkit.servers import NatsRunning
from shoal_testkit.suites.kvindex import BLOCKS, POOL, TIMEOUT_S, IndexUnderTest, PendingContract, a_prompt
from shoal_testkit.waits import until


def a_report(seq: int, hashes: bytes) -> dict[str, Any]:
    """These blocks are on the shared level."""
    key = {"model_name": POOL, "kv_rank": 0x01000100, "object_group_id": 0, "cache_salt": ""}
    entries = [{"key": {**key, "chunk_hash_hex": one.hex()}, "size_bytes": 9} for one in split_hashes(hashes)]
    source = {"instance_id": "node-a", "incarnation": 1, "seq": seq}
    return {**source, "event_type": "store", "tier": "l2", "shared": True, "entries": entries}


class TestFakeKvIndex(PendingContract):
    @pytest.fixture
    async def index(self, nats: NatsRunning) -> AsyncIterator[IndexUnderTest]:
        fake = FakeKvIndex("pool", is_sharing=True)

        async def store(hashes: bytes) -> None:
            fake.store(hashes)

        async with peer_running(fake, nats.url), connect(fake.address) as channel:
            yield IndexUnderTest(kvindex_pb2_grpc.KvIndexStub(channel), store)


@contextlib.asynccontextmanager
async def an_index(nats: NatsRunning, database_url: str, instance_id: str = "") -> AsyncIterator[IndexUnderTest]:
    """A loaded one; its blocks come by report."""
    settings = KvIndexSettings(nats_url=nats.url, postgres={"url": database_url}, drain_s=1, instance_id=instance_id)
    service, seq = KvIndexService(settings), 0
    async with running(service, settings) as process, connect(service.address) as channel:
        await until(lambda: "directory" not in process.health.report)
        base_url = f"http://127.0.0.1:{service.coordinator_port}"
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as http:

            async def store(hashes: bytes) -> None:
                nonlocal seq
                seq += 1
                answer = await http.post("/events", json={"batches": [a_report(seq, hashes)]})
                assert answer.json()["applied"] == 1

            yield IndexUnderTest(kvindex_pb2_grpc.KvIndexStub(channel), store)


class TestKvIndex(PendingContract):
    @pytest.fixture
    async def index(self, nats: NatsRunning, database_url: str) -> AsyncIterator[IndexUnderTest]:
        async with an_index(nats, database_url) as index:
            yield index


async def test_claim_is_known_and_ends_at_every_instance(nats: NatsRunning, database_url: str) -> None:
    hashes = a_prompt()
    async with an_index(nats, database_url, "one") as one, an_index(nats, database_url, "two") as two:

        async def is_pending_at_two(request_id: str) -> None:
            async with asyncio.timeout(TIMEOUT_S):
                while (await two.match(hashes, "asks", claim_pending_ms=None)).pending.request_id != request_id:
                    await asyncio.sleep(0.01)

        assert not (await one.match(hashes, "a")).HasField("pending")
        await is_pending_at_two("a")
        await two.give_up("a")
        assert not (await two.match(hashes, "b")).HasField("pending")
        await one.store(hashes[:HASH_BYTES])
        await is_pending_at_two("b")
        await one.store(hashes)
        await is_pending_at_two("")
        assert (await two.match(hashes, "c")).hit_blocks == BLOCKS
