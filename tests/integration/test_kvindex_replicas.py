"""Several kvindexes on one NATS and one Postgres: equal maps, one writer, and what becomes of both in an outage."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2, kvindex_pb2_grpc
from shoal_kvindex.service import KvIndexService
from shoal_kvindex.settings import KvIndexSettings
from shoal_kvindex.store.engine import create_engine
from shoal_runtime import grpc
from shoal_runtime.process import Process, running
from shoal_runtime.servers import free_port
from shoal_testkit.processes import RunningProcess, process_running, service_command
from shoal_testkit.servers import NatsRunning, PostgresRunning, nats_running, postgres_running

pytestmark = pytest.mark.timeout(150)

POOL = "pool-of-the-test"
SERVERS = ("node-a", "node-b", "node-c")


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass
class Instance:
    """A kvindex in this process (``process``) or in one of its own (``program``), and its clients."""

    name: str
    http: httpx.AsyncClient
    grpc: "kvindex_pb2_grpc.KvIndexAsyncStub"
    ops: httpx.AsyncClient
    process: Process | None = None
    program: RunningProcess | None = None

    async def report(self, server: "Server", numbers: Iterable[int] = (), **fields: Any) -> httpx.Response:
        server.seq += 1
        key = {"model_name": POOL, "kv_rank": 0x01000100, "object_group_id": 0, "cache_salt": ""}
        entries = [{"key": key | {"chunk_hash_hex": block(number).hex()}, "size_bytes": 1024} for number in numbers]
        batch = {"instance_id": server.name, "incarnation": 1, "seq": server.seq, "event_type": "store", "tier": "l2"}
        batch |= {"shared": fields.get("tier", "l2") == "l2", "entries": entries} | fields
        return await self.http.post("/events", json={"batches": [batch]})

    async def match(self, number: int) -> tuple[int, list[tuple[int, str]]]:
        request = kvindex_pb2.MatchRequest(pool=POOL, block_hashes=block(number), traffic_class=pb.PROBE)
        reply = await grpc.call(self.grpc.Match, request, timeout_s=5)
        return reply.hit_blocks, sorted((hit.level, hit.store_instance_id) for hit in reply.levels)

    async def map_of(self, numbers: Iterable[int]) -> dict[int, Any]:
        return {number: await self.match(number) for number in numbers}

    async def reasons(self) -> dict[str, str]:
        return dict((await self.ops.get("/readyz")).json()["reasons"])


@dataclass
class Server:
    """An lmcache server's numbering of its reports."""

    name: str
    seq: int = 0


