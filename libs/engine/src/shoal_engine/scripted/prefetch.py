"""Moves blocks of a simulated store from L2 to L1 as fast as they would be loaded.

Used by the store's HTTP side and by an engine on the same node. Cancelling it leaves the levels as they were.
"""

from collections.abc import Sequence

from shoal_engine.scripted.store import BlockKey, BlockStore
from shoal_engine.scripted.timing import Timing
from shoal_runtime.clock import Clock


class Prefetcher:
    """Any number of prefetches at once, on the loop of the store."""

    def __init__(self, store: BlockStore, timing: Timing, clock: Clock) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock

    async def bring(self, keys: Sequence[BlockKey]) -> int:
        """Keep in L1 what only L2 has of these blocks; returns how many of them L1 has then, as a real server does."""
        cold = self._store.cold(keys)
        await self._clock.sleep(self._timing.load_s(len(cold) * self._store.block_bytes))
        self._store.bring(cold)
        return self._store.count_dram(keys)
