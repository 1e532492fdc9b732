"""The watch over a worker's engine, the same for every worker: a dead engine ends the process, a lost store is told.

A dead engine never comes back: the reason is said, ``on_death`` stops new work, and the process ends so that it is
started anew. A worker without its store is slow and right: it stays ready, and says so while it lasts.
docs/decisions/0015-nothing-falls-back-in-silence.md
"""

from collections.abc import Callable

from shoal_engine.api import Engine, EngineFailed
from shoal_runtime.logs import get_logger
from shoal_runtime.process import Process

log = get_logger(__name__)


class EngineWatch:
    """``run`` is one critical task of the process. ``on_store`` is told each change: whether the store is lost."""

    def __init__(
        self,
        engine: Engine,
        process: Process,
        check_each_s: float,
        *,
        on_store: Callable[[bool], None],
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._process = process
        self._check_each_s = check_each_s
        self._on_store = on_store
        self._on_death = on_death
        self._is_store_lost = False

    async def run(self) -> None:
        """Until the engine is dead."""
        while True:
            await self._process.clock.sleep(self._check_each_s)
            self._look_at_store()
            try:
                await self._engine.check()
            except EngineFailed as failed:
                self._process.health.set("engine", str(failed))
                self._on_death()
                self._process.stop(failure="the engine is dead")
                return

    def _look_at_store(self) -> None:
        is_store_lost = self._engine.load().is_store_lost
        if is_store_lost == self._is_store_lost:
            return
        self._is_store_lost = is_store_lost
        self._on_store(is_store_lost)
        if is_store_lost:
            log.warning("store.lost")
            self._process.health.degrade("store", "away; prompts are computed without it")
        else:
            log.warning("store.found")
            self._process.health.set("store", None)
