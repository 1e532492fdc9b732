"""What the lease holder does beside serving: list after a fence and once a day, sweep, count, and tell all about it.

Three loops, tasks of the process on every instance; without the lease they only wait. A failure of a store, of the
log or of Postgres ends the present listing or step, is counted, logged at its start and end, and tried again. What
they need to go on is in the maps, in Postgres and in the log, so whoever takes over goes on where this one stopped.

A listing is told to all as two marks in the log, "not complete" before it and "complete" after it: a fence between
the two asks for the next listing. The daily one needs no such marks, because nothing is known to be missing.
docs/decisions/0007-the-store-tells-the-truth.md, docs/decisions/0008-kvindex-scales.md
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from shoal_kvindex.ingest.changes import IndexState, SweepCounts
from shoal_kvindex.ingest.completeness import Completeness
from shoal_kvindex.ingest.listing import Corrected, Lister, ListingFailed
from shoal_kvindex.metrics import (
    HOUSEKEEPING_FAILURES,
    LISTED_OBJECTS,
    LISTINGS,
    SWEPT_BLOCKS,
)
from shoal_kvindex.ports import Duties, StoreFailed, StoreTrouble
from shoal_kvindex.store.engine import STORE_FAILURES
from shoal_kvindex.sweep import LeaseLost, Sweep
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

LOOK_EACH_S = 0.5
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
HOUR_S, DAY_S = 3600, 86_400
AGES_WITHIN_S = (HOUR_S, 6 * HOUR_S, *(days * DAY_S for days in (1, 2, 3, 5, 7, 14, 365)))

NO_STORE = "no store is registered"
FAILURES = (StoreFailed, ListingFailed, LeaseLost, *STORE_FAILURES)


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often."""

    listing_s: float
    sweep_s: float
    ages_s: float = 300.0
    tell_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Works:
    """What the housekeeping does, and what it looks at. ``is_loaded``: the map has what is durable; before, it would
    seem empty."""

    lister: Lister
    sweep: Sweep
    completeness: Completeness
    is_loaded: Callable[[], bool]


