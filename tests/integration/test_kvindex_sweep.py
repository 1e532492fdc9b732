"""Lifetimes of seconds: what goes, what stays, what a full store loses, and a holder that dies in the middle."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2, kvindex_pb2_grpc
from shoal_engine.scripted import SharedMemory
from shoal_runtime import grpc
from shoal_runtime.servers import free_port
from shoal_testkit.processes import RunningProcess, process_running, service_command
from shoal_testkit.scripted_store import BLOCK_BYTES, ReportLine, ScriptedStore, scripted_store
from shoal_testkit.servers import NatsRunning

POOL = "pool-of-the-test"
LIFETIMES = {"agent_lifetime_s": 3, "chat_lifetime_s": 8, "unclaimed_lifetime_s": 1, "probe_lifetime_s": 1}
SWEEP = {"sweep_interval_s": 0.2, "sweep_grace_s": 1.0}


def some(count: int = 10) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def a_store(index: Any, **changes: Any) -> Any:
    return scripted_store("node-a", POOL, SharedMemory(), ReportLine([index.url]), **changes)


@pytest.fixture
def keep(eventually: Any) -> Callable[..., Any]:
    """Store blocks, wait until they are known, and settle them for a class."""

    async def store_and_settle(
        index: Any, store: ScriptedStore, traffic_class: Any = None, count: int = 10
    ) -> list[bytes]:
        hashes = some(count)
        store.keep(hashes)
        await eventually(lambda: is_known_as_unclaimed(index, hashes))
        if traffic_class is not None:
            await index.settle(b"".join(hashes), traffic_class)
        return hashes

    async def is_known_as_unclaimed(index: Any, hashes: list[bytes]) -> bool:
        # A probe's lifetime is shorter than every other: asking does not renew.
        reply = await index.match(b"".join(hashes), traffic_class=pb.PROBE)
        return int(reply.hit_blocks) == len(hashes)

    return store_and_settle


def left(store: ScriptedStore, hashes: list[bytes]) -> tuple[int, int]:
    return len(store.held("l1") & set(hashes)), len(store.held("l2") & set(hashes))


async def test_agent_and_chat_blocks_go_when_they_should(start_kvindex: Any, keep: Any, eventually: Any) -> None:
    async with start_kvindex("kvindex-1", **LIFETIMES, **SWEEP) as index, a_store(index) as store:
        agent = await keep(index, store, pb.AGENT)
        chat = await keep(index, store, pb.CHAT)
        began_s = time.monotonic()

        async def is_gone(hashes: list[bytes]) -> bool:
            return left(store, hashes) == (0, 0)

        await eventually(lambda: is_gone(agent))
        agent_s = time.monotonic() - began_s
        await eventually(lambda: is_gone(chat))
        chat_s = time.monotonic() - began_s
        assert agent_s >= 3 + 1 - 1.5  # whole seconds, and it was settled before the clock was read
        assert chat_s >= 8 + 1 - 1.5
        assert chat_s - agent_s > 3

        async def is_told() -> bool:
            sweep = (await index.overview()).sweep
            return (sweep.expired_blocks, sweep.marked_blocks) == (20, 20)

        await eventually(is_told)
        assert max(store.blocks.deletes.values()) == 1


async def test_a_block_that_is_used_now_and_then_stays(start_kvindex: Any, keep: Any) -> None:
    async with start_kvindex("kvindex-1", **LIFETIMES, **SWEEP) as index, a_store(index) as store:
        used = await keep(index, store, pb.AGENT)
        idle = await keep(index, store, pb.AGENT)
        for _ in range(8):
            reply = await index.match(b"".join(used), traffic_class=pb.AGENT)
            assert reply.hit_blocks == len(used)
            await asyncio.sleep(1)
        assert left(store, used) == (10, 10)
        assert left(store, idle) == (0, 0)


async def test_a_block_that_is_used_between_mark_and_delete_stays(
    start_kvindex: Any, keep: Any, eventually: Any
) -> None:
    slow = {"sweep_interval_s": 0.2, "sweep_grace_s": 4.0}
    async with start_kvindex("kvindex-1", **LIFETIMES, **slow) as index, a_store(index) as store:
        used = await keep(index, store, pb.AGENT)
        idle = await keep(index, store, pb.AGENT)

        async def is_hidden() -> bool:
            replies = [await index.match(hashes[0], traffic_class=pb.AGENT) for hashes in (used, idle)]
            return not any(reply.hit_blocks for reply in replies)

        await asyncio.sleep(4.2)
        await eventually(is_hidden)
        await index.settle(b"".join(used), pb.CHAT)  # a request that had them ends

        async def is_done() -> bool:
            return left(store, idle) == (0, 0)

        await eventually(is_done)
        assert left(store, used) == (10, 10)
        assert (await index.match(b"".join(used))).hit_blocks == 10

        async def is_told() -> bool:
            return bool((await index.overview()).sweep.renewed_blocks == 10)

        await eventually(is_told)


async def test_a_running_request_keeps_what_it_hit(start_kvindex: Any, keep: Any) -> None:
    async with start_kvindex("kvindex-1", **LIFETIMES, **SWEEP) as index, a_store(index) as store:
        held = await keep(index, store, pb.AGENT)
        idle = await keep(index, store, pb.AGENT)
        await index.match(b"".join(held), traffic_class=pb.AGENT, request_id="long", hold_ms=60_000)
        await asyncio.sleep(8)
        assert left(store, held) == (10, 10)
        assert left(store, idle) == (0, 0)


async def test_a_full_store_loses_what_would_expire_soonest(start_kvindex: Any, keep: Any, eventually: Any) -> None:
    lifetimes = {"agent_lifetime_s": 1000, "chat_lifetime_s": 2000, "unclaimed_lifetime_s": 1000}
    async with (
        start_kvindex("kvindex-1", high_watermark=0.9, low_watermark=0.6, **lifetimes, **SWEEP) as index,
        a_store(index, l2_bytes=100 * BLOCK_BYTES) as store,
    ):
        agent = await keep(index, store, pb.AGENT, 40)
        chat = await keep(index, store, pb.CHAT, 40)
        await asyncio.sleep(3)
        assert len(store.held("l2")) == 80  # below the high mark
        more = await keep(index, store, pb.CHAT, 20)

        async def is_down() -> bool:
            return len(store.held("l2")) <= 60

        await eventually(is_down)
        await asyncio.sleep(2)
        assert store.held("l2") == {*chat, *more}
        assert left(store, agent) == (0, 0)

        async def is_told() -> bool:
            overview = await index.overview()
            return overview.sweep.evicted_blocks == 40 and overview.shared_capacity_bytes == 100 * BLOCK_BYTES

        await eventually(is_told)


@dataclass
class Instance:
    """A process of kvindex."""

    process: RunningProcess
    url: str
    stub: "kvindex_pb2_grpc.KvIndexAsyncStub"

    async def overview(self) -> kvindex_pb2.OverviewReply:
        return await grpc.call(self.stub.Overview, kvindex_pb2.OverviewRequest(), timeout_s=5)

    async def hit(self, hashes: list[bytes]) -> int:
        asked = kvindex_pb2.MatchRequest(pool=POOL, block_hashes=b"".join(hashes), traffic_class=pb.PROBE)
        return (await grpc.call(self.stub.Match, asked, timeout_s=5)).hit_blocks


@asynccontextmanager
async def instance(name: str, nats_url: str, database_url: str, folder: Path) -> AsyncIterator[Instance]:
    coordinator_port, grpc_port = free_port(), free_port()
    settings = {
        "POSTGRES_URL": database_url,
        "INSTANCE_ID": name,
        "COORDINATOR_PORT": coordinator_port,
        "GRPC_PORT": grpc_port,
        "PROBE_LIFETIME_S": 1,
        "UNCLAIMED_LIFETIME_S": 3,
        "SWEEP_INTERVAL_S": 0.2,
        "SWEEP_GRACE_S": 5,
        "WRITE_INTERVAL_S": 0.05,
    }
    environ = {f"SHOAL_KVINDEX_{key}": str(value) for key, value in settings.items()} | {"SHOAL_NATS_URL": nats_url}
    async with (
        process_running(service_command("kvindex", environ), folder / name) as process,
        grpc.connect(f"127.0.0.1:{grpc_port}") as channel,
    ):
        url = f"http://127.0.0.1:{coordinator_port}"
        yield Instance(process, url, kvindex_pb2_grpc.KvIndexStub(channel))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("when", ["marked", "deleting"])
async def test_three_instances_whose_lease_holder_is_killed_delete_nothing_twice_and_forget_nothing(
    nats: NatsRunning, database_url: str, tmp_path: Path, eventually: Any, when: str
) -> None:
    names = ["kvindex-1", "kvindex-2", "kvindex-3"]
    async with AsyncExitStack() as stack:
        instances = {
            name: await stack.enter_async_context(instance(name, nats.url, database_url, tmp_path)) for name in names
        }

        async def is_held() -> bool:
            return (await instances[names[0]].overview()).lease_holder in names

        await eventually(is_held)
        holder = instances.pop((await instances[names[0]].overview()).lease_holder)
        one, other = instances.values()
        line = ReportLine([one.url, other.url])
        store = await stack.enter_async_context(scripted_store("node-a", POOL, SharedMemory(), line))
        fresh, old = some(100), some(2500)  # several batches of a sweep
        settled = kvindex_pb2.SettleRequest(pool=POOL, block_hashes=b"".join(fresh), traffic_class=pb.CHAT)
        await grpc.call(one.stub.Settle, settled, timeout_s=5)
        store.keep(fresh)
        store.keep(old)
        unasked = iter(old)

        async def is_begun() -> bool:
            if when == "deleting":
                return len(store.held("l2")) < len(fresh) + len(old)
            asked = next(unasked)  # another one each time, because asking is a use
            return not any([await index.hit([asked]) for index in (one, other)])

        async def is_stored() -> bool:
            return await one.hit(old[-1:]) == 1

        await eventually(is_stored)
        await eventually(is_begun)
        holder.process.kill()
        assert store.held("l2") >= set(fresh)

        async def is_swept() -> bool:
            return left(store, old) == (0, 0)

        await eventually(is_swept, 60.0)
        assert left(store, fresh) == (100, 100)
        assert max(store.blocks.deletes.values()) == 1

        async def is_known_to_all() -> bool:
            counts = [(await index.overview()).blocks for index in (one, other)]
            return counts == [100, 100] and [await index.hit(fresh) for index in (one, other)] == [100, 100]

        await eventually(is_known_to_all)