@dataclass
class Fleet:
    """What a test starts on one NATS and one database."""

    nats_url: str
    database_url: str
    directory: Path
    stack: contextlib.AsyncExitStack
    servers: dict[str, Server] = field(default_factory=lambda: {name: Server(name) for name in SERVERS})

    async def start(self, name: str, stack: contextlib.AsyncExitStack | None = None) -> Instance:
        """In this process."""
        stack = stack or self.stack
        ports = {"ops_port": free_port(), "coordinator_port": free_port()}
        settings = KvIndexSettings(
            nats_url=self.nats_url,
            postgres={"url": self.database_url},
            instance_id=name,
            write_interval_s=0.05,
            drain_s=1,
            **ports,
        )
        service = KvIndexService(settings)
        process = await stack.enter_async_context(running(service, settings))
        instance = await self._clients(stack, name, service.address, ports)
        instance.process = process
        await eventually(lambda: is_ready(instance))
        return instance

    async def start_program(self, name: str) -> Instance:
        """In a process of its own, to be killed or stopped."""
        ports = {"coordinator_port": free_port(), "grpc_port": free_port()}
        environ = {
            "SHOAL_NATS_URL": self.nats_url,
            "SHOAL_KVINDEX_POSTGRES_URL": self.database_url,
            "SHOAL_KVINDEX_INSTANCE_ID": name,
            "SHOAL_KVINDEX_WRITE_INTERVAL_S": "0.05",
        } | {f"SHOAL_KVINDEX_{key.upper()}": str(port) for key, port in ports.items()}
        directory = self.directory / name
        directory.mkdir()
        program = await self.stack.enter_async_context(
            process_running(service_command("kvindex", environ), directory, timeout_s=60)
        )
        ports["ops_port"] = int(program.server.url.rsplit(":", 1)[1])
        instance = await self._clients(self.stack, name, f"127.0.0.1:{ports['grpc_port']}", ports)
        instance.program = program
        await eventually(lambda: is_ready(instance))
        return instance

    async def _clients(
        self, stack: contextlib.AsyncExitStack, name: str, address: str, ports: dict[str, int]
    ) -> Instance:
        channel = await stack.enter_async_context(grpc.connect(address))
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)
            )
            for port in (ports["coordinator_port"], ports["ops_port"])
        ]
        return Instance(name, clients[0], kvindex_pb2_grpc.KvIndexStub(channel), clients[1])

    async def lease(self) -> Any:
        engine = create_engine(self.database_url)
        try:
            async with engine.connect() as connection:
                return (await connection.execute(text("SELECT * FROM kvindex.lease"))).one()
        finally:
            await engine.dispose()

    async def durable_blocks(self) -> set[bytes]:
        engine = create_engine(self.database_url)
        try:
            async with engine.connect() as connection:
                rows = await connection.execute(text("SELECT DISTINCT block_hash FROM kvindex.objects"))
                return {bytes(row.block_hash) for row in rows}
        finally:
            await engine.dispose()

    async def held_by(self, *names: str, timeout_s: float = 20) -> None:
        async def is_so() -> bool:
            return (await self.lease()).holder in names

        await eventually(is_so, timeout_s)

    async def all_durable(self, numbers: Iterable[int], timeout_s: float = 20) -> None:
        wanted = {block(number) for number in numbers}

        async def is_so() -> bool:
            return await self.durable_blocks() == wanted

        await eventually(is_so, timeout_s)


async def eventually(holds: Callable[[], Awaitable[bool]], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not await holds():
            await asyncio.sleep(0.05)


async def is_ready(instance: Instance) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await instance.ops.get("/readyz")).status_code == 200
    return False


async def equal(instances: list[Instance], numbers: Iterable[int], timeout_s: float = 20) -> dict[int, Any]:
    """All maps, once they say the same."""
    numbers = list(numbers)
    maps: list[dict[int, Any]] = []

    async def are_equal() -> bool:
        maps[:] = [await instance.map_of(numbers) for instance in instances]
        return all(other == maps[0] for other in maps[1:])

    await eventually(are_equal, timeout_s)
    return maps[0]