class Housekeeping:
    """Built by the service, which runs ``keep_listed``, ``keep_swept`` and ``keep_counted``; on one event loop."""

    def __init__(self, duties: Duties, works: Works, rhythm: Rhythm, instance_id: str) -> None:
        self._duties = duties
        self._works = works
        self._rhythm = rhythm
        self._instance_id = instance_id
        self._term = 0
        self._corrected = Corrected()
        self._ages: tuple[tuple[int, int], ...] = ()
        self._listed_dram: set[str] = set()  # servers whose DRAM this holder has listed since they registered
        self._is_listing = False
        self._registered: set[str] = set()
        self._reason = ""  # of the last listing that failed
        self._retry_s = FIRST_RETRY_S
        self._not_before_s = 0.0
        self._failing: set[str] = set()
        self._told: IndexState | None = None

    async def keep_listed(self) -> None:
        """List when copies may be missing, and at least each ``listing_s``."""
        while True:
            await self._duties.clock.sleep(LOOK_EACH_S)
            if not self._holds_lease():
                continue
            registered = set(self._duties.client.stores())
            if registered - self._registered:
                self._not_before_s = 0.0  # another server may be the one that can list
            self._registered = registered
            self._listed_dram &= registered
            if not registered:
                await self._wait_for_stores()
                continue
            if self._duties.clock.monotonic() < self._not_before_s:
                continue
            if self._is_due():
                await self._list()
            elif registered - self._listed_dram:
                await self._list_newcomers()

    async def keep_swept(self) -> None:
        """Delete what has to go, each ``sweep_s``."""
        while True:
            await self._duties.clock.sleep(self._rhythm.sweep_s)
            if not self._holds_lease():
                continue
            before = self._works.sweep.counts
            try:
                await self._works.sweep.step()
            except FAILURES as failure:
                self._failed("sweep", failure)
            else:
                self._worked("sweep")
            finally:
                self._count_swept(before)

    async def keep_counted(self) -> None:
        """Count how long blocks have yet to live, each ``ages_s``; tell what changed, each ``tell_s``."""
        counted_at_s: float | None = None
        while True:
            await self._duties.clock.sleep(self._rhythm.tell_s)
            if not self._holds_lease():
                counted_at_s = None
                continue
            now_s = self._duties.clock.monotonic()
            if counted_at_s is None or now_s - counted_at_s >= self._rhythm.ages_s:
                await self._count_ages()
                counted_at_s = now_s
            # While a listing is under way, a word about completeness would be taken for one of its two marks.
            if self._works.completeness.is_complete and not self._is_listing:
                await self._tell(True, "")

    def _holds_lease(self) -> bool:
        if not self._duties.lease.is_held or not self._works.is_loaded():
            return False
        if self._term != self._duties.lease.term:
            self._term = self._duties.lease.term
            self._corrected, self._ages, self._told = Corrected(), (), None
            self._listed_dram.clear()
            self._reason = ""
            self._retry_s, self._not_before_s = FIRST_RETRY_S, 0.0
            log.info("housekeeping.begun", term=self._term)
        return True

    # Listing

    def _is_due(self) -> bool:
        completeness = self._works.completeness
        if not completeness.is_complete:
            return True
        last_listing_s = self._last_listing_s()
        return last_listing_s is None or self._duties.clock.now() - last_listing_s >= self._rhythm.listing_s

    def _last_listing_s(self) -> int | None:
        state = self._works.completeness.state
        return state.last_listing_s if state else None

    async def _wait_for_stores(self) -> None:
        """Not a failure: after a start the servers need a beat to register."""
        if not self._works.completeness.is_complete and self._reason != NO_STORE:
            self._reason = NO_STORE
            await self._tell(False, NO_STORE)

    async def _list(self) -> None:
        """The shared level, and DRAM where it is not known: of fenced servers, of new ones, of all once a day."""
        completeness, term = self._works.completeness, self._term
        self._is_listing = True
        try:
            is_daily = completeness.is_complete
            if not is_daily:
                is_retry = self._reason not in ("", NO_STORE)
                await self._tell(False, self._reason if is_retry else "the stores are being listed")
            unlisted = set(self._duties.client.stores()) if is_daily else completeness.unlisted
            self._note(await self._works.lister.list_shared())
            registered = set(self._duties.client.stores())
            await self._list_dram(registered & (unlisted | (registered - self._listed_dram)))
            if not self._duties.lease.is_held or self._duties.lease.term != term:
                raise LeaseLost
        except FAILURES as failure:
            LISTINGS.labels("failed").inc()
            await self._retry_later(failure)
        else:
            LISTINGS.labels("done").inc()
            self._worked("listing")
            self._reason = ""
            self._retry_s, self._not_before_s = FIRST_RETRY_S, 0.0
            await self._tell(True, "", listed_at_s=int(self._duties.clock.now()))
        finally:
            self._is_listing = False

    async def _retry_later(self, failure: BaseException) -> None:
        self._failed("listing", failure)
        self._not_before_s = self._duties.clock.monotonic() + self._retry_s
        self._retry_s = min(LAST_RETRY_S, self._retry_s * 2)
        self._reason = str(failure) if isinstance(failure, StoreFailed | ListingFailed) else "Postgres is away"
        if not self._works.completeness.is_complete and self._duties.lease.is_held:
            await self._tell(False, self._reason)

    async def _list_newcomers(self) -> None:
        """A server that registered with something in DRAM that no report of its told this index."""
        try:
            await self._list_dram(self._registered - self._listed_dram)
        except FAILURES as failure:
            await self._retry_later(failure)

    async def _list_dram(self, instance_ids: Set[str]) -> None:
        for instance_id in sorted(instance_ids):
            try:
                self._note(await self._works.lister.list_dram(instance_id))
            except StoreFailed as failure:
                if failure.trouble is StoreTrouble.AWAY and instance_id in self._duties.client.stores():
                    raise
                # It does not offer it, or is gone: its copies stay dropped.
                log.info("store.dram_not_listed", store_instance_id=instance_id, reason=str(failure))
            self._listed_dram.add(instance_id)

    def _note(self, corrected: Corrected) -> None:
        self._corrected += corrected
        LISTED_OBJECTS.labels("found").inc(corrected.found_objects)
        LISTED_OBJECTS.labels("gone").inc(corrected.gone_objects)
        log.info("store.listed", found_objects=corrected.found_objects, gone_objects=corrected.gone_objects)

    # Telling

    async def _tell(self, is_complete: bool, reason: str, listed_at_s: int | None = None) -> None:
        state = IndexState(
            is_complete=is_complete,
            reason=reason,
            lease_holder=self._instance_id,
            last_listing_s=listed_at_s or self._last_listing_s(),
            sweep=replace(
                self._works.sweep.counts,
                orphan_objects=self._corrected.found_objects,
                phantom_objects=self._corrected.gone_objects,
            ),
            ages=self._ages,
        )
        # "Not complete" begins a listing even when it was said before.
        if state != self._told or not is_complete:
            self._told = state
            await self._duties.log.publish(state)

    async def _count_ages(self) -> None:
        try:
            ages = await self._duties.survey.ages(int(self._duties.clock.now()), AGES_WITHIN_S)
        except STORE_FAILURES as failure:
            self._failed("ages", failure)
        else:
            self._ages = tuple(ages)
            self._worked("ages")

    def _count_swept(self, before: SweepCounts) -> None:
        after = self._works.sweep.counts
        if after.marked_blocks < before.marked_blocks:
            before = SweepCounts()  # another term began
        SWEPT_BLOCKS.labels("marked").inc(after.marked_blocks - before.marked_blocks)
        SWEPT_BLOCKS.labels("renewed").inc(after.renewed_blocks - before.renewed_blocks)
        SWEPT_BLOCKS.labels("expired").inc(after.expired_blocks - before.expired_blocks)
        SWEPT_BLOCKS.labels("evicted").inc(after.evicted_blocks - before.evicted_blocks)

    def _failed(self, work: str, failure: BaseException) -> None:
        HOUSEKEEPING_FAILURES.labels(work, _kind(failure)).inc()
        if work not in self._failing:
            log.warning("housekeeping.failing", work=work, reason=str(failure) or type(failure).__name__)
        self._failing.add(work)

    def _worked(self, work: str) -> None:
        if work in self._failing:
            log.warning("housekeeping.recovered", work=work)
        self._failing.discard(work)


def _kind(failure: BaseException) -> str:
    match failure:
        case StoreFailed():
            return failure.trouble.value
        case ListingFailed() | LeaseLost():
            return "interrupted"
        case _:
            return "postgres"
