"""A listing makes map and rows equal to the store, whatever happens while it is made."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_kvindex.ingest.changes import Correction
from shoal_kvindex.ingest.listing import SLICE_OBJECTS, Corrected, ListingFailed
from shoal_kvindex.names import Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.ports import ListedPage, StoreFailed, StoreTrouble

NODE_A = Place(Level.L1, "node-a")
Key = Callable[..., ObjectKey]


async def test_orphans_are_taken_in_and_phantoms_out(lab: Any, key: Key) -> None:
    tenant = Namespace("pool", "tenant")
    shared = [key(1), key(1, 7), key(2, 255), key(2, 255, tenant), key(2, 255, part=Part(0x01000100, 1)), key(9, 128)]
    for stored in shared[:3]:
        lab.stored(stored)
    for orphan in shared[3:]:
        lab.stores.shared[orphan] = 10
    for phantom in (key(5, 7), key(5, 200)):
        lab.reported(phantom)
    assert await lab.lister().list_shared() == Corrected(3, 2)
    assert lab.known() == lab.durable() == set(shared)
    assert await lab.lister().list_shared() == Corrected()


async def test_an_empty_index_is_rebuilt_from_the_listing_alone(lab: Any, key: Key) -> None:
    for number in range(100):
        lab.stores.shared[key(number, number % 5)] = 10
    await lab.lister().list_shared()
    assert lab.known() == set(lab.stores.shared)
    assert lab.directory.expires_at_s(*key(7, 2)[:2]) == int(lab.clock.now()) + 86_400


@pytest.mark.parametrize("together_objects", [1, 2, 7, 50, 10_000])
async def test_however_many_are_compared_at_a_time_the_result_is_the_same(
    lab: Any, key: Key, together_objects: int
) -> None:
    lab.together_objects = together_objects
    for number in range(60):
        shard = 17 * number % 256
        if number % 3:
            lab.stored(key(number, shard))
        if number % 3 == 1:
            del lab.stores.shared[key(number, shard)]
        if number % 3 == 0:
            lab.stores.shared[key(number, shard)] = 10
    assert await lab.lister().list_shared() == Corrected(20, 20)
    assert lab.known() == lab.durable() == set(lab.stores.shared)


async def test_corrections_are_bounded(lab: Any, key: Key) -> None:
    lab.stores.page_objects = 5000
    for number in range(SLICE_OBJECTS + 1):
        lab.stores.shared[key(number, 3)] = 10
    await lab.lister().list_shared()
    assert [len(change.found) for change in lab.changes if isinstance(change, Correction)] == [SLICE_OBJECTS, 1]


async def test_a_store_that_is_reported_while_its_shard_is_listed_stays(lab: Any, key: Key) -> None:
    for number in range(10):
        lab.stored(key(number, 1))
    late = key(0, 0)  # sorted before the page that is read next

    def store_late() -> None:
        lab.stores.on_page = lambda: None
        lab.stored(late)

    lab.stores.on_page = store_late
    assert await lab.lister().list_shared() == Corrected()
    assert late in lab.known()


async def test_a_delete_that_is_reported_while_its_shard_is_listed_stays(lab: Any, key: Key) -> None:
    for number in range(10):
        lab.stored(key(number, 1))

    def delete_one() -> None:
        lab.stores.on_page = lambda: None
        del lab.stores.shared[key(0, 1)]  # the page that lists it is already on its way
        lab.reported_gone(key(0, 1))

    lab.stores.on_page = delete_one
    await lab.lister().list_shared()
    assert key(0, 1) not in lab.known()


async def test_reports_that_come_after_the_listing_change_nothing_that_is_right(lab: Any, key: Key) -> None:
    lab.stored(key(1))
    lab.stored(key(2))
    lab.stores.shared[key(3)] = 10  # stored, not reported yet
    del lab.stores.shared[key(1)]  # deleted, not reported yet
    await lab.lister().list_shared()
    lab.reported(key(3))
    lab.reported_gone(key(1))
    assert lab.known() == {key(2), key(3)}


async def test_a_block_stored_again_while_its_correction_is_on_the_way_is_not_lost(lab: Any, key: Key) -> None:
    lab.reported(key(1, 9))  # a phantom

    def store_again(change: object) -> None:
        lab.before_apply = lambda _: None
        lab.stored(key(1, 9))

    lab.before_apply = store_again
    await lab.lister().list_shared()
    assert lab.known() == {key(1, 9)}


async def test_a_block_deleted_while_its_correction_is_on_the_way_does_not_come_back(lab: Any, key: Key) -> None:
    lab.stores.shared[key(1, 9)] = 10  # an orphan

    def delete(change: object) -> None:
        lab.before_apply = lambda _: None
        del lab.stores.shared[key(1, 9)]
        lab.reported_gone(key(1, 9))

    lab.before_apply = delete
    await lab.lister().list_shared()
    assert lab.known() == set()


async def test_what_the_bound_of_the_map_dropped_is_compared_in_the_rows(make_lab: Any, key: Key) -> None:
    lab = make_lab(50)
    for number in range(200):
        lab.stored(key(number, number % 4))
    for number in (0, 1, 199):
        del lab.stores.shared[key(number, number % 4)]
    before = lab.directory.block_count
    corrected = await lab.lister().list_shared()
    assert corrected == Corrected(0, 3)
    assert lab.durable() == set(lab.stores.shared)
    assert before - 3 <= lab.directory.block_count <= 50


async def test_what_could_not_be_written_is_written_after_the_listing(lab: Any, key: Key) -> None:
    lab.stored(key(1))
    lab.rows.sizes.clear()
    lab.rows.expiries.clear()
    assert await lab.lister().list_shared() == Corrected()
    assert lab.durable() == {key(1)}


async def test_dram_of_a_fenced_server_is_taken_in_again(lab: Any, key: Key) -> None:
    for number in range(10):
        lab.stored(key(number, number), NODE_A)
    lab.directory.drop_l1("node-a")
    lab.stored(key(20, 20), NODE_A)
    assert await lab.lister().list_dram("node-a") == Corrected(10, 0)
    assert lab.known(NODE_A) == set(lab.stores.dram["node-a"])


async def test_a_fence_during_its_listing_ends_it(lab: Any, key: Key) -> None:
    lab.stored(key(1), NODE_A)
    lab.stores.on_page = lambda: lab.recorder.dropped(NODE_A)
    with pytest.raises(ListingFailed):
        await lab.lister().list_dram("node-a")


async def test_any_server_that_can_list_will_do(lab: Any, key: Key) -> None:
    lab.stores.registered = ["node-a", "node-b"]
    lab.stores.failures["node-a"] = StoreFailed(StoreTrouble.CANNOT_LIST, "node-a", "cannot list")
    lab.stores.shared[key(1)] = 10
    assert await lab.lister().list_shared() == Corrected(1, 0)


async def test_without_a_server_that_can_list_nothing_changes_and_it_is_said(lab: Any, key: Key) -> None:
    lab.reported(key(1))
    lab.stores.failures["node-a"] = StoreFailed(StoreTrouble.CANNOT_LIST, "node-a", "cannot list")
    with pytest.raises(StoreFailed, match="store node-a cannot list"):
        await lab.lister().list_shared()
    lab.stores.registered = []
    with pytest.raises(StoreFailed, match="no store is registered"):
        await lab.lister().list_shared()
    assert lab.known() == {key(1)}


async def test_a_listing_out_of_order_is_refused(lab: Any, key: Key) -> None:
    lab.stores.shared = {key(1, 3): 10, key(1, 2): 10}

    async def list_page(instance_id: str, level: Level, token: str | None) -> ListedPage:
        return ListedPage(list(lab.stores.shared.items()), None)

    lab.stores.list_page = list_page
    with pytest.raises(StoreFailed, match="order"):
        await lab.lister().list_shared()


@pytest.mark.parametrize("what", ["lease", "log"])
async def test_a_holder_that_is_one_no_more_stops_in_the_middle(lab: Any, key: Key, what: str) -> None:
    for number in range(10):
        lab.stores.shared[key(number, number)] = 10

    def stop() -> None:
        lab.lease.is_held = what != "lease"
        lab.hears_all = what != "log"

    lab.stores.on_page = stop
    with pytest.raises(ListingFailed):
        await lab.lister().list_shared()
    assert lab.changes == []
