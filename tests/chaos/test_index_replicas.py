"""Three kvindexes: the one that sweeps is lost in the middle of it. Another one goes on, and nothing goes twice or
stays.

The blocks of the sweep lie in a store of the test's own; the requests go through the workers' stores, each of which
reports to another instance. Any of these stores may be asked to delete from the shared level: what they reported to
have deleted there stands in the log between the instances.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import asyncpg
import nats
import pytest
import pytest_asyncio
from nats.js.api import AckPolicy, ConsumerConfig

from shoal_contracts.subjects import INDEX_CHANGE, INDEX_STREAM
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2, kvindex_pb2_grpc
from shoal_engine.scripted import BlockKey, SharedFolder
from shoal_kvblocks import split_hashes
from shoal_runtime import grpc
from shoal_testkit.answers import Answer, ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster, Shape, cluster_running
from shoal_testkit.holdings import until_equal
from shoal_testkit.scripted_store import ReportLine, ScriptedStore, scripted_store
from shoal_testkit.waits import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

AGENT_S = 3
SETTINGS = {
    "kvindex": {
        "SHOAL_KVINDEX_AGENT_LIFETIME_S": str(AGENT_S),
        "SHOAL_KVINDEX_CHAT_LIFETIME_S": "900",
        "SHOAL_KVINDEX_UNCLAIMED_LIFETIME_S": "900",
        "SHOAL_KVINDEX_PROBE_LIFETIME_S": "1",
        "SHOAL_KVINDEX_SWEEP_INTERVAL_S": "0.2",
        "SHOAL_KVINDEX_SWEEP_GRACE_S": "1",
    },
    "prefill": {"SHOAL_SCRIPTED_PREFILL_TOKENS_PER_S": "20000"},
}
POOL = "pool-of-the-test"
STORE = "store-of-the-test"
EXPIRING = 2500  # more than two batches of a sweep
KEPT = 100
TOKENS = 4
HIT_TOKENS = 256
TAKEOVER_S = 30.0  # usually six
SWEPT_S = 120.0  # usually ten; each time the log or the lease is lost on a busy machine, the grace begins anew


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_cluster() -> AsyncIterator[Cluster]:
    async with cluster_running(Shape(tokenizers=1, prefill=2, decode=1, kvindexes=3), SETTINGS) as cluster:
        yield cluster


@dataclass
class Traffic:
    """One prompt, asked again and again."""

    chat: ChatApi
    prompt: str
    text: str = ""
    answers: list[Answer] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            answer = await self.chat.ask(self.prompt, TOKENS).read()
            assert_whole(answer, TOKENS)
            assert answer.receipt["hit_tokens"] >= HIT_TOKENS
            assert answer.text == self.text
            self.answers.append(answer)
            await asyncio.sleep(0.05)

    def unknown(self) -> int:
        return sum("index_unknown" in answer.receipt["fallbacks"] for answer in self.answers)


@contextlib.asynccontextmanager
async def traffic(chat: ChatApi) -> AsyncIterator[Traffic]:
    """Requests all the while; each of them is served with a hit, or the block raises."""
    own = Traffic(chat, a_prompt(300))
    own.text = (await chat.ask(own.prompt, TOKENS).read()).text
    task = asyncio.create_task(own.run(), name="traffic")
    try:
        yield own
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def holder(cluster: Cluster) -> str:
    connection = await asyncpg.connect(cluster.commands["postgres"].url.replace("+asyncpg", ""))
    try:
        return str(await connection.fetchval("SELECT holder FROM kvindex.lease"))
    finally:
        await connection.close()


async def holder_becomes(cluster: Cluster, is_right: Callable[[str], bool]) -> str:
    async with asyncio.timeout(TAKEOVER_S):
        while not is_right(name := await holder(cluster)):
            await asyncio.sleep(0.05)
    return name


async def settle(cluster: Cluster, hashes: Sequence[bytes], traffic_class: pb.TrafficClass.ValueType) -> None:
    """At every instance, so that all of them know it before the blocks come."""
    for address in cluster.indexes.values():
        async with grpc.connect(address.grpc) as channel:
            asked = kvindex_pb2.SettleRequest(pool=POOL, block_hashes=b"".join(hashes), traffic_class=traffic_class)
            await grpc.call(kvindex_pb2_grpc.KvIndexStub(channel).Settle, asked, timeout_s=10)


@dataclass
class Blocks:
    """In the test's own store."""

    store: ScriptedStore
    expiring: list[bytes]
    kept: list[bytes]

    def left(self, level: str) -> int:
        return len(self.store.held(level) & set(self.expiring))


