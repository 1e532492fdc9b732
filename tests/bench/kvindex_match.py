"""Match of 600 blocks over gRPC at a real kvindex, against the same question about blocks that it does not know.

The baseline carries as many bytes and ends at the first block: it is what the call alone costs.
"""

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx
from rows import Row, cpu_s

from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, kvindex_pb2, kvindex_pb2_grpc
from shoal_kvblocks import HASH_BYTES, split_hashes
from shoal_kvindex.settings import KvIndexSettings
from shoal_runtime.grpc import call, connect
from shoal_runtime.nats import connect as connect_nats
from shoal_runtime.presence import Fleet
from shoal_runtime.process import Process, new_process
from shoal_runtime.servers import LOOPBACK, free_port
from shoal_testkit.processes import process_running, service_command
from shoal_testkit.servers import nats_running, postgres_running, temporary_directory

BLOCKS = 600
PROMPTS = 100  # 60,000 blocks are known, asked for in no order
POOL = "bench"
ROUNDS = 5
CALLS = 300
CALL_S = 5.0


@dataclass(slots=True)
class Calls:
    """One way of a round."""

    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


async def measure() -> list[Row]:
    """A B A B against one process."""
    coordinator = free_port()
    async with nats_running() as nats, postgres_running() as postgres:
        environ = {
            "SHOAL_NATS_URL": nats.url,
            "SHOAL_KVINDEX_POSTGRES_URL": await postgres.create_database(),
            "SHOAL_KVINDEX_COORDINATOR_PORT": str(coordinator),
        }
        with temporary_directory("bench-kvindex") as directory:
            async with process_running(service_command("kvindex", environ), directory) as running:
                prompts = [random.randbytes(BLOCKS * HASH_BYTES) for _ in range(PROMPTS)]
                await report(f"http://{LOOPBACK}:{coordinator}", prompts)
                return await ask(nats.url, running.process.pid, prompts)


async def report(url: str, prompts: list[bytes]) -> None:
    """As an lmcache server does."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        for seq, hashes in enumerate(prompts, start=1):
            entries = [
                {
                    "key": {
                        "chunk_hash_hex": block_hash.hex(),
                        "model_name": POOL,
                        "kv_rank": 0x01000100,
                        "object_group_id": 0,
                    },
                    "size_bytes": 1024,
                }
                for block_hash in split_hashes(hashes)
            ]
            batch = {"instance_id": "bench", "incarnation": 1, "seq": seq, "event_type": "store", "tier": "l2"}
            (
                await http.post("/events", json={"batches": [batch | {"shared": True, "entries": entries}]})
            ).raise_for_status()


async def ask(nats_url: str, pid: int, prompts: list[bytes]) -> list[Row]:
    """Find the index as the gateway does, and ask it."""
    process = new_process("bench", KvIndexSettings(nats_url=nats_url))
    try:
        address = await address_of(process, nats_url)
        async with connect(address) as channel:
            return await _rounds(kvindex_pb2_grpc.KvIndexStub(channel), pid, prompts)
    finally:
        await process.tasks.close()
        await process.stack.aclose()


async def address_of(process: Process, nats_url: str) -> str:
    """Where the one kvindex that is there answers, found as the gateway finds it."""
    fleet = Fleet(process, await connect_nats(process, nats_url), [fleet_pb2.KVINDEX])
    await fleet.start()
    return (await fleet.wait_for(fleet_pb2.KVINDEX, timeout_s=30)).address


async def _rounds(stub: "kvindex_pb2_grpc.KvIndexAsyncStub", pid: int, prompts: list[bytes]) -> list[Row]:
    unknown, known = Calls(), Calls()
    strangers = [random.randbytes(len(prompts[0])) for _ in prompts]
    for round_number in range(ROUNDS + 1):
        for calls, asked, hit_blocks in ((unknown, strangers, 0), (known, prompts, BLOCKS)):
            await asyncio.sleep(0.3)
            times_us: list[float] = []
            before_s = cpu_s(pid)
            for _ in range(CALLS):
                hashes = random.choice(asked)
                request = kvindex_pb2.MatchRequest(pool=POOL, block_hashes=hashes, traffic_class=pb.CHAT)
                began_s = time.perf_counter()
                reply = await call(stub.Match, request, timeout_s=CALL_S)
                times_us.append(1e6 * (time.perf_counter() - began_s))
                if reply.hit_blocks != hit_blocks:
                    raise ValueError(f"a hit of {reply.hit_blocks} blocks, not {hit_blocks}")
            if round_number == 0:
                continue  # connections, imports, and the renewal of what was just reported
            percentiles = statistics.quantiles(times_us, n=100)
            calls.p50_us.append(percentiles[49])
            calls.p99_us.append(percentiles[98])
            calls.cpu_us.append(1e6 * (cpu_s(pid) - before_s) / CALLS)
    rows = []
    for case, name in (("p50", "p50_us"), ("p99", "p99_us"), ("CPU of kvindex", "cpu_us")):
        rows.append(Row("kvindex_match", case, "unknown blocks", "µs", tuple(getattr(unknown, name)), True))
        rows.append(Row("kvindex_match", case, f"hit of {BLOCKS} blocks", "µs", tuple(getattr(known, name))))
    return rows
