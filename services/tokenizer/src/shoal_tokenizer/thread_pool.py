"""A bounded pool of threads: what does not fit is refused at once instead of waiting without end.

A caller that leaves takes its waiting work along; work that already runs is finished and its result dropped.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from shoal_contracts.errors import Refused
from shoal_contracts.v1.common_pb2 import OVERLOADED

Result = TypeVar("Result")

_RETRY_AFTER_S = 1.0


class ThreadPool:
    """Used from one loop; its own threads only report back."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._capacity = threads + max_waiting
        self._lock = threading.Lock()
        self._taken = 0

    @property
    def taken(self) -> int:
        """Work that runs or waits."""
        return self._taken

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of ``work``; what it raises is raised here. Refused when the pool is full."""
        if self._taken >= self._capacity:
            raise Refused(OVERLOADED, "too many requests are being encoded; try again", retry_after_s=_RETRY_AFTER_S)
        with self._lock:
            self._taken += 1
        future = self._executor.submit(work)
        future.add_done_callback(self._give_back)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop what waits. Threads end with the work they have."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _give_back(self, _future: Future[Result]) -> None:
        with self._lock:
            self._taken -= 1
