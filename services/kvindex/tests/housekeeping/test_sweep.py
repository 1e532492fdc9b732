"""What goes, what stays, and that a holder may die between any two steps."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal_kvindex.ingest.changes import Correction, Marks
from shoal_kvindex.names import SHARED, Level, ObjectKey, Part, Place
from shoal_kvindex.ports import StoreFailed, StoreTrouble
from shoal_kvindex.sweep import LeaseLost, Sweep, SweepRules
from shoal_policy import RoomPolicy

NODE_A, NODE_B = Place(Level.L1, "node-a"), Place(Level.L1, "node-b")
GRACE_S, REPORTS_S = 30.0, 10.0
RULES = SweepRules(grace_s=GRACE_S, reports_s=REPORTS_S, page_blocks=3, batch_blocks=2)
Key = Callable[..., ObjectKey]


class Crash(Exception):
    """The process ended here."""


async def steps(lab: Any, sweep: Sweep, seconds: float) -> None:
    """One step a second."""
    for _ in range(int(seconds)):
        await sweep.step()
        await lab.clock.advance(1)


async def test_expired_blocks_go_from_both_levels_and_fresh_ones_stay(lab: Any, key: Key) -> None:
    sweep = lab.sweep(RULES)
    for number in range(10):
        lab.stored(key(number), lives_s=5)
        lab.stored(key(number), NODE_A)
        lab.stored(key(100 + number), lives_s=1000)
    await lab.clock.advance(6)
    await steps(lab, sweep, GRACE_S - 1)
    assert lab.stores.deleted == []
    assert next(lab.directory.readable_run(*_run(key(1))), None) is None  # hidden
    await steps(lab, sweep, 30)
    assert set(lab.stores.shared) == lab.known() == lab.durable() == {key(100 + number) for number in range(10)}
    assert lab.stores.dram["node-a"] == {}
    assert len(lab.stores.deleted) == 20
    assert (sweep.counts.marked_blocks, sweep.counts.expired_blocks) == (10, 10)
    assert lab.directory.marked == {}


def _run(key: ObjectKey) -> tuple[Any, list[bytes]]:
    return key.namespace, [key.block_hash]


async def test_a_block_that_was_used_between_mark_and_delete_stays_and_is_seen_again(lab: Any, key: Key) -> None:
    sweep = lab.sweep(RULES)
    for number in range(4):
        lab.stored(key(number), lives_s=5)
    await lab.clock.advance(6)
    await steps(lab, sweep, 10)
    lab.renew(key(2), 1000)
    await steps(lab, sweep, 60)
    assert set(lab.stores.shared) == lab.known() == {key(2)}
    assert next(lab.directory.readable_run(*_run(key(2)))).is_shared
    assert (sweep.counts.renewed_blocks, sweep.counts.expired_blocks) == (1, 3)


async def test_a_use_is_seen_in_the_very_turn_in_which_the_delete_would_be_sent(lab: Any, key: Key) -> None:
    sweep = lab.sweep(RULES)
    for number in range(2):
        lab.stored(key(number), lives_s=5)
    await lab.clock.advance(6)
    await steps(lab, sweep, 5)
    lab.renew(key(0), 1000)  # taken back in the same step, and while that is told to the log:
    lab.before_apply = lambda change: lab.renew(key(1), 1000)
    await steps(lab, sweep, 60)
    assert lab.stores.deleted == []


async def test_a_block_that_a_request_computes_again_stays(lab: Any, key: Key) -> None:
    sweep = lab.sweep(RULES)
    lab.stored(key(1), lives_s=5)
    await lab.clock.advance(6)
    await steps(lab, sweep, 5)
    lab.pending.add((key(1).namespace, key(1).block_hash))
    await steps(lab, sweep, 100)
    assert lab.stores.deleted == []
    lab.renew(key(1), 1000)
    lab.pending.clear()
    await steps(lab, sweep, 100)
    assert lab.known() == {key(1)}


async def test_a_renewal_that_is_not_in_the_rows_yet_counts(lab: Any, key: Key) -> None:
    sweep = lab.sweep(RULES)
    lab.stored(key(1), lives_s=1000)
    lab.rows.expiries[key(1).namespace, key(1).block_hash] = 0
    await steps(lab, sweep, 100)
    assert lab.changes == []


async def test_blocks_that_the_map_dropped_are_swept_by_their_rows(make_lab: Any, key: Key) -> None:
    lab = make_lab(5)
    for number in range(50):
        lab.stored(key(number), lives_s=5)
        lab.stored(key(100 + number), lives_s=1000)
    await lab.clock.advance(6)
    await steps(lab, lab.sweep(RULES), 100)
    assert set(lab.stores.shared) == lab.durable() == {key(100 + number) for number in range(50)}


async def test_rows_without_any_object_are_removed(lab: Any, key: Key) -> None:
    lab.rows.expiries[key(1).namespace, key(1).block_hash] = 5
    sweep = lab.sweep(RULES)
    await steps(lab, sweep, 5)
    assert lab.rows.expiries == {}
    assert (lab.stores.deleted, sweep.counts.marked_blocks) == ([], 0)


async def test_locked_dram_is_tried_again_until_it_is_free(lab: Any, key: Key) -> None:
    sweep = lab.sweep(RULES)
    lab.stored(key(1), NODE_A, lives_s=5)
    lab.stores.locked.add(key(1))
    await lab.clock.advance(6)
    await steps(lab, sweep, 100)
    assert lab.known(NODE_A) == {key(1)}
    lab.stores.locked.clear()
    await steps(lab, sweep, 50)
    assert lab.known(NODE_A) == set()
    assert sweep.counts.expired_blocks == 1


async def test_deletes_that_nobody_reports_are_repeated_once_and_corrected(lab: Any, key: Key) -> None:
    sweep = lab.sweep(RULES)
    lab.stored(key(1), lives_s=5)
    lab.stores.is_mute = True
    await lab.clock.advance(6)
    await steps(lab, sweep, 100)
    assert lab.known() == lab.durable() == set()
    assert lab.stores.deleted == [(SHARED, key(1))] * 2
    assert [change for change in lab.changes if isinstance(change, Correction)] == [Correction(SHARED, (), [key(1)])]


async def test_every_part_of_a_block_goes(lab: Any, key: Key) -> None:
    parts = [Part(0x02000200, 0), Part(0x02010201, 0), Part(0x02000200, 1), Part(0x02010201, 1)]
    for part in parts:
        lab.stored(key(1, part=part), lives_s=5)
    await lab.clock.advance(6)
    await steps(lab, lab.sweep(RULES), 100)
    assert lab.stores.shared == {}
    assert len(lab.stores.deleted) == 4


async def test_another_server_deletes_when_one_does_not(lab: Any, key: Key) -> None:
    lab.stores.registered = ["node-a", "node-b"]
    lab.stores.failures["node-a"] = StoreFailed(StoreTrouble.REFUSED, "node-a", "could not delete")
    lab.stored(key(1), lives_s=5)
    await lab.clock.advance(6)
    await steps(lab, lab.sweep(RULES), 100)
    assert lab.stores.shared == {}


async def test_without_a_server_the_delete_waits_and_a_used_block_comes_back(lab: Any, key: Key) -> None:
    lab.stored(key(1), lives_s=5)
    lab.stored(key(2), lives_s=5)
    await lab.clock.advance(6)
    sweep = lab.sweep(RULES)
    await steps(lab, sweep, 5)
    lab.stores.registered = []
    lab.renew(key(2), 1000)
    await lab.clock.advance(GRACE_S)
    for _ in range(3):
        with pytest.raises(StoreFailed, match="no store"):
            await sweep.step()
    assert lab.directory.marked.keys() == {(key(1).namespace, key(1).block_hash)}
    lab.stores.registered = ["node-a"]
    await steps(lab, sweep, 20)
    assert lab.known() == {key(2)}


async def test_while_the_log_is_away_nothing_is_deleted_and_the_grace_begins_anew(lab: Any, key: Key) -> None:
    sweep = lab.sweep(RULES)
    lab.stored(key(1), lives_s=5)
    await lab.clock.advance(6)
    await steps(lab, sweep, GRACE_S - 5)
    lab.hears_all = False
    await steps(lab, sweep, 100)
    lab.hears_all = True
    await steps(lab, sweep, GRACE_S - 5)
    assert lab.stores.deleted == []
    await steps(lab, sweep, 10)
    assert lab.stores.shared == {}


async def test_what_is_marked_at_a_time_is_bounded(lab: Any, key: Key) -> None:
    for number in range(20):
        lab.stored(key(number), lives_s=5)
    await lab.clock.advance(6)
    sweep = lab.sweep(SweepRules(grace_s=GRACE_S, page_blocks=3, max_marked_blocks=7))
    await steps(lab, sweep, 5)
    assert len(lab.directory.marked) == 7
    await steps(lab, sweep, 200)
    assert lab.stores.shared == {}


class TestRoom:
    """By capacity."""

    RULES = SweepRules(room=RoomPolicy(0.9, 0.5), grace_s=GRACE_S, page_blocks=3)

    async def test_a_full_level_loses_what_expires_soonest_down_to_the_low_mark(self, lab: Any, key: Key) -> None:
        for number in range(10):
            lab.stored(key(number), lives_s=1000 - number)
        lab.capacity_bytes = 110  # 10 blocks of 10 bytes are above 99
        sweep = lab.sweep(self.RULES)
        await steps(lab, sweep, 100)
        assert set(lab.stores.shared) == {key(number) for number in range(5)}
        assert (sweep.counts.evicted_blocks, sweep.counts.expired_blocks) == (5, 0)
        marks = [change for change in lab.changes if isinstance(change, Marks)]
        assert [change.is_for_room for change in marks] == [True]

    async def test_what_is_deleted_does_not_count_as_leaving_any_more(self, lab: Any, key: Key) -> None:
        for number in range(10):
            lab.stored(key(number), lives_s=1000 - number)
        lab.capacity_bytes = 110
        sweep = lab.sweep(self.RULES)
        while len(lab.stores.shared) == 10:
            await steps(lab, sweep, 1)
        for number in range(10, 16):
            lab.stored(key(number), lives_s=2000)
        await steps(lab, sweep, 1)
        assert sweep.counts.marked_blocks == 5 + 6  # of 110 bytes in use down to 55, at once

    async def test_below_the_high_mark_and_without_a_capacity_nothing_goes(self, lab: Any, key: Key) -> None:
        for number in range(10):
            lab.stored(key(number))
        for lab.capacity_bytes in (112, None):
            await steps(lab, lab.sweep(self.RULES), 100)
        assert lab.changes == []

    async def test_a_block_that_was_used_since_its_mark_is_spared(self, lab: Any, key: Key) -> None:
        for number in range(10):
            lab.stored(key(number), lives_s=1000 + number)
        lab.capacity_bytes = 110
        sweep = lab.sweep(self.RULES)
        await steps(lab, sweep, 5)
        lab.renew(key(0), 5000)
        await steps(lab, sweep, 100)
        assert key(0) in lab.stores.shared
        assert sweep.counts.renewed_blocks == 1

    async def test_marks_for_room_of_a_dead_holder_are_finished(self, lab: Any, key: Key) -> None:
        for number in range(10):
            lab.stored(key(number), lives_s=1000 + number)
        lab.capacity_bytes = 110
        await steps(lab, lab.sweep(self.RULES), 5)
        assert len(lab.directory.marked) == 5
        lab.lease.term = 2
        sweep = lab.sweep(self.RULES)
        await steps(lab, sweep, 100)
        assert set(lab.stores.shared) == {key(number) for number in range(5, 10)}
        assert (sweep.counts.marked_blocks, sweep.counts.evicted_blocks) == (0, 5)


async def test_without_the_lease_nothing_is_done(lab: Any, key: Key) -> None:
    lab.stored(key(1), lives_s=5)
    await lab.clock.advance(6)
    lab.lease.is_held = False
    with pytest.raises(LeaseLost):
        await lab.sweep(RULES).step()
    assert lab.changes == []


class Stopper:
    """Ends the process at its n-th step: before or after a change is published, a delete, a question to the rows."""

    def __init__(self, lab: Any, at: int) -> None:
        self._left = at
        self.has_stopped = False
        lab.before_apply = lab.after_apply = self._count
        lab.stores.on_delete = self._count
        blocks = lab.rows.blocks

        async def counted(names: Any) -> Any:
            self._count()
            return await blocks(names)

        lab.rows.blocks = counted

    def _count(self, _: object = None) -> None:
        self._left -= 1
        if self._left == 0:
            self.has_stopped = True
            raise Crash


async def _sweep_with_a_crash(lab: Any, key: Key, at: int) -> bool:
    """Whether the crash came before everything was done."""
    stopper = Stopper(lab, at)
    for number in range(7):
        lab.stored(key(number), lives_s=5)
        lab.stored(key(number), NODE_A, lives_s=5)
        lab.stored(key(100 + number), lives_s=100_000)
    await lab.clock.advance(6)
    sweep = lab.sweep(RULES)
    for second in range(200):
        if second == 10:
            lab.renew(key(3), 100_000)
        try:
            await sweep.step()
        except Crash:
            lab.lease.term += 1
            await lab.clock.advance(5)  # until another instance has the lease
            sweep = lab.sweep(RULES)
        await lab.clock.advance(1)
    kept = {key(3), *(key(100 + number) for number in range(7))}
    assert set(lab.stores.shared) == lab.known() == lab.durable() == kept
    assert set(lab.stores.dram["node-a"]) == lab.known(NODE_A) == {key(3)}
    assert len(set(lab.stores.deleted)) == len(lab.stores.deleted) == 12
    assert lab.directory.marked == {}
    return stopper.has_stopped


async def test_a_holder_that_dies_between_any_two_steps_loses_nothing_and_deletes_nothing_twice(
    make_lab: Any, key: Key
) -> None:
    at = 1
    while await _sweep_with_a_crash(make_lab(1000), key, at):
        at += 1
    assert at > 15


async def test_two_holders_at_once_do_no_harm(lab: Any, key: Key) -> None:
    """An old holder that does not know yet."""
    for number in range(10):
        lab.stored(key(number), lives_s=5)
        lab.stored(key(100 + number), lives_s=1000)
    await lab.clock.advance(6)
    first, second = lab.sweep(RULES), lab.sweep(RULES)
    for _ in range(100):
        await asyncio.gather(first.step(), second.step())
        await lab.clock.advance(1)
    assert set(lab.stores.shared) == lab.known() == {key(100 + number) for number in range(10)}
