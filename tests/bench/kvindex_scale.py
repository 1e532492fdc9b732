"""kvindex with ten million blocks: memory, time of a cold start from Postgres, and Match of 600 blocks under load.

The load is 200 Match a second, sent on time whether or not the earlier ones are answered, while 5,000 objects a second
are reported; a time counts from the moment when the call was due. Nothing is compared: the figures stand beside their
aims in docs. SHOAL_BENCH_KVINDEX_BLOCKS makes it smaller; in full it takes 6 GB of disk and some minutes.
"""

import asyncio
import hashlib
import os
import random
import statistics
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
from kvindex_match import address_of
from rows import Row, cpu_s
from sqlalchemy import text

from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2, kvindex_pb2_grpc
from shoal_kvindex.settings import KvIndexSettings
from shoal_kvindex.store.engine import create_engine, upgrade
from shoal_runtime.grpc import call, connect
from shoal_runtime.process import new_process
from shoal_runtime.servers import LOOPBACK, free_port, http_answers
from shoal_testkit.processes import RunningProcess, process_running, service_command
from shoal_testkit.servers import nats_running, postgres_running, temporary_directory

BLOCKS = int(os.environ.get("SHOAL_BENCH_KVINDEX_BLOCKS", "10000000"))
PROMPT_BLOCKS = 600
PROMPTS = 500  # asked for in no order; together 300,000 blocks
POOL = "bench"
RANK = 0x01000100
MATCHES_A_S = 200
REPORTED_A_S = 5000
DELIVERIES_A_S = 20
WARM_S, LOAD_S = 5.0, 30.0
START_S = 900.0
CALL_S = 5.0

# In the order in which they cost least: indexes last, and no look at a parent for each row. Expiries are of blocks
# used within the last hours, so that a match has nothing to renew, as is usual.
FILL = (
    f"INSERT INTO kvindex.namespaces (pool, cache_salt) VALUES ('{POOL}', '')",
    "INSERT INTO kvindex.places (level, instance_id) VALUES (2, '')",
    "ALTER TABLE kvindex.blocks DROP CONSTRAINT blocks_pkey",
    "ALTER TABLE kvindex.objects DROP CONSTRAINT objects_pkey",
    "ALTER TABLE kvindex.blocks DROP CONSTRAINT blocks_namespace_id_fkey",
    "ALTER TABLE kvindex.objects DROP CONSTRAINT objects_place_id_fkey",
    "DROP INDEX kvindex.blocks_by_expiry",
    "DROP INDEX kvindex.objects_by_place",
    f"""
    INSERT INTO kvindex.blocks
    SELECT 1, sha256(int4send(i)), extract(epoch FROM now())::bigint + 7 * 86400 - (36000.0 * i / {BLOCKS})::bigint
    FROM generate_series(1, {BLOCKS}) i
    """,
    f"""
    INSERT INTO kvindex.objects SELECT 1, sha256(int4send(i)), 1, {RANK}, 0, 1024
    FROM generate_series(1, {BLOCKS}) i
    """,
    "ALTER TABLE kvindex.blocks ADD PRIMARY KEY (namespace_id, block_hash)",
    "ALTER TABLE kvindex.objects ADD PRIMARY KEY (namespace_id, block_hash, place_id, kv_rank, object_group_id)",
    "CREATE INDEX blocks_by_expiry ON kvindex.blocks (expires_at_s)",
    "CREATE INDEX objects_by_place ON kvindex.objects (place_id)",
    "ANALYZE kvindex.blocks",
    "ANALYZE kvindex.objects",
)


async def measure() -> list[Row]:
    """One process, once."""
    coordinator = free_port()
    async with nats_running() as nats, postgres_running() as postgres:
        url = await postgres.create_database()
        await fill(url)
        environ = {
            "SHOAL_NATS_URL": nats.url,
            "SHOAL_KVINDEX_POSTGRES_URL": url,
            "SHOAL_KVINDEX_COORDINATOR_PORT": str(coordinator),
            "SHOAL_KVINDEX_MAX_BLOCKS": str(2 * BLOCKS),
        }
        with temporary_directory("bench-kvindex-scale") as directory:
            async with started(environ, directory) as (running, rows):
                rows += await loaded(nats.url, f"http://{LOOPBACK}:{coordinator}", running)
                return rows


async def fill(url: str) -> None:
    """As many blocks as are wanted, of which ``prompts`` knows the hashes."""
    engine = create_engine(url)
    await upgrade(engine)
    for statement in FILL:
        async with engine.begin() as connection:
            await connection.execute(text("SET LOCAL maintenance_work_mem = '512MB'"))
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            await driver.execute(statement, timeout=START_S)
    await engine.dispose()


@asynccontextmanager
async def started(environ: dict[str, str], directory: Path) -> AsyncIterator[tuple[RunningProcess, list[Row]]]:
    """The service with its map loaded, and what the start took. Meanwhile its health is asked as a supervisor does."""
    command = service_command("kvindex", environ)

    async def is_up() -> bool:
        return await http_answers(int(command.url.rsplit(":", 1)[1]), "/healthz")

    async with process_running(replace(command, is_ready=is_up), directory) as running:
        pid = running.process.pid
        empty_bytes, began_s, cpu_before_s = memory_bytes(pid), time.perf_counter(), cpu_s(pid)
        slowest_s = 0.0
        async with httpx.AsyncClient(base_url=command.url, trust_env=False, timeout=START_S) as http:
            async with asyncio.timeout(START_S):
                while not _metric(await _text(http, "/metrics"), "load_seconds"):
                    asked_s = time.perf_counter()
                    (await http.get("/healthz")).raise_for_status()
                    slowest_s = max(slowest_s, time.perf_counter() - asked_s)
                    await asyncio.sleep(0.05)
            told = await _text(http, "/metrics")
        map_bytes = memory_bytes(pid) - empty_bytes
        what = f"{BLOCKS:,} blocks"
        yield (
            running,
            [
                _row("cold start", what, "s", _metric(told, "load_seconds")),
                _row("cold start", "until it was seen", "s", time.perf_counter() - began_s),
                _row("cold start", "CPU of kvindex", "s", cpu_s(pid) - cpu_before_s),
                _row("cold start", "slowest /healthz", "ms", 1e3 * slowest_s),
                _row("memory", what, "MB", map_bytes / 1e6),
                _row("memory", "each", "bytes", map_bytes / BLOCKS),
            ],
        )


