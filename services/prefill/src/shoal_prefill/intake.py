"""Takes jobs from the queue while there is room for them, and stops when this worker leaves.

A job is pulled only when a place in the engine is free for it: what waits, waits in the queue, where any other
worker can take it. Not one more is taken to prefetch for it: a job in a place still waits for room in the engine's
steps, and that is when its blocks are prefetched. docs/decisions/0003-prefill-is-pulled.md
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from shoal_contracts.errors import Unavailable
from shoal_prefill.prefill_job import Delivery
from shoal_runtime.clock import Clock

PAUSE_S = 0.25  # while NATS is away


class JobSource(Protocol):
    """The queues of this worker's tiers."""

    async def take(self) -> Delivery | None:
        """The next job, or None when none came for a while. Unavailable when the queue cannot be reached."""


class Intake:
    """One loop. ``spawn`` runs a job in a task; ``leave`` lets the loop end after the pull that is under way."""

    def __init__(
        self,
        source: JobSource,
        work: Callable[[Delivery], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        max_jobs: int,
        clock: Clock,
    ) -> None:
        self._source = source
        self._work = work
        self._spawn = spawn
        self._clock = clock
        self._max_jobs = max_jobs
        self._jobs = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_leaving = False
        self._has_left = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def run(self) -> None:
        """Until ``leave``."""
        while not self._is_leaving:
            await self._take()
            await self._has_room.wait()
        self._has_left.set()

    async def _take(self) -> None:
        try:
            delivery = await self._source.take()
        except Unavailable:
            await self._clock.sleep(PAUSE_S)
            return
        if delivery is None:
            return
        if self._is_leaving:
            await delivery.give_back()
        else:
            self._enter(delivery)

    def _enter(self, delivery: Delivery) -> None:
        self._jobs += 1
        self._is_idle.clear()
        if self._jobs >= self._max_jobs:
            self._has_room.clear()
        self._spawn(self._run_job(delivery))

    async def _run_job(self, delivery: Delivery) -> None:
        try:
            await self._work(delivery)
        finally:
            self._jobs -= 1
            self._has_room.set()
            if not self._jobs:
                self._is_idle.set()

    async def leave(self) -> None:
        """Take nothing more; returns when the last running job has ended. Idempotent."""
        self._is_leaving = True
        self._has_room.set()
        await self._has_left.wait()
        await self._is_idle.wait()
