"""Who holds the lease, on clocks that the test moves: each process has its own."""

import asyncio
from dataclasses import dataclass, field

import pytest

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_kvindex.ingest.shared_log import LogPosition
from shoal_kvindex.lease import HELD_S, LAPSE_S, Lease, LeaseRow
from shoal_testkit.clock import VirtualClock, settle


@dataclass
class Table:
    """A LeaseStore in memory."""

    row: LeaseRow = field(default_factory=lambda: LeaseRow("", 0, 0, None))
    is_away: bool = False

    def _check(self) -> None:
        if self.is_away:
            raise Unavailable(pb.UNAVAILABLE, "away")

    async def read(self) -> LeaseRow:
        self._check()
        return self.row

    async def beat(self, holder: str, term: int) -> LeaseRow | None:
        self._check()
        if (self.row.holder, self.row.term) != (holder, term):
            return None
        self.row = self.row._replace(beat=self.row.beat + 1)
        return self.row

    async def take(self, seen: LeaseRow, holder: str) -> LeaseRow | None:
        self._check()
        if (self.row.term, self.row.beat) != (seen.term, seen.beat):
            return None
        self.row = self.row._replace(holder=holder, term=self.row.term + 1, beat=self.row.beat + 1)
        return self.row

    async def give_back(self, holder: str, term: int) -> None:
        self._check()
        if (self.row.holder, self.row.term) == (holder, term):
            self.row = self.row._replace(holder="", beat=self.row.beat + 1)


class Holder:
    """One process: its lease, its clock and its task."""

    def __init__(self, table: Table, name: str) -> None:
        self.clock = VirtualClock()
        self.lease = Lease(table, name, self.clock)
        self.keeping = asyncio.ensure_future(self.lease.keep())

    async def stop(self) -> None:
        self.keeping.cancel()
        await asyncio.wait([self.keeping])


async def pass_time(seconds: int, *holders: Holder) -> None:
    for _ in range(seconds):
        for holder in holders:
            await holder.clock.advance(1)


@pytest.fixture
def table() -> Table:
    return Table()


async def test_a_free_lease_is_taken_at_once_and_by_one_only(table: Table) -> None:
    one, other = Holder(table, "one"), Holder(table, "other")
    await settle()
    assert (one.lease.is_held, other.lease.is_held) == (True, False)
    await pass_time(30, one, other)
    assert (one.lease.is_held, other.lease.is_held) == (True, False)
    assert (one.lease.term, other.lease.holder) == (1, "one")
    await one.stop()
    await other.stop()


async def test_a_dead_holder_is_succeeded_within_seconds_and_its_term_is_over(table: Table) -> None:
    one, other = Holder(table, "one"), Holder(table, "other")
    await pass_time(3, one, other)
    await one.stop()
    await pass_time(4, other)
    assert not other.lease.is_held
    await pass_time(3, other)
    assert other.lease.is_held
    assert table.row.term == 2
    await other.stop()


async def test_a_holder_that_slept_does_not_believe_in_itself_until_it_has_beaten(table: Table) -> None:
    one = Holder(table, "one")
    await settle()
    table.is_away = True  # as for a stopped process: no beat gets through
    await one.clock.advance(HELD_S - 0.1)
    assert one.lease.is_held
    await one.clock.advance(0.2)
    assert not one.lease.is_held
    table.is_away = False
    await one.clock.advance(2)
    assert one.lease.is_held
    assert one.lease.term == 1
    await one.stop()


async def test_a_thawed_holder_finds_another_one_and_stays_out(table: Table) -> None:
    one, other = Holder(table, "one"), Holder(table, "other")
    await settle()
    await pass_time(10, other)
    assert other.lease.is_held
    await pass_time(2, one, other)
    assert not one.lease.is_held
    assert one.lease.holder == "other"
    await one.stop()
    await other.stop()


async def test_nobody_holds_the_lease_twice_whatever_the_clocks_do(table: Table) -> None:
    one, other = Holder(table, "one"), Holder(table, "other")
    for step in range(200):
        await (one if step % 7 else other).clock.advance(0.5 + step % 3)
        assert not (one.lease.is_held and other.lease.is_held and one.lease.term == other.lease.term)
    await one.stop()
    await other.stop()


async def test_who_could_not_read_knows_nothing_of_the_silence(table: Table) -> None:
    one, other = Holder(table, "one"), Holder(table, "other")
    await pass_time(2, one, other)
    table.is_away = True
    await pass_time(int(LAPSE_S) + 10, other)  # the holder may have beaten all the time
    table.is_away = False
    await pass_time(2, other)
    assert not other.lease.is_held
    await pass_time(int(LAPSE_S), other)
    assert other.lease.is_held
    await one.stop()
    await other.stop()


async def test_given_back_it_is_taken_by_the_next_look(table: Table) -> None:
    one, other = Holder(table, "one"), Holder(table, "other")
    await pass_time(2, one, other)
    await one.stop()
    await one.lease.give_back()
    assert not one.lease.is_held
    await pass_time(1, other)
    assert other.lease.is_held
    await other.stop()


async def test_an_earlier_life_of_the_same_instance_is_succeeded_at_once(table: Table) -> None:
    one = Holder(table, "one")
    await settle()
    await one.stop()
    again = Holder(table, "one")
    await settle()
    assert again.lease.is_held
    assert again.lease.term == 2
    await again.stop()


async def test_a_duty_runs_while_the_lease_is_held_and_is_cancelled_when_it_is_lost(table: Table) -> None:
    one = Holder(table, "one")
    running: list[str] = []

    async def duty() -> None:
        running.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            running.append("ended")

    working = asyncio.ensure_future(one.lease.while_held(duty))
    await settle()
    assert running == ["began"]
    table.row = LeaseRow("other", 7, 1, None)
    await one.clock.advance(2)
    assert running == ["began", "ended"]
    table.row = LeaseRow("", 7, 2, None)
    await one.clock.advance(2)
    assert running == ["began", "ended", "began"]
    working.cancel()
    await asyncio.wait([working])
    await one.stop()


async def test_a_duty_that_crashes_is_told_to_whoever_runs_it(table: Table) -> None:
    one = Holder(table, "one")

    async def duty() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await one.lease.while_held(duty)
    await one.stop()


async def test_what_the_holder_wrote_is_seen_by_all(table: Table) -> None:
    one, other = Holder(table, "one"), Holder(table, "other")
    await settle()
    table.row = table.row._replace(written=LogPosition("log-1", 12))
    await pass_time(1, one, other)
    assert one.lease.written == other.lease.written == LogPosition("log-1", 12)
    await one.stop()
    await other.stop()
