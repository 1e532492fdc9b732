"""Time for tests: it stands still until the test moves it."""

import asyncio
import heapq
import itertools

SETTLE_TURNS = 20  # turns of the loop given to tasks after each step of time


class VirtualClock:
    """A ``shoal_runtime.clock.Clock``. Sleepers wake in the order of their time, each at its own reading."""

    def __init__(self, start_s: float = 1_000.0, unix_s: float = 1_800_000_000.0) -> None:
        self._now_s = start_s
        self._unix_offset_s = unix_s - start_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self._now_s

    def now(self) -> float:
        return self._now_s + self._unix_offset_s

    async def sleep(self, delay_s: float) -> None:
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        wakeup: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + delay_s, next(self._order), wakeup))
        await wakeup

    async def advance(self, step_s: float) -> None:
        """Move time by ``step_s``, letting every task that wakes on the way run."""
        end_s = self._now_s + step_s
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            at_s, _, wakeup = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, at_s)
            if not wakeup.done():
                wakeup.set_result(None)
            await settle()
        self._now_s = end_s
        await settle()


async def settle() -> None:
    """Let tasks that are ready run until they wait for something."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
