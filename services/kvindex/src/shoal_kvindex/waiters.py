"""Those who wait until a block is stored. Bounded; each waiter brings its own deadline and leaves by itself.

On one event loop. A woken waiter is never told twice.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shoal_kvindex.directory import Level, Namespace, Readable


class Waiters:
    """At most ``max_waiters`` at a time."""

    def __init__(self, max_waiters: int) -> None:
        self._max_waiters = max_waiters
        self._waiting: dict[tuple[Namespace, bytes], dict[asyncio.Future[None], Level | None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        return self._count >= self._max_waiters

    @contextmanager
    def waiting(self, namespace: Namespace, block_hash: bytes, level: Level | None) -> Iterator[asyncio.Future[None]]:
        """A future that is done once the block can be read at ``level`` (None: anywhere)."""
        key = (namespace, block_hash)
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, {})[future] = level
        self._count += 1
        try:
            yield future
        finally:
            self._count -= 1
            here = self._waiting[key]
            del here[future]
            if not here:
                del self._waiting[key]

    def awaits(self, namespace: Namespace, block_hash: bytes) -> bool:
        """Whether anybody wants to hear of this block."""
        return (namespace, block_hash) in self._waiting

    def wake(self, namespace: Namespace, block_hash: bytes, readable: Readable) -> None:
        """The block's copies changed."""
        for future, level in self._waiting.get((namespace, block_hash), {}).items():
            if satisfies(readable, level) and not future.done():
                future.set_result(None)


def satisfies(readable: Readable, level: Level | None) -> bool:
    """Whether a block that can be read so counts as stored at ``level`` (None: anywhere)."""
    match level:
        case None:
            return readable.is_shared or bool(readable.instance_ids)
        case Level.L1:
            return bool(readable.instance_ids)
        case Level.L2:
            return readable.is_shared