async def loaded(nats_url: str, coordinator_url: str, running: RunningProcess) -> list[Row]:
    """Matches and reports side by side."""
    process = new_process("bench", KvIndexSettings(nats_url=nats_url))
    deliveries = [delivery(seq) for seq in range(1, int((WARM_S + LOAD_S) * DELIVERIES_A_S) + 1)]
    asked = prompts()
    try:
        async with connect(await address_of(process, nats_url)) as channel:
            stub = kvindex_pb2_grpc.KvIndexStub(channel)
            reporting = asyncio.create_task(report(coordinator_url, deliveries))
            await ask(stub, asked, WARM_S)
            before_s, began_s = cpu_s(running.process.pid), time.perf_counter()
            times_ms = await ask(stub, asked, LOAD_S)
            busy = (cpu_s(running.process.pid) - before_s) / (time.perf_counter() - began_s)
            slowest_report_ms = await reporting
    finally:
        await process.tasks.close()
        await process.stack.aclose()
    percentiles = statistics.quantiles(times_ms, n=1000)
    what = f"{MATCHES_A_S}/s, {REPORTED_A_S:,} reports/s"
    return [
        _row("Match p50", what, "ms", percentiles[499]),
        _row("Match p99", what, "ms", percentiles[989]),
        _row("Match p99.9", what, "ms", percentiles[998]),
        _row("report p50", f"{REPORTED_A_S // DELIVERIES_A_S} objects", "ms", statistics.median(slowest_report_ms)),
        _row("CPU of kvindex", what, "cores", busy),
        _row("memory", "after the load", "MB", memory_bytes(running.process.pid) / 1e6),
    ]


async def ask(stub: "kvindex_pb2_grpc.KvIndexAsyncStub", asked: list[bytes], for_s: float) -> list[float]:
    """One call each time it is due; milliseconds from then on."""
    times_ms: list[float] = []

    async def one(due_s: float) -> None:
        request = kvindex_pb2.MatchRequest(pool=POOL, block_hashes=random.choice(asked), traffic_class=pb.CHAT)
        reply = await call(stub.Match, request, timeout_s=CALL_S)
        times_ms.append(1e3 * (time.perf_counter() - due_s))
        if reply.hit_blocks != PROMPT_BLOCKS:
            raise ValueError(f"a hit of {reply.hit_blocks} blocks, not {PROMPT_BLOCKS}")

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as calls:
        for number in range(int(for_s * MATCHES_A_S)):
            due_s = began_s + number / MATCHES_A_S
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            calls.create_task(one(due_s))
    return times_ms


async def report(url: str, deliveries: list[bytes]) -> list[float]:
    """As an lmcache server does: one delivery after the other."""
    times_ms: list[float] = []
    headers = {"Content-Type": "application/json"}
    began_s = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=CALL_S) as http:
        for number, body in enumerate(deliveries):
            await asyncio.sleep(max(0.0, began_s + number / DELIVERIES_A_S - time.perf_counter()))
            sent_s = time.perf_counter()
            (await http.post("/events", content=body, headers=headers)).raise_for_status()
            times_ms.append(1e3 * (time.perf_counter() - sent_s))
    return times_ms


def delivery(seq: int) -> bytes:
    """New blocks, of several prompts."""
    entries = [
        {
            "key": {
                "chunk_hash_hex": random.randbytes(32).hex(),
                "model_name": POOL,
                "kv_rank": RANK,
                "object_group_id": 0,
            },
            "size_bytes": 1024,
        }
        for _ in range(REPORTED_A_S // DELIVERIES_A_S)
    ]
    batch = {"instance_id": "bench", "incarnation": 1, "seq": seq, "event_type": "store", "tier": "l2"}
    return msgspec.json.encode({"batches": [batch | {"shared": True, "entries": entries}]})


def prompts() -> list[bytes]:
    """Hashes of stored blocks, as ``FILL`` makes them."""
    firsts = [random.randrange(1, BLOCKS - PROMPT_BLOCKS + 2) for _ in range(PROMPTS)]
    return [
        b"".join(hashlib.sha256(struct.pack("!i", first + i)).digest() for i in range(PROMPT_BLOCKS))
        for first in firsts
    ]


def memory_bytes(pid: int) -> int:
    """Resident."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _text(http: httpx.AsyncClient, path: str) -> str:
    return (await http.get(path)).raise_for_status().text


def _metric(exposed: str, name: str) -> float:
    line = next(line for line in exposed.splitlines() if line.startswith(f"shoal_kvindex_{name} "))
    return float(line.rsplit(" ", 1)[1])


def _row(case: str, what: str, unit: str, value: float) -> Row:
    return Row("kvindex_scale", case, what, unit, (value,))
