"""kvindex for tests that look at it from outside, next to stores that the test moves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2, kvindex_pb2_grpc
from shoal_kvindex.service import KvIndexService
from shoal_kvindex.settings import KvIndexSettings
from shoal_runtime import grpc
from shoal_runtime.process import running
from shoal_testkit.servers import NatsRunning

Holds = Callable[[], Awaitable[bool]]
CALL_S = 5.0


@dataclass
class IndexInstance:
    """One instance of kvindex: where stores report, and what requests ask of it."""

    url: str
    stub: "kvindex_pb2_grpc.KvIndexAsyncStub"
    pool: str = "pool-of-the-test"

    async def match(self, hashes: bytes, **fields: object) -> kvindex_pb2.MatchReply:
        asked = {"pool": self.pool, "block_hashes": hashes, "traffic_class": pb.CHAT} | fields
        return await grpc.call(self.stub.Match, kvindex_pb2.MatchRequest(**asked), timeout_s=CALL_S)

    async def places(self, block_hash: bytes) -> set[str]:
        """Where it thinks that a block is: "" on the shared level."""
        return {hit.store_instance_id for hit in (await self.match(block_hash)).levels}

    async def settle(self, hashes: bytes, traffic_class: pb.TrafficClass.ValueType) -> int:
        asked = kvindex_pb2.SettleRequest(pool=self.pool, block_hashes=hashes, traffic_class=traffic_class)
        return (await grpc.call(self.stub.Settle, asked, timeout_s=CALL_S)).claimed_blocks

    async def overview(self) -> kvindex_pb2.OverviewReply:
        return await grpc.call(self.stub.Overview, kvindex_pb2.OverviewRequest(), timeout_s=CALL_S)

    async def is_complete(self) -> bool:
        return (await self.overview()).is_complete


StartKvindex = Callable[..., AbstractAsyncContextManager[IndexInstance]]


@pytest.fixture
def start_kvindex(nats: NatsRunning, database_url: str, eventually: Callable[[Holds], Awaitable[None]]) -> StartKvindex:
    """Called with an instance id and what is set otherwise: an instance that is ready, in this process."""

    @asynccontextmanager
    async def start(instance_id: str, **changes: object) -> AsyncIterator[IndexInstance]:
        settings = KvIndexSettings.model_validate(
            {
                "nats_url": nats.url,
                "postgres": {"url": database_url},
                "instance_id": instance_id,
                "write_interval_s": 0.05,
                "drain_s": 1,
            }
            | changes
        )
        service = KvIndexService(settings)
        async with running(service, settings) as process, grpc.connect(service.address) as channel:

            async def is_ready() -> bool:
                return process.health.is_ready

            await eventually(is_ready)
            url = f"http://127.0.0.1:{service.coordinator_port}"
            yield IndexInstance(url, kvindex_pb2_grpc.KvIndexStub(channel))

    return start


@pytest.fixture
def eventually() -> Callable[[Holds, float], Awaitable[None]]:
    """Wait until something holds; TimeoutError when it does not in time. Who does not answer is asked again."""

    async def wait(holds: Holds, timeout_s: float = 45.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not await _holds_now(holds):
                await asyncio.sleep(0.05)

    return wait


async def _holds_now(holds: Holds) -> bool:
    try:
        return await holds()
    except Unavailable:
        return False
