"""Background tasks that never die in silence.

``Tasks`` owns every task it spawned: a crash is logged with its traceback and counted, a ``restart`` task runs
again after a growing pause with readiness degraded meanwhile, a ``critical`` one ends the process. ``close``
cancels what is left and waits for it. One of the two places that may catch ``Exception``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from shoal_contracts.errors import Refused
from shoal_contracts.v1 import common_pb2 as pb
from shoal_runtime.clock import Clock, SystemClock
from shoal_runtime.health import Health
from shoal_runtime.logs import get_logger
from shoal_runtime.metrics import TASK_CRASHES

log = get_logger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
CANCEL_AGAIN_S = 1.0

Work = Coroutine[Any, Any, None] | Callable[[], Coroutine[Any, Any, None]]


async def done_before(work: Coroutine[Any, Any, None], end: Coroutine[Any, Any, Any]) -> bool:
    """Run ``work`` until it is done, or until ``end`` is: then it is cancelled and has ended on return. False: it was.

    What ``work`` raises is raised here, except while it gives up: whoever ended it knows why.
    """
    loop = asyncio.get_running_loop()
    working, ending = loop.create_task(work), loop.create_task(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        ending.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
            if not working.cancelled():
                working.exception()


class Tasks:
    """Used on one event loop. ``on_critical`` is called at most once per crash of a critical task."""

    def __init__(self, health: Health, *, clock: Clock | None = None) -> None:
        self.on_critical: Callable[[str], None] | None = None
        self._health = health
        self._clock = clock or SystemClock()
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def spawn(self, work: Work, *, name: str, restart: bool = False, critical: bool = False) -> asyncio.Task[None]:
        """Run ``work`` in the background. ``name`` is a metric label: no ids in it.

        ``restart`` needs a function, since a coroutine runs only once. Refused (DRAINING) after ``close``.
        """
        if restart and not callable(work):
            raise TypeError("a task that restarts is given as a function, not as a coroutine")
        if self._is_closed:
            if not callable(work):
                work.close()
            raise Refused(pb.DRAINING, "this instance is leaving; another one will take the request")
        body = self._supervise(work, name, restart, critical)
        task = asyncio.get_running_loop().create_task(body, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _supervise(self, work: Work, name: str, restart: bool, critical: bool) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = self._clock.monotonic()
            try:
                awaitable: Awaitable[None] = work() if callable(work) else work
                await awaitable
                return
            except Exception as error:
                TASK_CRASHES.labels(name).inc()
                log.error("task.crashed", task=name, restart=restart, critical=critical, exc_info=error)
            if critical and self.on_critical is not None:
                self.on_critical(f"task {name} crashed")
            if not restart:
                return
            if self._clock.monotonic() - began_s > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            self._health.set(f"task.{name}", "crashed, starts again soon")
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self._health.set(f"task.{name}", None)

    def __len__(self) -> int:
        return len(self._running)

    async def close(self) -> None:
        """Cancel every task and wait until all have ended. Idempotent."""
        self._is_closed = True
        while running := [task for task in self._running if task is not asyncio.current_task()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CANCEL_AGAIN_S)  # some libraries swallow a cancellation

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