@pytest.fixture
async def fleet(nats: NatsRunning, database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        yield Fleet(nats.url, database_url, tmp_path, stack)


async def test_reports_to_different_instances_end_in_equal_maps_and_one_writes(fleet: Fleet) -> None:
    instances = [await fleet.start(name) for name in ("one", "two", "three")]
    a, b, c = fleet.servers.values()
    for round_number in range(10):
        first = round_number * 10
        for instance, server in zip(instances, (a, b, c), strict=True):
            answer = await instance.report(server, range(first, first + 5))
            assert answer.json() == {"applied": 1, "duplicates": 0, "stale": 0}
        await instances[round_number % 3].report(a, range(first + 5, first + 8), tier="l1")
        await instances[(round_number + 1) % 3].report(b, [first], event_type="delete")
    known = await equal(instances, range(110))
    assert known[1] == (1, [(pb.L2, "")])
    assert known[95] == (1, [(pb.L1, "node-a")])
    assert known[0][0] == 0
    holder = (await fleet.lease()).holder
    assert holder in ("one", "two", "three")
    await fleet.all_durable(number for number, (hit, _) in known.items() if hit)


async def test_what_is_used_at_one_instance_is_kept_by_all(fleet: Fleet) -> None:
    one, two = await fleet.start("one"), await fleet.start("two")
    await one.report(fleet.servers["node-a"], [1])
    hashes = block(1) + block(2)
    settle = kvindex_pb2.SettleRequest(pool=POOL, block_hashes=hashes, traffic_class=pb.CHAT)
    await grpc.call(two.grpc.Settle, settle, timeout_s=5)
    await one.report(fleet.servers["node-a"], [2])  # claimed before it was stored, and elsewhere
    engine = create_engine(fleet.database_url)

    async def both_are_kept() -> bool:
        async with engine.connect() as connection:
            rows = (await connection.execute(text("SELECT expires_at_s FROM kvindex.blocks"))).scalars().all()
        return len(rows) == 2 and max(rows) - min(rows) < 60 and min(rows) > one_day_later_s

    assert one.process is not None
    one_day_later_s = one.process.clock.now() + 5 * 24 * 3600
    try:
        await eventually(both_are_kept)
    finally:
        await engine.dispose()


async def test_an_instance_that_starts_late_knows_all_and_the_servers(fleet: Fleet) -> None:
    one = await fleet.start("one")
    a = fleet.servers["node-a"]
    await one.http.post("/instances", json={"instance_id": "node-a", "ip": "127.0.0.1", "http_port": 9})
    await one.report(a, event_type="config", capacity_bytes=1 << 40)
    await one.report(a, range(10))
    await one.report(a, range(10, 15), tier="l1")
    late = await fleet.start("late")
    await equal([one, late], range(20))
    assert (await late.http.put("/instances/node-a/heartbeat")).status_code == 200
    reply = await grpc.call(late.grpc.Overview, kvindex_pb2.OverviewRequest(), timeout_s=5)
    assert reply.shared_capacity_bytes == 1 << 40
    await late.report(a, [15])  # in the server's own order, at another instance: no gap
    known = await equal([one, late], range(20))
    assert known[12] == (1, [(pb.L1, "node-a")])


async def test_leaving_and_registering_anew_are_seen_by_all(fleet: Fleet) -> None:
    one, two = await fleet.start("one"), await fleet.start("two")
    a = fleet.servers["node-a"]
    registration = {"instance_id": "node-a", "ip": "127.0.0.1", "http_port": 9}
    assert (await two.http.put("/instances/node-a/heartbeat")).status_code == 404
    await one.http.post("/instances", json=registration)
    await two.report(a, [1], tier="l1")
    assert (await two.http.put("/instances/node-a/heartbeat")).status_code == 200
    assert (await equal([one, two], [1]))[1][0] == 1
    assert (await two.http.post("/instances", json=registration)).json()["re_registered"]
    assert (await equal([one, two], [1]))[1][0] == 0
    await one.report(a, [1], tier="l1")
    assert (await equal([one, two], [1]))[1][0] == 1
    await two.http.delete("/instances/node-a")
    assert (await equal([one, two], [1]))[1][0] == 0
    assert (await one.http.put("/instances/node-a/heartbeat")).status_code == 404


async def test_a_killed_holder_is_succeeded_and_forgets_nothing(fleet: Fleet) -> None:
    holder = await fleet.start_program("holder")
    await fleet.held_by("holder")
    two, three = await fleet.start("two"), await fleet.start("three")
    a, b = fleet.servers["node-a"], fleet.servers["node-b"]
    writing = [asyncio.ensure_future(two.report(a, range(n * 20, n * 20 + 20))) for n in range(30)]
    await asyncio.sleep(0.1)
    assert holder.program is not None
    holder.program.kill()  # in the middle of whatever it writes
    await asyncio.gather(*writing)
    await three.report(b, range(600, 620))
    began_s = asyncio.get_running_loop().time()
    await fleet.held_by("two", "three")
    assert asyncio.get_running_loop().time() - began_s < 12
    known = await equal([two, three], range(620))
    assert all(hit == 1 for hit, _ in known.values())
    await fleet.all_durable(range(620))
    assert (await fleet.lease()).term == 2


async def test_a_frozen_holder_loses_the_lease_and_writes_nothing_when_it_thaws(fleet: Fleet) -> None:
    holder = await fleet.start_program("holder")
    await fleet.held_by("holder")
    two, three = await fleet.start("two"), await fleet.start("three")
    a, b = fleet.servers["node-a"], fleet.servers["node-b"]
    await holder.report(a, range(20))
    assert holder.program is not None
    holder.program.signal(signal.SIGSTOP)
    try:
        await two.report(b, range(20, 40))
        await fleet.held_by("two", "three")
        await fleet.all_durable(range(40))
        await three.report(b, range(40), event_type="delete")
        await fleet.all_durable([])
    finally:
        holder.program.signal(signal.SIGCONT)
    await equal([holder, two, three], range(40), timeout_s=30)
    await asyncio.sleep(2)
    assert (await fleet.lease()).holder in ("two", "three")
    assert await fleet.durable_blocks() == set()
    assert "Traceback" not in holder.program.output


async def test_an_orderly_stop_gives_the_lease_back_at_once(fleet: Fleet) -> None:
    async with contextlib.AsyncExitStack() as stack:
        one = await fleet.start("one", stack)
        await fleet.held_by("one")
        two = await fleet.start("two")
        await one.report(fleet.servers["node-a"], range(10))
    await fleet.held_by("two", timeout_s=3)
    await fleet.all_durable(range(10))
    assert await two.match(1) == (1, [(pb.L2, "")])


@pytest.fixture
async def own_nats(database_url: str, tmp_path: Path) -> AsyncIterator[tuple[Fleet, NatsRunning]]:
    async with nats_running() as nats, contextlib.AsyncExitStack() as stack:
        yield Fleet(nats.url, database_url, tmp_path, stack), nats


async def test_a_restart_of_nats_loses_nothing(own_nats: tuple[Fleet, NatsRunning]) -> None:
    fleet, nats = own_nats
    instances = [await fleet.start(name) for name in ("one", "two", "three")]
    one, two, three = instances
    a, b, c = fleet.servers.values()
    await one.report(a, range(10))
    await two.report(b, range(10, 20), tier="l1")
    nats.kill()
    answer = await one.report(a, range(20, 30))
    assert answer.json()["applied"] == 1
    await two.report(b, range(30, 40), tier="l1")
    await three.report(c, range(5), event_type="delete")
    assert await one.match(25) == (1, [(pb.L2, "")])
    assert (await one.match(35))[0] == 0

    async def is_told() -> bool:
        return all(["log" in await instance.reasons() for instance in instances])

    await eventually(is_told)
    await nats.start()
    known = await equal(instances, range(50))
    assert [number for number, (hit, _) in known.items() if hit] == list(range(5, 40))
    await one.report(a, range(40, 45))
    await two.report(b, [45], tier="l1")
    known = await equal(instances, range(50))
    assert [number for number, (hit, _) in known.items() if hit] == list(range(5, 46))

    async def is_over() -> bool:
        return not any(["log" in await instance.reasons() for instance in instances])

    await eventually(is_over)
    await fleet.all_durable(range(5, 46))


async def test_one_instance_goes_on_alone_without_nats(own_nats: tuple[Fleet, NatsRunning]) -> None:
    fleet, nats = own_nats
    one = await fleet.start("one")
    await fleet.held_by("one")
    nats.kill()
    a = fleet.servers["node-a"]
    for first in range(0, 50, 10):
        await one.report(a, range(first, first + 10))
    assert (await one.match(49))[0] == 1
    await fleet.all_durable(range(50))
    assert await is_ready(one)


async def test_a_restart_of_postgres_is_written_up_afterwards(nats: NatsRunning, tmp_path: Path) -> None:
    async with postgres_running() as postgres, nats_running() as own, contextlib.AsyncExitStack() as stack:
        fleet = Fleet(own.url, await postgres.create_database(), tmp_path, stack)
        instances = [await fleet.start(name) for name in ("one", "two", "three")]
        one, two, _ = instances
        a, b = fleet.servers["node-a"], fleet.servers["node-b"]
        await one.report(a, range(10))
        await fleet.all_durable(range(10))
        await outage(postgres, instances)
        await one.report(a, range(10, 20))
        await two.report(b, range(20, 30))
        await equal(instances, range(30))
        await postgres.start()
        await fleet.all_durable(range(30), timeout_s=40)
        late = await fleet.start("late")
        known = await equal([*instances, late], range(30))
        assert all(hit for hit, _ in known.values())


async def outage(postgres: PostgresRunning, instances: list[Instance]) -> None:
    """Long enough that nobody believes to hold the lease."""
    postgres.kill()

    async def is_told() -> bool:
        return any(["postgres" in await instance.reasons() for instance in instances])

    await instances[0].report(Server("node-x"), [])
    await eventually(is_told)
    await asyncio.sleep(6)
