"""Keeps an eye on Postgres: brings the schema up to date, says whether it answers, sweeps what has expired.

A gateway starts and serves without Postgres; only what needs stored responses is refused meanwhile.
"""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_gateway.store.engine import upgrade
from shoal_gateway.store.responses import SWEEP_ROWS, PostgresResponses
from shoal_runtime.clock import Clock
from shoal_runtime.health import Health
from shoal_runtime.logs import get_logger
from shoal_runtime.postgres import STORE_FAILURES

log = get_logger(__name__)

PART = "postgres"
CHECK_EACH_S = 1.0
SWEEP_EACH_S = 60.0
_PING = text("SELECT 1")


class StoreWatch:
    """``run`` is a task of the process. It alone says that the store is ready."""

    def __init__(
        self, postgres_url: str, engine: AsyncEngine, responses: PostgresResponses, clock: Clock, health: Health
    ) -> None:
        self._postgres_url = postgres_url
        self._engine = engine
        self._responses = responses
        self._clock = clock
        self._health = health
        self._is_migrated = False
        self._sweep_at_s = clock.monotonic()

    async def run(self) -> None:
        while True:
            await self.check()
            await self._clock.sleep(CHECK_EACH_S)

    async def check(self) -> None:
        """Once. What fails is told by the health of the process and tried again."""
        try:
            if not self._is_migrated:
                log.info("schema.migrated", version=await upgrade(self._postgres_url))
                self._is_migrated = True
            await self._ping()
            if self._clock.monotonic() >= self._sweep_at_s:
                await self._sweep()
        except STORE_FAILURES as failure:
            self._responses.is_ready = False
            self._health.degrade(PART, f"away ({type(failure).__name__}); responses are not stored")

    async def _ping(self) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(_PING)
        self._responses.is_ready = True
        self._health.set(PART, None)

    async def _sweep(self) -> None:
        if await self._responses.sweep() < SWEEP_ROWS:
            self._sweep_at_s = self._clock.monotonic() + SWEEP_EACH_S
