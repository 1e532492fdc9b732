"""Refuses what engines asked for before this server stood still, because their memory may hold something else since.

A server that moves KV itself reads an engine's blocks when it comes to it. An engine that hears nothing for a second
takes the server for lost and lets its blocks go; stopped by the kernel, by a pause of its virtual machine or by
swapping, the server knows nothing of it, and afterwards would store what other requests have written there, under the
hashes of the old ones. So for a while after a standstill it knows no engine: what is asked for then is refused as it
is after a restart, the engine computes, and the next request stores.

A thread notices the standstill by its own monotonic clock, and so does each call that depends on it, because after a
standstill nobody knows which thread runs first. docs/decisions/0029-blocks-are-read-before-they-are-reused.md
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.multiprocess.engine_module import EngineModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule

from shoal_kvstore.metrics import STANDSTILLS

log = init_logger(__name__)

TICK_S = 0.1
LONGEST_S = 0.9  # an engine gives up after one second
FENCE_S = 1.5  # by then everything that was asked for before has been refused


class StoodStill(Exception):
    """A copy that was under way is not kept."""


class Standstill:
    """Whether this process has just stood still. Any thread may ask."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._seen_s = now_s()
        self._fenced_until_s = self._seen_s

    def is_over(self) -> bool:
        """False for ``FENCE_S`` after a standstill. Called at least each ``TICK_S``."""
        with self._lock:
            now_s = self._now_s()
            silence_s, self._seen_s = now_s - self._seen_s, now_s
            if silence_s > LONGEST_S:
                self._fenced_until_s = now_s + FENCE_S
                STANDSTILLS.inc()
                log.warning("store.stood_still seconds=%.1f", silence_s)
            return now_s >= self._fenced_until_s


def fence(modules: Iterable[EngineModule], storage: Any) -> None:
    """From now on every way that moves an engine's blocks asks first."""
    standstill = Standstill()
    for module in modules:
        if isinstance(module, LMCacheDrivenTransferModule):
            fence_transfers(module, storage, standstill)
            threading.Thread(target=_watch, args=(standstill,), name="shoal-standstill", daemon=True).start()


def fence_transfers(module: LMCacheDrivenTransferModule, storage: Any, standstill: Standstill) -> None:
    """``module`` finds an engine's memory, and ``storage`` takes what was copied, only without a standstill."""
    find_entry: Callable[[int], Any] = module.get_and_touch_context_entry
    prepare: Callable[[Any], Any] = storage.prepare_write_completion

    def find_entry_unless(instance_id: int) -> Any:
        return find_entry(instance_id) if standstill.is_over() else None

    def prepare_unless(objects: Any) -> Any:
        if not standstill.is_over():
            raise StoodStill("this server stood still while it copied: the blocks may hold something else by now")
        return prepare(objects)

    module.get_and_touch_context_entry = find_entry_unless
    storage.prepare_write_completion = prepare_unless


def _watch(standstill: Standstill) -> None:
    while True:
        standstill.is_over()
        time.sleep(TICK_S)
