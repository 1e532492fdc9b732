"""The only place that reads time; everything else is given a ``Clock``.

``monotonic`` orders and measures, ``now`` is for people and for what is written down. No lease or deadline
compares wall clocks of two machines. docs/decisions/0016-deadlines-and-typed-failures.md
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What a module may know about time. ``testkit.clock.VirtualClock`` is the one for tests."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""

    def now(self) -> float:
        """Unix seconds."""

    async def sleep(self, delay_s: float) -> None:
        """Return after ``delay_s`` by ``monotonic``."""


class SystemClock:
    """The machine's own clocks and the running loop's timer."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> float:
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
