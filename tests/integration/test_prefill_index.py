"""A prefill worker's questions to kvindex while the instance that it asks changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from shoal_contracts.v1 import fleet_pb2, kvindex_pb2, kvindex_pb2_grpc
from shoal_engine.api import EngineRequest, Sampling
from shoal_prefill.kvindex_client import KvIndexClient
from shoal_prefill.prefill_job import PrefillJob
from shoal_runtime.grpc import create_server, serve
from shoal_runtime.process import new_process
from shoal_runtime.settings import ServiceSettings
from shoal_testkit.waits import until

WAIT_S = 5.0
JOB = PrefillJob("pool", EngineRequest("r1", [1], Sampling()), b"", 10.0, "")
BLOCK = bytes(32)


@dataclass
class Index(kvindex_pb2_grpc.KvIndexServicer):
    """A kvindex whose blocks are stored when the test says so."""

    address: str = ""
    asked: int = 0
    is_stored: asyncio.Event = field(default_factory=asyncio.Event)

    async def Await(self, request: kvindex_pb2.AwaitRequest, context: object) -> kvindex_pb2.AwaitReply:  # type: ignore[override]
        self.asked += 1
        await self.is_stored.wait()
        return kvindex_pb2.AwaitReply(is_stored=True)


@dataclass
class Member:
    """A kvindex instance as the fleet shows it."""

    address: str
    is_ready: bool = True
    is_draining: bool = False


@dataclass
class Indexes:
    """A ``Fleet`` of which the client asks only who is there."""

    members: list[Member]

    def live(self, role: fleet_pb2.Role.ValueType) -> list[Member]:
        assert role == fleet_pb2.KVINDEX
        return self.members


@contextlib.asynccontextmanager
async def an_index() -> AsyncIterator[Index]:
    process, index = new_process("kvindex", ServiceSettings()), Index()
    try:
        server = create_server(process)
        kvindex_pb2_grpc.add_KvIndexServicer_to_server(index, server)
        index.address = await serve(process, server)
        yield index
    finally:
        await process.tasks.close()
        await process.stack.aclose()


@contextlib.asynccontextmanager
async def a_client(fleet: Indexes) -> AsyncIterator[KvIndexClient]:
    process = new_process("prefill", ServiceSettings())
    client = KvIndexClient(fleet, "l2", lambda closing: process.tasks.spawn(closing, name="index_close"))  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await process.tasks.close()
        await client.close()


def ask(client: KvIndexClient) -> "asyncio.Future[bool]":
    return asyncio.ensure_future(client.is_stored(JOB, BLOCK, WAIT_S))


async def test_a_change_of_the_instance_leaves_the_questions_alone_that_wait_at_the_old_one() -> None:
    async with an_index() as old, an_index() as new:
        fleet = Indexes([Member(old.address)])
        async with a_client(fleet) as client:
            waiting = [ask(client) for _ in range(2)]
            await until(lambda: old.asked == 2)
            fleet.members = [Member(new.address)]
            asked_together = [ask(client) for _ in range(2)]
            await until(lambda: new.asked == 2)
            assert not any(question.done() for question in [*waiting, *asked_together])
            new.is_stored.set()
            assert await asyncio.gather(*asked_together) == [True, True]
            old.is_stored.set()
            assert await asyncio.gather(*waiting) == [True, True]
            assert old.asked == 2
