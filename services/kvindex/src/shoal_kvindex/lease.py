"""Which instance writes, lists and sweeps: the holder of one lease, judged without any wall clock.

The holder changes the row each second (a beat). Who sees the same beat for ``LAPSE_S`` by its own monotonic clock,
while it can read, takes the lease by compare-and-swap; the term then grows. The holder counts from the moment at
which it asked for its last beat, so it stops believing in itself before anybody else can hold the lease; after that
it does nothing until it has beaten again. A process that was stopped wakes up with that answer. Its writes are fenced
by the term besides. docs/decisions/0016-deadlines-and-typed-failures.md
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from shoal_contracts.errors import Unavailable
from shoal_kvindex.ingest.shared_log import LogPosition
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

BEAT_EACH_S = 1.0
CALL_S = 2.0
HELD_S = 4.5  # below LAPSE_S: what was begun while held has time to end
LAPSE_S = 5.0
UNREAD_S = 3.0  # who could not read for so long knows nothing of the beats in between


class LeaseRow(NamedTuple):
    """What stands in Postgres. ``holder`` is "" when nobody holds it."""

    holder: str
    term: int
    beat: int
    written: LogPosition | None


class LeaseStore(Protocol):
    """Raises Unavailable when Postgres is away."""

    async def read(self) -> LeaseRow: ...

    async def beat(self, holder: str, term: int) -> LeaseRow | None:
        """None: the lease is not this holder's any more."""

    async def take(self, seen: LeaseRow, holder: str) -> LeaseRow | None:
        """None: somebody changed it since it was seen so."""

    async def give_back(self, holder: str, term: int) -> None: ...


class Lease:
    """On one event loop. ``keep`` is a task of the process, ``while_held`` one for each duty."""

    def __init__(
        self, store: LeaseStore, instance_id: str, clock: Clock, may_take: Callable[[], bool] = lambda: True
    ) -> None:
        """``may_take``: whether this instance could do a holder's work."""
        self._store = store
        self._instance_id = instance_id
        self._clock = clock
        self._may_take = may_take
        self._answered_at_s = clock.monotonic()
        self._is_mine = False
        self._asked_at_s = 0.0  # before the last beat that worked
        self._row: LeaseRow | None = None
        self._read_at_s = 0.0
        self._changed_at_s = 0.0
        self._changed = asyncio.Event()  # is_held may have changed

    @property
    def is_held(self) -> bool:
        """Whether this instance may act now. To be asked again before each act."""
        return self._is_mine and self._clock.monotonic() - self._asked_at_s < HELD_S

    @property
    def is_in_touch(self) -> bool:
        """Whether Postgres answered lately."""
        return self._clock.monotonic() - self._answered_at_s < UNREAD_S

    @property
    def term(self) -> int:
        """Of the row as last seen."""
        return self._row.term if self._row else 0

    @property
    def holder(self) -> str:
        """Instance id, as last seen; "" when nobody holds it or this instance does not know."""
        return self._row.holder if self._row else ""

    @property
    def written(self) -> LogPosition | None:
        """Up to which change of the log all is durable, as last seen."""
        return self._row.written if self._row else None

    async def keep(self) -> None:
        """Beat, or watch the beats of another one."""
        while True:
            began_s = self._clock.monotonic()
            try:
                async with asyncio.timeout(CALL_S):
                    await (self._beat() if self._is_mine else self._watch())
                self._answered_at_s = self._clock.monotonic()
            except (TimeoutError, Unavailable) as error:
                log.debug("lease.not_read", error=type(error).__name__)
            self._tell()
            await self._clock.sleep(max(0.0, began_s + BEAT_EACH_S - self._clock.monotonic()))

    async def while_held(self, duty: Callable[[], Awaitable[None]]) -> None:
        """Run ``duty`` whenever this instance holds the lease, and cancel it when it does not any more."""
        while True:
            await self._wait_for(is_held=True)
            working = asyncio.ensure_future(duty())
            losing = asyncio.ensure_future(self._wait_for(is_held=False))
            try:
                await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                working.cancel()
                losing.cancel()
                await asyncio.wait({working, losing})
            if not working.cancelled():
                working.result()
                return

    def lose(self) -> None:
        """A write was fenced: somebody else holds it."""
        if self._is_mine:
            log.warning("lease.lost", term=self.term)
        self._is_mine = False
        self._read_at_s = 0.0
        self._tell()

    async def give_back(self) -> None:
        """Let another instance have it at once; on an orderly stop."""
        if not self._is_mine:
            return
        self._is_mine = False
        try:
            async with asyncio.timeout(CALL_S):
                await self._store.give_back(self._instance_id, self.term)
        except (TimeoutError, Unavailable):
            log.warning("lease.not_given_back", term=self.term)

    async def _beat(self) -> None:
        asked_at_s = self._clock.monotonic()
        row = await self._store.beat(self._instance_id, self.term)
        if row is None:
            self.lose()
            return
        self._row, self._asked_at_s = row, asked_at_s

    async def _watch(self) -> None:
        row = await self._store.read()
        now_s = self._clock.monotonic()
        is_new = self._row is None or (row.term, row.beat) != (self._row.term, self._row.beat)
        if is_new or now_s - self._read_at_s > UNREAD_S:
            self._changed_at_s = now_s
        self._row, self._read_at_s = row, now_s
        # Its own name: an earlier life of this instance, which is over.
        is_free = row.holder in ("", self._instance_id) or now_s - self._changed_at_s >= LAPSE_S
        if is_free and self._may_take():
            await self._take(row)

    async def _take(self, seen: LeaseRow) -> None:
        asked_at_s = self._clock.monotonic()
        row = await self._store.take(seen, self._instance_id)
        if row is None:
            return
        self._row, self._asked_at_s, self._is_mine = row, asked_at_s, True
        log.info("lease.taken", term=row.term, from_holder=seen.holder)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_for(self, *, is_held: bool) -> None:
        while self.is_held != is_held:
            await self._changed.wait()
