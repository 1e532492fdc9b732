"""While a job waits for its turn in the engine, the stored blocks of its prompt come into the node's DRAM.

Only for a job that will wait, because the engine already runs others: one that starts at once is loaded by the engine
in the same time. Only for a hit that this node does not have in DRAM already. A few at once, in the order of the
jobs. The job never waits for it: what has not come when the job ends is given up and counts as nothing.
docs/decisions/0003-prefill-is-pulled.md
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from shoal_engine.api import Engine, EngineRequest, Prefetched

MAX_AT_ONCE = 2  # the next in line come first; more would take the shared level's bandwidth from what runs


class ExpectedHit(Protocol):
    """What a job says about its hit."""

    @property
    def request(self) -> EngineRequest: ...

    @property
    def expected_hit_tokens(self) -> int | None: ...

    @property
    def dram_store_ids(self) -> tuple[str, ...]: ...


@dataclass(slots=True)
class Prefetch:
    """``told`` is known when the job has ended."""

    told: Prefetched = field(default_factory=Prefetched)


class Prefetches:
    """Of one worker, on its loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    @asynccontextmanager
    async def beside(self, job: ExpectedHit) -> AsyncIterator[Prefetch]:
        """Prefetch while the block runs, if that is of use; also when the block fails nothing of it is left."""
        prefetch = Prefetch()
        if not self._is_useful(job):
            yield prefetch
            return
        bringing = asyncio.create_task(self._bring(job.request), name="prefetch")
        try:
            yield prefetch
        finally:
            bringing.cancel()
            await asyncio.wait([bringing])
        if not bringing.cancelled():
            prefetch.told = bringing.result()

    def _is_useful(self, job: ExpectedHit) -> bool:
        engine = self._engine.description
        if (job.expected_hit_tokens or 0) < engine.block_tokens or engine.store_instance_id in job.dram_store_ids:
            return False
        load = self._engine.load()
        return load.running_requests + load.waiting_requests > 0 and not load.is_store_lost

    async def _bring(self, request: EngineRequest) -> Prefetched:
        async with self._turns:
            return await self._engine.prefetch(request)
