from pathlib import Path

import pytest

from shoal_engine.scripted import BlockKey, BlockStore, SharedFolder, SharedMemory, StoreEvent
from shoal_engine.scripted.store import Loaded, SharedLevel


def keys(count: int, salt: str = "", pool: str = "models/tiny") -> list[BlockKey]:
    return [BlockKey(pool, bytes([i]) * 32, salt) for i in range(count)]


def told(events: list[StoreEvent]) -> list[tuple[str, str, int]]:
    return [(event.kind, event.level, len(event.keys)) for event in events]


@pytest.fixture(params=["memory", "folder"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> SharedLevel:
    return SharedMemory() if request.param == "memory" else SharedFolder(tmp_path / "l2")


def test_stored_blocks_are_matched_from_the_first_on(shared: SharedLevel) -> None:
    store = BlockStore(shared)
    store.store(keys(3))
    assert store.match(keys(5)) == 3
    assert store.match(keys(2)) == 2
    assert store.match(keys(5)[1:]) == 2
    assert store.match(keys(3, salt="tenant")) == 0
    assert store.match(keys(3, pool="models/other")) == 0


def test_hole_ends_a_match(shared: SharedLevel) -> None:
    store = BlockStore(shared)
    store.store(keys(3))
    store.drop_l1()
    shared.remove(keys(3)[1])
    assert store.match(keys(3)) == 1


def test_other_store_loads_what_is_shared_through_a_temporary_copy(shared: SharedLevel) -> None:
    BlockStore(shared).store(keys(2))
    events: list[StoreEvent] = []
    other = BlockStore(shared, block_bytes=10, listener=events.append)
    assert other.match(keys(2)) == 2
    assert other.load(keys(2)) == Loaded(2, 20)
    assert told(events) == [("access", "l2", 2), ("store", "l1", 2), ("delete", "l1", 2)]


def test_block_that_the_shared_level_has_is_not_reported_again(shared: SharedLevel) -> None:
    BlockStore(shared).store(keys(2))
    events: list[StoreEvent] = []
    BlockStore(shared, listener=events.append).store(keys(3))
    assert told(events) == [("store", "l1", 3), ("store", "l2", 1)]


def test_hit_in_memory_does_not_repair_the_shared_level() -> None:
    shared = SharedMemory()
    store = BlockStore(shared)
    store.store(keys(1))
    shared.remove(keys(1)[0])
    assert store.match(keys(1)) == 1
    store.load(keys(1))
    assert not shared.has(keys(1)[0])


def test_least_recently_used_blocks_leave_memory_and_stay_shared() -> None:
    events: list[StoreEvent] = []
    store = BlockStore(SharedMemory(), l1_blocks=2, listener=events.append)
    first, second, third = keys(3)
    store.store([first, second])
    store.load([first])
    events.clear()
    store.store([third])
    assert [(event.kind, event.level, list(event.keys)) for event in events] == [
        ("store", "l1", [third]),
        ("store", "l2", [third]),
        ("delete", "l1", [second]),
    ]
    assert store.match([first, second, third]) == 3


def test_folder_is_named_as_the_store_names_its_objects(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    folder.add(keys(1)[0], 10)
    folder.add(keys(1, salt="tenant")[0], 10)
    block_hash = "00" * 32
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"models-SEP-tiny@0x01000100@0@{block_hash}.data",
        f"models-SEP-tiny@0x01000100@0@{block_hash}@tenant.data",
    ]


def test_folder_lists_what_it_holds_and_nothing_else(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    for key in (*keys(2), *keys(1, salt="tenant")):
        assert folder.add(key, 4096)
        assert not folder.add(key, 4096)
    (tmp_path / "other.tmp").touch()
    (tmp_path / "models@0x02000200@0@ff.data").touch()
    (tmp_path / "models@0x01000100@0@none.data").touch()
    listed = {each.key: each.size_bytes for each in folder.objects()}
    assert listed == dict.fromkeys((*keys(2), *keys(1, salt="tenant")), 4096)
    assert folder.remove(keys(1)[0]) and not folder.remove(keys(1)[0])
    assert len(folder.objects()) == 2


def test_listing_is_in_order_of_the_hashes(shared: SharedLevel) -> None:
    store = BlockStore(shared)
    store.store(list(reversed(keys(4))))
    store.store(keys(4, salt="tenant"))
    for level in ("l1", "l2"):
        hashes = [each.key.block_hash for each in store.objects(level)]
        assert hashes == sorted(hashes) and len(hashes) == 8


def test_prefetched_blocks_stay_in_memory_and_load_without_moving(shared: SharedLevel) -> None:
    BlockStore(shared).store(keys(3))
    events: list[StoreEvent] = []
    store = BlockStore(shared, block_bytes=10, listener=events.append)
    store.bring(keys(1))
    assert store.cold(keys(5)) == keys(3)[1:]
    store.bring(keys(3))
    assert told(events) == [("access", "l2", 1), ("store", "l1", 1), ("access", "l2", 2), ("store", "l1", 2)]
    assert store.count_dram(keys(5)) == 3
    assert store.load(keys(3)) == Loaded(3, 0)


def test_prefetch_evicts_as_a_store_does(shared: SharedLevel) -> None:
    BlockStore(shared).store(keys(3))
    store = BlockStore(shared, l1_blocks=2)
    store.bring(keys(3))
    assert store.cold(keys(3)) == keys(1)


def test_block_that_went_before_it_was_loaded_is_reported_as_deleted(shared: SharedLevel) -> None:
    BlockStore(shared).store(keys(3))
    events: list[StoreEvent] = []
    store = BlockStore(shared, block_bytes=10, listener=events.append)
    found = store.match(keys(3))
    shared.remove(keys(3)[1])
    assert store.load(keys(found)) == Loaded(1, 10)
    assert events[0] == StoreEvent("delete", "l2", [keys(3)[1]])
    store.bring(keys(3))
    assert store.count_dram(keys(3)) == 2
    assert StoreEvent("delete", "l2", [keys(3)[1]]) in events[1:]


def test_deletes_are_told_for_what_was_there(shared: SharedLevel) -> None:
    events: list[StoreEvent] = []
    store = BlockStore(shared, listener=events.append)
    store.store(keys(2))
    events.clear()
    assert store.delete(keys(3), "l1") == 2
    assert store.delete(keys(3)[1:], "l2") == 1
    assert events == [StoreEvent("delete", "l1", keys(2)), StoreEvent("delete", "l2", [keys(2)[1]])]
    assert store.match(keys(2)) == 1
