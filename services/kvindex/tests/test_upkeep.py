"""The loops beside the requests, on a clock that the test moves and a log that is always there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from shoal_kvindex.directory import Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.ingest.changes import Change, Renewals, Sign, StoreSign, StoreSilent
from shoal_kvindex.ingest.gate import Cursor
from shoal_kvindex.ingest.shared_log import Logged, LogPosition, Opened, SharedLog
from shoal_kvindex.lease import Lease, LeaseRow
from shoal_kvindex.service import Domain
from shoal_kvindex.store.engine import create_engine
from shoal_kvindex.store.writer import DirectoryWriter
from shoal_kvindex.upkeep import Together, Upkeep
from shoal_runtime.health import Health
from shoal_testkit.clock import VirtualClock, settle

SPACE, BLOCK = Namespace("pool", ""), bytes(32)


class Echo:
    """A LogLink: what is appended comes back at once."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._hear: Callable[[Logged], None] | None = None

    async def open(self) -> Opened:
        return Opened("log-1", 1, 0)

    async def follow(self, after_seq: int, hear: Callable[[Logged], None], lost: Callable[[str], None]) -> None:
        self._hear = hear

    async def append(self, change_id: str, change: Change) -> None:
        self.changes.append(change)
        assert self._hear is not None
        self._hear(Logged(change_id, len(self.changes), 0.0, lambda: change))


class Table:
    """A LeaseStore that always says the same."""

    def __init__(self, holder: str) -> None:
        self._row = LeaseRow(holder, 1, 1, LogPosition("log-1", 0))

    async def read(self) -> LeaseRow:
        return self._row

    async def beat(self, holder: str, term: int) -> LeaseRow | None:
        return self._row

    async def take(self, seen: LeaseRow, holder: str) -> LeaseRow | None:
        return self._row if self._row.holder == holder else None

    async def give_back(self, holder: str, term: int) -> None: ...


@dataclass
class Running:
    """An upkeep and what it works with."""

    upkeep: Upkeep
    link: Echo
    log: SharedLog
    health: Health


@pytest.fixture
def holder() -> str:
    return "kvindex-1"


@pytest.fixture
async def running(domain: Domain, clock: VirtualClock, holder: str) -> AsyncIterator[Running]:
    link, health = Echo(), Health()
    log = SharedLog(link, domain.applier, domain.instances, clock, "kvindex-1.1", 1000)
    lease = Lease(Table(holder), "kvindex-1", clock)
    never_asked = DirectoryWriter(create_engine("postgresql://nobody@127.0.0.1:1/none"), 1000)
    upkeep = Upkeep(domain.parts, Together(log, lease, never_asked, "kvindex-1"), clock, health)
    tasks = [asyncio.ensure_future(work) for work in (log.run(), lease.keep(), upkeep.watch(), upkeep.relay())]
    await log.join(None)
    await settle()
    yield Running(upkeep, link, log, health)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def with_two_servers(domain: Domain, clock: VirtualClock, running: Running) -> None:
    """One of them falls silent."""
    for instance_id in ("node-a", "node-b"):
        await running.log.publish(StoreSign(instance_id, Sign.REGISTERED, "127.0.0.1", 8080))
        place = Place(Level.L1, instance_id)
        domain.directory.store(ObjectKey(SPACE, BLOCK, Part(0x01000100, 0)), place, 10, 100)
    for _ in range(20):
        await clock.advance(1)
        await running.log.publish(StoreSign("node-b", Sign.BEAT, "127.0.0.1", 8080))


async def test_the_holder_tells_all_of_a_silent_server(domain: Domain, clock: VirtualClock, running: Running) -> None:
    await with_two_servers(domain, clock, running)
    assert StoreSilent("node-a", Cursor(0, 0)) in running.link.changes
    [readable] = domain.directory.readable_run(SPACE, [BLOCK])
    assert readable.instance_ids == {"node-b"}
    assert domain.instances.registered_count == 1
    assert "node-a" in running.health.report["listing"]


@pytest.mark.parametrize("holder", ["kvindex-2"])
async def test_who_has_no_lease_judges_nobody(domain: Domain, clock: VirtualClock, running: Running) -> None:
    await with_two_servers(domain, clock, running)
    assert not [change for change in running.link.changes if isinstance(change, StoreSilent)]
    assert domain.instances.registered_count == 2


async def test_what_is_used_here_is_told_within_a_moment_and_once(
    domain: Domain, clock: VirtualClock, running: Running
) -> None:
    domain.directory.store(ObjectKey(SPACE, BLOCK, Part(0x01000100, 0)), Place(Level.L2, ""), 10, 100)
    domain.directory.extend(SPACE, [BLOCK], 5000)
    await clock.advance(1)
    assert [change for change in running.link.changes if isinstance(change, Renewals)] == [running.link.changes[-1]]


@pytest.mark.parametrize("holder", ["kvindex-2"])
async def test_who_has_no_lease_asks_postgres_nothing(running: Running, clock: VirtualClock) -> None:
    await clock.advance(1)
    assert await running.upkeep.write()


async def test_a_lost_log_is_told(running: Running, clock: VirtualClock) -> None:
    await clock.advance(1)
    assert "log" not in running.health.report
    running.link.open = away  # type: ignore[method-assign]
    running.log.close("the test cut it")
    await clock.advance(1)
    assert "away" in running.health.report["log"]
    assert running.health.is_ready


async def away() -> Opened:
    raise TimeoutError