@contextlib.asynccontextmanager
async def filled_store(cluster: Cluster, sweeping: str) -> AsyncIterator[Blocks]:
    """Reports to the instances that will stay."""
    line = ReportLine([address.coordinator_url for name, address in cluster.indexes.items() if name != sweeping])
    folder = SharedFolder(cluster.directory / "blocks")
    async with scripted_store(STORE, POOL, folder, line) as store:
        blocks = Blocks(store, [os.urandom(32) for _ in range(EXPIRING)], [os.urandom(32) for _ in range(KEPT)])
        await settle(cluster, blocks.expiring, pb.AGENT)
        await settle(cluster, blocks.kept, pb.CHAT)
        store.keep([*blocks.kept, *blocks.expiring])
        yield blocks
        # What is left goes with the store, so that the next test begins with none.


async def lose_in_mid_sweep(blocks: Blocks, lose: Callable[[], None]) -> None:
    """``lose`` is called in the first delete that this store is asked for, before it is answered."""
    is_lost = asyncio.Event()

    def on_delete() -> None:
        blocks.store.blocks.on_delete = None
        lose()
        is_lost.set()

    blocks.store.blocks.on_delete = on_delete
    async with asyncio.timeout(SWEPT_S):
        await is_lost.wait()
    assert blocks.left("l2")


async def until_swept(blocks: Blocks) -> None:
    await until(lambda: not blocks.left("l1") and not blocks.left("l2"), SWEPT_S)


async def shared_deletes(cluster: Cluster) -> "Counter[bytes]":
    """How often each block was reported to be deleted from the shared level."""
    found: Counter[bytes] = Counter()
    client = await nats.connect(cluster.commands["nats"].url)
    try:
        jetstream = client.jetstream()
        last_seq = (await jetstream.stream_info(INDEX_STREAM)).state.last_seq
        log = await jetstream.subscribe(INDEX_CHANGE, config=ConsumerConfig(ack_policy=AckPolicy.NONE))
        at_seq = 0
        while at_seq < last_seq:
            message = await log.next_msg(timeout=10)
            at_seq = message.metadata.sequence.stream
            for report in kvindex_pb2.IndexChange.FromString(message.data).reports.reports:
                if (report.kind, report.level) == (kvindex_pb2.StoreReport.DELETED, pb.L2):
                    for objects in report.objects:
                        found.update(split_hashes(objects.block_hashes))
    finally:
        await client.close()
    return found


async def assert_nothing_twice_and_nothing_else(cluster: Cluster, blocks: Blocks) -> None:
    assert set((await shared_deletes(cluster)).values()) == {1}
    in_dram = {block_hash: count for (block_hash, at), count in blocks.store.blocks.deletes.items() if at == "l1"}
    assert in_dram == dict.fromkeys(blocks.expiring, 1)
    assert blocks.store.held("l2") >= set(blocks.kept)
    assert blocks.store.held("l1") == set(blocks.kept)


def keys(blocks: Blocks) -> list[BlockKey]:
    """Some of those that should be gone; that no instance knows more than there are, their counts tell."""
    return [BlockKey(POOL, block_hash) for block_hash in blocks.expiring[:200]]


async def test_a_killed_holder_is_succeeded_in_mid_sweep(cluster: Cluster, chat: ChatApi) -> None:
    sweeping = await holder_becomes(cluster, bool)
    async with traffic(chat) as requests, filled_store(cluster, sweeping) as blocks:
        await lose_in_mid_sweep(blocks, lambda: cluster.kill(sweeping))
        await holder_becomes(cluster, lambda name: name not in ("", sweeping))
        await until_swept(blocks)
        await assert_nothing_twice_and_nothing_else(cluster, blocks)
        await cluster.start(sweeping)
        await until_equal(cluster, own={STORE: blocks.store}, ever=keys(blocks))
        await assert_nothing_twice_and_nothing_else(cluster, blocks)
    print(f"{len(requests.answers)} requests, {requests.unknown()} of them with an unknown match")
    assert requests.answers[-1].receipt["fallbacks"] == []


async def test_a_frozen_holder_does_nothing_when_it_thaws(cluster: Cluster, chat: ChatApi) -> None:
    sweeping = await holder_becomes(cluster, bool)
    async with traffic(chat) as requests, filled_store(cluster, sweeping) as blocks:
        try:
            await lose_in_mid_sweep(blocks, lambda: cluster.freeze(sweeping))
            successor = await holder_becomes(cluster, lambda name: name not in ("", sweeping))
        finally:
            cluster.thaw(sweeping)  # with the rest of its sweep before it
        await until_swept(blocks)
        await until_equal(cluster, own={STORE: blocks.store}, ever=keys(blocks))
        await assert_nothing_twice_and_nothing_else(cluster, blocks)
        assert await holder(cluster) == successor
    print(f"{len(requests.answers)} requests, {requests.unknown()} of them with an unknown match")
    assert requests.answers[-1].receipt["fallbacks"] == []
