"""Asks Postgres for blocks that the map's bound dropped, and puts what it finds back into the directory.

Questions that come while one is being answered go together in the next one. An asker waits for a deadline of
milliseconds and then counts a miss; its answer is taken in all the same, for the next one. While Postgres is away
nobody waits. Only copies of the shared level come back: a block that left the map was not used for long, and by then
DRAM has hardly kept it. docs/decisions/0009-sql-is-off-the-hot-path.md
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_kvindex.directory import Directory, Namespace
from shoal_kvindex.metrics import RECALLED_BLOCKS, RECALLS
from shoal_kvindex.names import SHARED
from shoal_kvindex.store.engine import STORE_FAILURES
from shoal_kvindex.store.reader import SharedReader
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

MAX_ASKED_BLOCKS = 16_384  # in one question to Postgres
AWAY_S = 1.0  # between two tries while Postgres is away


@dataclass(slots=True)
class _Ask:
    namespace: Namespace
    hashes: Sequence[bytes]
    is_answered: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class DurableRecall:
    """Implements ``index.Recall``; the service runs ``run``. Forgets its askers when it ends, and they their answer."""

    def __init__(self, engine: AsyncEngine, directory: Directory, clock: Clock, deadline_s: float) -> None:
        self._reader = SharedReader(engine)
        self._directory = directory
        self._clock = clock
        self._deadline_s = deadline_s
        self._asks: list[_Ask] = []
        self._asked_blocks = 0
        self._has_asks = asyncio.Event()
        self._is_away = False
        self._silent_until_s = 0.0

    async def recall(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        if self._clock.monotonic() < self._silent_until_s:
            RECALLS.labels("away").inc()
            return
        if self._asked_blocks + len(hashes) > MAX_ASKED_BLOCKS:
            RECALLS.labels("refused").inc()
            return
        ask = _Ask(namespace, hashes)
        self._asks.append(ask)
        self._asked_blocks += len(hashes)
        self._has_asks.set()
        try:
            async with asyncio.timeout(self._deadline_s):
                await ask.is_answered
        except TimeoutError:
            RECALLS.labels("late").inc()
        else:
            RECALLS.labels("away" if self._is_away else "answered").inc()

    async def run(self) -> None:
        """Answer, for ever."""
        while True:
            await self._has_asks.wait()
            asks, self._asks, self._asked_blocks = self._asks, [], 0
            self._has_asks.clear()
            try:
                await self._answer(asks)
            except STORE_FAILURES as failure:
                self._silent_until_s = self._clock.monotonic() + AWAY_S
                if not self._is_away:
                    log.warning("recall.failed", reason=str(failure))
                self._is_away = True
            else:
                if self._is_away:
                    log.info("recall.resumed")
                self._is_away = False
            for ask in asks:
                if not ask.is_answered.done():
                    ask.is_answered.set_result(None)

    async def _answer(self, asks: Sequence[_Ask]) -> None:
        found = await self._reader.find([(ask.namespace, ask.hashes) for ask in asks], int(self._clock.now()))
        for key, expires_at_s in found:
            self._directory.recall(key, SHARED, expires_at_s)
        RECALLED_BLOCKS.inc(len({(key.namespace, key.block_hash) for key, _ in found}))
