"""When the lease holder lists, what it says about it, and what takes over."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from shoal_kvindex.housekeeping import Housekeeping, Rhythm, Works
from shoal_kvindex.ingest.changes import IndexState
from shoal_kvindex.metrics import CATALOGUE
from shoal_kvindex.names import Level, ObjectKey, Place
from shoal_kvindex.ports import StoreFailed, StoreTrouble
from shoal_kvindex.sweep import SweepRules
from shoal_testkit.clock import VirtualClock

NODE_A = Place(Level.L1, "node-a")
DAY_S = 86_400
LISTING_S = 60
Key = Callable[..., ObjectKey]


@pytest.fixture
async def house(lab: Any) -> AsyncIterator[Housekeeping]:
    """Running; the lab's stores are empty and one is registered."""
    works = Works(lab.lister(), lab.sweep(SweepRules(grace_s=5)), lab.completeness, lambda: lab.is_loaded)
    rhythm = Rhythm(listing_s=LISTING_S, sweep_s=1, ages_s=300, tell_s=10)
    house = Housekeeping(lab.duties(), works, rhythm, "kvindex-1")
    loops = [asyncio.ensure_future(loop()) for loop in (house.keep_listed, house.keep_swept, house.keep_counted)]
    yield house
    for loop in loops:
        loop.cancel()
    await asyncio.wait(loops)
    assert all(loop.cancelled() for loop in loops)


async def pass_time(clock: VirtualClock, seconds: float) -> None:
    """In small steps, because a listing takes many turns of the loop."""
    for _ in range(int(seconds * 2)):
        await clock.advance(0.5)
        for _ in range(12):
            await clock.advance(0)


def states(lab: Any) -> list[tuple[bool, str]]:
    return [(change.is_complete, change.reason) for change in lab.changes if isinstance(change, IndexState)]


async def test_a_start_is_listed_once_a_store_is_there(lab: Any, house: Housekeeping, key: Key) -> None:
    lab.stores.registered = []
    lab.stores.shared[key(1)] = 10
    lab.stores.dram["node-a"] = {key(2): 10}
    await pass_time(lab.clock, 3)
    assert not lab.completeness.is_complete
    assert lab.completeness.reason == "no store is registered"
    lab.stores.registered = ["node-a"]
    await pass_time(lab.clock, 5)
    assert lab.completeness.is_complete
    assert (lab.known(), lab.known(NODE_A)) == ({key(1)}, {key(2)})
    assert states(lab)[-1] == (True, "")
    assert lab.completeness.state.lease_holder == "kvindex-1"
    assert lab.completeness.state.sweep.orphan_objects == 2


async def test_a_fence_is_followed_by_a_listing(lab: Any, house: Housekeeping, key: Key) -> None:
    await pass_time(lab.clock, 5)
    lab.stored(key(1), NODE_A)
    lab.stores.shared[key(2)] = 10  # its report was lost: the gap
    lab.directory.drop_l1("node-a")
    lab.completeness.fence("node-a")
    await pass_time(lab.clock, 5)
    assert lab.completeness.is_complete
    assert (lab.known(), lab.known(NODE_A)) == ({key(2)}, {key(1)})


async def test_a_fence_during_a_listing_asks_for_another(lab: Any, house: Housekeeping, key: Key) -> None:
    def fence() -> None:
        lab.stores.on_page = lambda: None
        lab.completeness.fence("node-a")

    lab.stores.on_page = fence
    await pass_time(lab.clock, 8)
    assert lab.completeness.is_complete
    assert [is_complete for is_complete, _ in states(lab)] == [False, True, False, True]


async def test_a_store_that_cannot_list_leaves_the_reason_and_is_asked_less_and_less(
    lab: Any, house: Housekeeping, key: Key
) -> None:
    lab.reported(key(1))
    lab.stores.failures["node-a"] = StoreFailed(StoreTrouble.CANNOT_LIST, "node-a", "cannot list")
    failures = CATALOGUE.value("housekeeping_failures_total", work="listing", kind="cannot_list") or 0
    await pass_time(lab.clock, 70)
    assert lab.completeness.reason == "store node-a cannot list"
    assert lab.known() == {key(1)}
    tried = CATALOGUE.value("housekeeping_failures_total", work="listing", kind="cannot_list") - failures
    assert 5 <= tried <= 8
    del lab.stores.failures["node-a"]
    lab.stores.registered = ["node-a", "node-b"]  # a newcomer is asked at once
    await pass_time(lab.clock, 3)
    assert lab.completeness.is_complete


async def test_now_and_then_everything_is_listed_without_doubt_cast_on_it(
    lab: Any, house: Housekeeping, key: Key
) -> None:
    await pass_time(lab.clock, 5)
    lab.stores.shared[key(1)] = 10
    lab.stores.dram["node-a"] = {key(2): 10}
    before = len(states(lab))
    await pass_time(lab.clock, 20)
    assert lab.known() == set()
    await pass_time(lab.clock, LISTING_S)
    assert (lab.known(), lab.known(NODE_A)) == ({key(1)}, {key(2)})
    assert all(is_complete for is_complete, _ in states(lab)[before:])


async def test_without_the_lease_nothing_happens_and_the_next_holder_goes_on(
    lab: Any, house: Housekeeping, key: Key
) -> None:
    lab.lease.is_held = False
    lab.stored(key(1), lives_s=2)
    await pass_time(lab.clock, 10)
    assert lab.changes == []
    lab.lease.is_held, lab.lease.term = True, 2
    await pass_time(lab.clock, 20)
    assert lab.completeness.is_complete
    assert lab.known() == set()
    state = lab.completeness.state
    assert (state.sweep.marked_blocks, state.sweep.expired_blocks) == (1, 1)


async def test_nothing_is_compared_with_a_map_that_is_not_loaded(lab: Any, house: Housekeeping, key: Key) -> None:
    lab.is_loaded = False
    lab.stores.shared[key(1)] = 10
    await pass_time(lab.clock, 10)
    assert lab.changes == []


async def test_ages_and_counts_are_told(lab: Any, house: Housekeeping, key: Key) -> None:
    await pass_time(lab.clock, 5)
    lab.stored(key(1), lives_s=1800)
    lab.stored(key(2), lives_s=2 * DAY_S - 60)
    await pass_time(lab.clock, 8)
    ages = dict(lab.completeness.state.ages)
    assert ages[3600] == 1
    assert len(ages) == 9


@pytest.mark.parametrize("what", ["rows", "store"])
async def test_a_failure_ends_one_round_only(lab: Any, house: Housekeeping, key: Key, what: str) -> None:
    await pass_time(lab.clock, 5)
    lab.stored(key(1), lives_s=2)
    if what == "rows":
        lab.rows.failure = OSError("connection refused")
    else:
        lab.stores.failures["node-a"] = StoreFailed(StoreTrouble.AWAY, "node-a", "did not answer")
    await pass_time(lab.clock, 20)
    assert set(lab.stores.shared) == {key(1)}
    lab.rows.failure = None
    lab.stores.failures.clear()
    await pass_time(lab.clock, 20)
    assert lab.stores.shared == {}
