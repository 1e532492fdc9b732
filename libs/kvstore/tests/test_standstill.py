"""After a standstill nothing is read from engines, and nothing is kept that was being read."""

import inspect

import pytest
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule

from shoal_kvstore.standstill import FENCE_S, LONGEST_S, TICK_S, Standstill, StoodStill, fence_transfers


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Storage:
    """LMCache's storage, as far as a store ends in it."""

    def prepare_write_completion(self, objects):
        return objects


class Transfer(LMCacheDrivenTransferModule):
    """LMCache's module with one engine in it, and none of its memory."""

    def __init__(self) -> None:
        pass

    def get_and_touch_context_entry(self, instance_id):
        return f"engine {instance_id}"


def fenced() -> tuple[Clock, Transfer, Storage]:
    clock, module, storage = Clock(), Transfer(), Storage()
    fence_transfers(module, storage, Standstill(clock))
    return clock, module, storage


def test_all_is_as_ever_while_somebody_looks_often_enough():
    clock, module, storage = fenced()
    for _ in range(100):
        clock.now_s += LONGEST_S - TICK_S
        assert module.get_and_touch_context_entry(1) == "engine 1"
        assert storage.prepare_write_completion("objects") == "objects"


def test_no_engine_is_known_for_a_while_after_a_standstill():
    clock, module, _ = fenced()
    clock.now_s += LONGEST_S + 0.1
    assert module.get_and_touch_context_entry(1) is None
    waited_s = 0.0
    while waited_s + TICK_S < FENCE_S:
        clock.now_s += TICK_S
        waited_s += TICK_S
        assert module.get_and_touch_context_entry(1) is None
    clock.now_s += 2 * TICK_S
    assert module.get_and_touch_context_entry(1) == "engine 1"


def test_a_copy_that_was_under_way_is_not_kept():
    clock, module, storage = fenced()
    assert module.get_and_touch_context_entry(1) == "engine 1"
    clock.now_s += LONGEST_S + 0.1
    with pytest.raises(StoodStill):
        storage.prepare_write_completion("objects")


def test_lmcache_still_asks_what_is_fenced():
    """Its store and retrieve look both up on their objects at each call."""
    store, retrieve = (
        set(inspect.unwrap(asked).__code__.co_names)
        for asked in (LMCacheDrivenTransferModule.store_with_chunk_mask, LMCacheDrivenTransferModule.retrieve)
    )
    assert {"get_and_touch_context_entry", "prepare_write_completion"} <= store
    assert "get_and_touch_context_entry" in retrieve
    assert callable(StorageManager.prepare_write_completion)
