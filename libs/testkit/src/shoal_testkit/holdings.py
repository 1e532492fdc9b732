"""What is stored in a cluster, and what the instances of kvindex and Postgres say of it, block for block.

The truth is the shared folder and the listings of the stores' DRAM. An instance is asked for each block by a Match of
its own, and how many objects it counts at each place: so it can neither lack a block nor have one too many.
"""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import asyncpg
import httpx

from shoal_contracts.errors import ShoalError
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2, kvindex_pb2_grpc
from shoal_engine.scripted import BlockKey, SharedFolder
from shoal_runtime import grpc
from shoal_testkit.cluster import Cluster
from shoal_testkit.scripted_store import ScriptedStore
from shoal_testkit.store_http import store_http

SHARED = ""  # the shared level; other places are named by their store
ASKED_AT_ONCE = 64
CALL_S = 10.0
LEVEL_SHARED = 2  # in Postgres

Places: TypeAlias = dict[BlockKey, frozenset[str]]

WRITTEN = """
    SELECT n.pool, n.cache_salt, o.block_hash, p.level, p.instance_id
    FROM kvindex.objects o JOIN kvindex.namespaces n USING (namespace_id) JOIN kvindex.places p USING (place_id)
"""


class Told(NamedTuple):
    """One instance of kvindex: what it says of the blocks that it was asked for, and what it counts in all."""

    places: Places
    counts: dict[str, int]
    is_complete: bool


def shared_blocks(cluster: Cluster) -> dict[BlockKey, int]:
    """What lies in the shared folder now, with its sizes."""
    return {found.key: found.size_bytes for found in SharedFolder(cluster.directory / "blocks").objects()}


async def stored(cluster: Cluster, own: Mapping[str, ScriptedStore]) -> Places:
    """Where each block is. ``own`` are stores of the test itself, by their names."""
    places: defaultdict[BlockKey, set[str]] = defaultdict(set)
    for key in shared_blocks(cluster):
        places[key].add(SHARED)
    for worker, url in cluster.stores.items():
        if not cluster.is_running(worker):
            continue
        async with store_http(url) as http:
            for found in await http.objects("l1"):
                key = BlockKey(found.model_name, bytes.fromhex(found.block_hash_hex), found.cache_salt)
                places[key].add(f"store-{worker}")
    for name, store in own.items():
        for block_hash in store.held("l1"):
            places[BlockKey(store.pool, block_hash)].add(name)
    return {key: frozenset(where) for key, where in places.items()}


async def written(cluster: Cluster) -> Places:
    """As Postgres has it."""
    connection = await asyncpg.connect(cluster.commands["postgres"].url.replace("+asyncpg", ""))
    try:
        rows = await connection.fetch(WRITTEN)
    finally:
        await connection.close()
    places: defaultdict[BlockKey, set[str]] = defaultdict(set)
    for row in rows:
        where = SHARED if row["level"] == LEVEL_SHARED else row["instance_id"]
        places[BlockKey(row["pool"], row["block_hash"], row["cache_salt"])].add(where)
    return {key: frozenset(where) for key, where in places.items()}


async def told(cluster: Cluster, name: str, keys: Iterable[BlockKey]) -> Told:
    """What the instance ``name`` says. Asks as a probe, whose lifetime is the shortest."""
    async with grpc.connect(cluster.indexes[name].grpc) as channel:
        stub = kvindex_pb2_grpc.KvIndexStub(channel)
        overview = await grpc.call(stub.Overview, kvindex_pb2.OverviewRequest(), timeout_s=CALL_S)
        places: Places = {}
        rest = iter(keys)
        while some := list(islice(rest, ASKED_AT_ONCE)):
            places |= dict(zip(some, await asyncio.gather(*(_ask(stub, key) for key in some)), strict=True))
    counts = {store.store_instance_id: store.l1_blocks for store in overview.stores if store.l1_blocks}
    return Told(places, {**counts, SHARED: overview.shared_bytes}, overview.is_complete)


async def _ask(stub: "kvindex_pb2_grpc.KvIndexAsyncStub", key: BlockKey) -> frozenset[str]:
    asked = kvindex_pb2.MatchRequest(
        pool=key.pool, cache_salt=key.cache_salt, block_hashes=key.block_hash, traffic_class=pb.PROBE
    )
    reply = await grpc.call(stub.Match, asked, timeout_s=CALL_S)
    return frozenset(hit.store_instance_id for hit in reply.levels)


def _counts(cluster: Cluster, truth: Places) -> dict[str, int]:
    """Bytes on the shared level, blocks in the stores."""
    counts = Counter(place for places in truth.values() for place in places if place != SHARED)
    return {**counts, SHARED: sum(shared_blocks(cluster).values())}


async def differences(cluster: Cluster, own: Mapping[str, ScriptedStore], ever: Sequence[BlockKey]) -> list[str]:
    """Who says what that is not so; none when all are equal. ``ever`` are blocks that may have gone."""
    truth = await stored(cluster, own)
    found = []
    rows = await written(cluster)
    if rows != truth:
        found.append(f"Postgres has {_compared(rows, truth)}")
    for name in cluster.indexes:
        if not cluster.is_running(name):
            continue
        says = await told(cluster, name, {**truth, **dict.fromkeys(ever)})
        known = {key: places for key, places in says.places.items() if places}
        if known != truth:
            found.append(f"{name} has {_compared(known, truth)}")
        if says.counts != _counts(cluster, truth):
            found.append(f"{name} counts {says.counts}, there are {_counts(cluster, truth)}")
        if not says.is_complete:
            found.append(f"{name} is not complete")
    return found if truth == await stored(cluster, own) else ["blocks came or went meanwhile"]


def _compared(places: Places, truth: Places) -> str:
    differing = [key for key in {**places, **truth} if places.get(key) != truth.get(key)]
    shown = [
        f"{key.block_hash.hex()[:8]}: {sorted(places.get(key, ()))} for {sorted(truth.get(key, ()))}"
        for key in differing[:3]
    ]
    return f"{len(differing)} of {len(truth)} blocks wrong, as {shown}"


async def until_equal(
    cluster: Cluster,
    *,
    own: Mapping[str, ScriptedStore] | None = None,
    ever: Sequence[BlockKey] = (),
    timeout_s: float = 30.0,
) -> None:
    """Return when all instances, Postgres and the stores agree block for block; fails with what they differ in."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = ["kvindex or a store does not answer"]
        with contextlib.suppress(ShoalError, httpx.TransportError, OSError, asyncpg.PostgresError):
            found = await differences(cluster, own or {}, ever)
        if not found:
            return
        assert time.monotonic() < deadline_s, found
        await asyncio.sleep(0.1)
