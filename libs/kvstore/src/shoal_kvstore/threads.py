"""Work on many objects by a pool of threads, and one call when all of it is done.

The queue of the pool is bounded by who asks: LMCache has a buffer in its bounded DRAM for every object of a task.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from lmcache.logging import init_logger

log = init_logger(__name__)

T = TypeVar("T")


def spread(
    pool: ThreadPoolExecutor,
    work: Callable[[int], T],
    count: int,
    if_crashed: T,
    done: Callable[[Sequence[T]], None],
) -> None:
    """Run ``work`` of 0 .. count-1, begun in that order, then ``done`` with what each returned, on one of the threads.

    A crash of one is logged and stands as ``if_crashed``: whoever waits for the task is answered in any case. When
    the pool is closed first, ``done`` is not called.
    """
    if count == 0:
        pool.submit(done, ())
        return
    gathering = _Gathering(count, if_crashed, done)
    for place in range(count):
        pool.submit(work, place).add_done_callback(gathering.receiver(place))


class _Gathering(Generic[T]):
    def __init__(self, count: int, if_crashed: T, done: Callable[[Sequence[T]], None]) -> None:
        self._lock = threading.Lock()
        self._waiting = count
        self._results = [if_crashed] * count
        self._done = done
        self._is_closed = False

    def receiver(self, place: int) -> Callable[[Future[T]], None]:
        def receive(future: Future[T]) -> None:
            is_cancelled = future.cancelled()
            if not is_cancelled:
                self._take(place, future)
            with self._lock:
                self._is_closed |= is_cancelled
                self._waiting -= 1
                is_last = self._waiting == 0 and not self._is_closed
            if is_last:
                self._done(self._results)

        return receive

    def _take(self, place: int, future: Future[T]) -> None:
        error = future.exception()
        if error is None:
            self._results[place] = future.result()
        else:
            log.error("store.work_crashed", exc_info=error)
