"""The log between the instances, on one in memory that can go away, forget, and lose acknowledgements."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import pytest

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_kvindex.directory import Level, Namespace, ObjectKey, Part, Place, Readable
from shoal_kvindex.ingest.changes import Change, Marks, PendingBlocks, Renewal, Renewals, Reports, Sign, StoreSign
from shoal_kvindex.ingest.reports import Kind, Report, ReportSource
from shoal_kvindex.ingest.shared_log import Fate, Logged, LogPosition, Opened, SharedLog
from shoal_kvindex.service import Domain, assemble
from shoal_kvindex.settings import KvIndexSettings
from shoal_kvindex.store.pending import PendingChanges
from shoal_testkit.clock import VirtualClock, settle

SPACE = Namespace("pool", "")
BLOCKS = [number.to_bytes(32, "big") for number in range(8)]
WHOLE = Part(0x01000100, 0)
L1, L2 = Level.L1, Level.L2


@dataclass
class Nats:
    """What all links share. ``is_mute``: takes what it is sent and says nothing."""

    log_id: str = "log-1"
    changes: list[tuple[str, Change]] = field(default_factory=list)
    first_seq: int = 1
    is_away: bool = False
    is_mute: bool = False
    links: list["Link"] = field(default_factory=list)

    def restart(self) -> None:
        """Everything in memory is forgotten."""
        self.log_id += "-again"
        self.changes = []
        for link in self.links:
            link.break_off()

    def go_away(self) -> None:
        self.is_away = True
        for link in self.links:
            link.break_off()


class Link:
    """A LogLink of one instance. ``is_held``: what the log has does not arrive here."""

    def __init__(self, nats: Nats) -> None:
        self._nats = nats
        self._told = 0
        self._hear: Callable[[Logged], None] | None = None
        self._lost: Callable[[str], None] | None = None
        self.is_held = False
        nats.links.append(self)

    def break_off(self) -> None:
        lost, self._hear, self._lost = self._lost, None, None
        if lost is not None:
            lost("the test cut it")

    async def open(self) -> Opened:
        self._check()
        last_seq = self._nats.first_seq - 1 + len(self._nats.changes)
        return Opened(self._nats.log_id, self._nats.first_seq, last_seq)

    async def follow(self, after_seq: int, hear: Callable[[Logged], None], lost: Callable[[str], None]) -> None:
        self._check()
        self._told, self._hear, self._lost = max(after_seq, self._nats.first_seq - 1), hear, lost
        asyncio.get_running_loop().call_soon(self.deliver)

    async def append(self, change_id: str, change: Change) -> None:
        self._check()
        if change_id not in [known for known, _ in self._nats.changes]:
            self._nats.changes.append((change_id, change))
        for link in self._nats.links:
            asyncio.get_running_loop().call_soon(link.deliver)
        if self._nats.is_mute:
            raise Unavailable(pb.UNAVAILABLE, "no acknowledgement")

    def deliver(self) -> None:
        while self._hear and not self.is_held and self._told < self._nats.first_seq - 1 + len(self._nats.changes):
            self._told += 1
            change_id, change = self._nats.changes[self._told - self._nats.first_seq]
            self._hear(Logged(change_id, self._told, 0.0, lambda change=change: change))  # type: ignore[misc]

    def _check(self) -> None:
        if self._nats.is_away:
            raise Unavailable(pb.UNAVAILABLE, "away")


@dataclass
class Instance:
    """One of several kvindexes."""

    domain: Domain
    link: Link
    log: SharedLog

    def readable(self, block: int = 0) -> Readable | None:
        """None also for a block that is known and that nobody can read."""
        found = next(iter(self.domain.directory.readable_run(SPACE, [BLOCKS[block]])), None)
        return found if found and (found.is_shared or found.instance_ids) else None


class Fleet:
    """Instances on one log; their tasks end with the test."""

    def __init__(self, clock: VirtualClock) -> None:
        self.nats = Nats()
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self,
        name: str,
        *,
        durable: LogPosition | None = None,
        has: Iterable[tuple[bytes, Place]] = (),
        max_waiting: int = 1000,
    ) -> Instance:
        domain = assemble(KvIndexSettings(), PendingChanges(10_000), self._clock)
        for block_hash, place in has:
            domain.directory.store(ObjectKey(SPACE, block_hash, WHOLE), place, 10, 100)
        link = Link(self.nats)
        log = SharedLog(link, domain.applier, domain.instances, self._clock, name, max_waiting)
        self._tasks.append(asyncio.ensure_future(log.run()))
        await log.join(durable)
        await settle()
        return Instance(domain, link, log)

    async def come_back(self) -> None:
        self.nats.is_away = False
        await self._clock.advance(2)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


@pytest.fixture
async def fleet(clock: VirtualClock) -> AsyncIterator[Fleet]:
    fleet = Fleet(clock)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(fleet.stop)
        yield fleet


def reports(
    seq: int,
    kind: Kind = Kind.STORE,
    level: Level = L2,
    *,
    block: int = 0,
    server: str = "node-a",
    incarnation: int = 1,
) -> Reports:
    objects = [(ObjectKey(SPACE, BLOCKS[block], WHOLE), 10)]
    return Reports([Report(ReportSource(server, incarnation, seq), kind, level, level is L2, objects)])


async def test_what_one_publishes_all_apply_in_one_order(fleet: Fleet) -> None:
    one, other = await fleet.start("one"), await fleet.start("other")
    await one.log.publish(reports(1))
    await other.log.publish(reports(2, level=L1))
    await settle()
    assert one.readable() == other.readable() == Readable(True, frozenset({"node-a"}))
    assert one.log.position == other.log.position == LogPosition("log-1", 2)


async def test_the_publisher_is_told_what_it_came_to(fleet: Fleet) -> None:
    one = await fleet.start("one")
    summary = await one.log.publish(reports(1))
    again = await one.log.publish(reports(1))
    assert summary is not None
    assert again is not None
    assert (summary.stored_objects, again.stored_objects) == (1, 0)


async def test_who_comes_later_applies_what_the_log_still_has(fleet: Fleet) -> None:
    one = await fleet.start("one")
    await one.log.publish(StoreSign("node-a", Sign.REGISTERED, "10.0.0.1", 80))
    await one.log.publish(reports(1))
    late = await fleet.start("late")
    assert late.readable() == one.readable()
    assert late.domain.instances.addresses() == one.domain.instances.addresses()


async def test_what_is_durable_already_does_not_drop_copies_that_were_loaded(fleet: Fleet) -> None:
    one = await fleet.start("one")
    await one.log.publish(StoreSign("node-a", Sign.REGISTERED, "10.0.0.1", 80, is_l1_void=True))
    await one.log.publish(reports(1, level=L1))
    late = await fleet.start("late", durable=one.log.position, has=[(BLOCKS[0], Place(L1, "node-a"))])
    assert late.readable() == one.readable() == Readable(False, frozenset({"node-a"}))
    assert late.domain.instances.is_registered("node-a")


async def test_without_the_log_a_change_is_applied_here_and_published_later(fleet: Fleet) -> None:
    one, other = await fleet.start("one"), await fleet.start("other")
    fleet.nats.go_away()
    summary = await one.log.publish(reports(1))
    assert summary is not None
    assert summary.stored_objects == 1
    assert one.readable() is not None
    assert other.readable() is None
    assert one.log.fates[Fate.APPLIED_HERE] == 1
    assert one.log.settled_position is None
    await fleet.come_back()
    assert one.log.is_open
    assert one.log.waiting_weight == 0
    assert one.readable() == other.readable()


async def test_what_several_tell_of_the_shared_level_ends_equal_after_an_outage(fleet: Fleet) -> None:
    one, other = await fleet.start("one"), await fleet.start("other")
    await one.log.publish(reports(1))
    fleet.nats.go_away()
    await one.log.publish(reports(1, Kind.DELETE, server="node-b"))
    await other.log.publish(reports(1, Kind.STORE, server="node-c"))
    assert (one.readable(), other.readable()) == (None, Readable(True, frozenset()))
    await fleet.come_back()
    assert one.readable() == other.readable()


async def test_a_change_whose_acknowledgement_is_lost_is_applied_once(fleet: Fleet) -> None:
    one, other = await fleet.start("one"), await fleet.start("other")
    fleet.nats.is_mute = True
    await one.log.publish(reports(1))
    fleet.nats.is_mute = False
    await fleet.come_back()
    await settle()
    assert one.readable() == other.readable() == Readable(True, frozenset())
    assert len(fleet.nats.changes) == 1


async def test_what_was_published_and_did_not_come_back_is_applied_when_the_log_is_lost(fleet: Fleet) -> None:
    one = await fleet.start("one")
    one.link.is_held = True
    publishing = asyncio.ensure_future(one.log.publish(reports(1)))
    await settle()
    assert one.readable() is None
    fleet.nats.go_away()
    await publishing
    assert one.readable() == Readable(True, frozenset())


async def test_a_restarted_log_gets_what_another_instance_may_have_missed(fleet: Fleet) -> None:
    one, other = await fleet.start("one"), await fleet.start("other")
    await one.log.publish(reports(1))
    other.link.is_held = True
    await one.log.publish(reports(2, block=1))
    other.link.is_held = False
    fleet.nats.restart()
    await fleet.come_back()
    assert one.readable(1) == other.readable(1) == Readable(True, frozenset())
    await other.log.publish(reports(3, block=2))  # no gap for anybody
    await settle()
    for instance in (one, other):
        assert instance.readable(2) is not None
        assert not instance.domain.parts.completeness.unlisted


async def test_what_the_bound_dropped_is_made_good_by_a_fence_in_every_map(fleet: Fleet, clock: VirtualClock) -> None:
    one, other = await fleet.start("one", max_waiting=5), await fleet.start("other")
    await one.log.publish(reports(1, level=L1))
    fleet.nats.go_away()
    for seq in range(2, 8):
        await one.log.publish(reports(seq, level=L1, block=seq))
    assert one.log.fates[Fate.DROPPED] == 4
    await fleet.come_back()
    await settle()
    for instance in (one, other):
        assert instance.readable(0) is None
        assert instance.domain.parts.completeness.unlisted == {"node-a"}


async def test_a_gap_that_only_one_saw_is_told_to_all(fleet: Fleet) -> None:
    one, other = await fleet.start("one"), await fleet.start("other")
    await one.log.publish(StoreSign("node-a", Sign.REGISTERED, "10.0.0.1", 80))
    await one.log.publish(reports(1, level=L1))
    fleet.nats.go_away()
    await one.log.publish(reports(2, level=L1, block=1))
    await other.log.publish(reports(3, level=L1, block=2))  # it did not hear of the second report
    await fleet.come_back()
    await settle()
    maps = [[instance.readable(block) for block in range(3)] for instance in (one, other)]
    assert maps[0] == maps[1]
    assert one.domain.parts.completeness.unlisted == other.domain.parts.completeness.unlisted == {"node-a"}
    assert other.domain.instances.is_registered("node-a")


async def test_beats_do_not_wait_for_the_log(fleet: Fleet) -> None:
    one = await fleet.start("one")
    fleet.nats.go_away()
    for _ in range(10):
        await one.log.publish(StoreSign("node-a", Sign.BEAT, "10.0.0.1", 80))
    assert one.log.waiting_weight == 0


async def test_a_position_is_settled_only_when_nothing_is_under_way_and_the_log_is_not_young(
    fleet: Fleet, clock: VirtualClock
) -> None:
    one = await fleet.start("one")
    assert one.log.settled_position is None
    await clock.advance(11)
    await one.log.publish(reports(1))
    assert one.log.settled_position == LogPosition("log-1", 1)


async def test_changes_that_the_log_had_dropped_are_counted(fleet: Fleet) -> None:
    one = await fleet.start("one")
    await one.log.publish(reports(1))
    fleet.nats.go_away()
    fleet.nats.changes = [("somebody.1", reports(1, server="node-b"))]
    fleet.nats.first_seq = 9
    await fleet.come_back()
    assert one.log.missed_changes == 7


async def test_every_kind_of_change_finds_its_part(fleet: Fleet, clock: VirtualClock) -> None:
    one = await fleet.start("one")
    await one.log.publish(reports(1))
    later_s = int(clock.now()) + 900_000
    await one.log.publish(Renewals([Renewal(SPACE, BLOCKS[:2], later_s)]))
    assert one.domain.directory.expires_at_s(SPACE, BLOCKS[0]) == later_s
    await one.log.publish(reports(2, block=1))
    assert one.domain.directory.expires_at_s(SPACE, BLOCKS[1]) == later_s
    await one.log.publish(Marks([(SPACE, [BLOCKS[0]])]))
    assert one.readable(0) is None or one.domain.directory.is_marked(SPACE, BLOCKS[0])
    await one.log.publish(Marks([(SPACE, [BLOCKS[0]])], is_taken_back=True))
    assert not one.domain.directory.is_marked(SPACE, BLOCKS[0])
    await one.log.publish(PendingBlocks(SPACE, [BLOCKS[5]], "request-1", 5.0))
    assert one.domain.prefixes.is_pending(SPACE, BLOCKS[5])
