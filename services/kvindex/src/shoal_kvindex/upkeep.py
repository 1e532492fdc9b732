"""What runs beside the requests: the load at start, the writing behind, the watch on silent lmcache servers, and what
Match and Settle used, told to the other instances.

Each loop is a task of the process; none of them holds up a request. Until the load is done, from Postgres and then
from the log, the edges answer "unavailable": an empty map that claims to be complete would make the fleet compute
everything again. Whether a server is silent is judged by the lease holder only, and only while it hears all.
"""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_kvindex.index import Readiness
from shoal_kvindex.ingest.applier import Parts
from shoal_kvindex.ingest.changes import StoreSilent
from shoal_kvindex.ingest.gate import Cursor
from shoal_kvindex.ingest.reports import Summary
from shoal_kvindex.ingest.shared_log import Fate, SharedLog
from shoal_kvindex.lease import Lease
from shoal_kvindex.metrics import (
    BLOCKS,
    COPIES_DROPPED,
    DROPPED_RENEWALS,
    EVICTED_BLOCKS,
    FAILED_WRITES,
    HAS_LEASE,
    LOAD_SECONDS,
    MISSED_CHANGES,
    OVERFLOWED_CHANGES,
    PENDING_CHANGES,
    PUBLISHED_CHANGES,
    REPORTED_OBJECTS,
    REPORTS,
    STORES,
    WAITING_FOR_LOG,
    WRITTEN_CHANGES,
)
from shoal_kvindex.store.engine import STORE_FAILURES, upgrade
from shoal_kvindex.store.reader import load_directory
from shoal_kvindex.store.writer import DirectoryWriter, Right, Written
from shoal_runtime.clock import Clock
from shoal_runtime.health import Health
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

RETRY_S = 1.0
WATCH_EACH_S = 1.0
RELAY_EACH_S = 0.15
UNHELD_S = 10.0  # a takeover takes seconds: only then is it worth a word


def observe(summary: Summary) -> None:
    """Count what a change came to here."""
    for verdict, count in summary.verdicts.items():
        REPORTS.labels(verdict.value).inc(count)
    for _, reason in summary.fences:
        COPIES_DROPPED.labels(reason.value).inc()
    REPORTED_OBJECTS.labels("stored").inc(summary.stored_objects)
    REPORTED_OBJECTS.labels("deleted").inc(summary.deleted_objects)
    REPORTED_OBJECTS.labels("unshared").inc(summary.unshared_objects)


@dataclass(frozen=True, slots=True)
class Together:
    """What joins the instances."""

    log: SharedLog
    lease: Lease
    writer: DirectoryWriter
    instance_id: str


class Upkeep:
    """Built by the service; its coroutines are spawned by it."""

    def __init__(self, parts: Parts, together: Together, clock: Clock, health: Health) -> None:
        self._directory = parts.directory
        self._ingest = parts.ingest
        self._instances = parts.instances
        self._completeness = parts.completeness
        self._relay = parts.relay
        self._log = together.log
        self._lease = together.lease
        self._writer = together.writer
        self._instance_id = together.instance_id
        self._clock = clock
        self._health = health
        self._counted: dict[object, int] = {}
        self._is_postgres_away = False
        self._held_at_s = clock.monotonic()  # by anybody

    async def load(self, engine: AsyncEngine, readiness: Readiness) -> None:
        """Migrate and load, again and again until it works; then apply what the log has."""
        self._health.set("directory", "loading from Postgres")
        while True:
            began_s = self._clock.monotonic()
            try:
                await upgrade(engine)
                loaded = await load_directory(engine, self._directory)
            except STORE_FAILURES as failure:
                if not self._is_postgres_away:
                    log.warning("directory.load_failed", reason=str(failure))
                self._is_postgres_away = True
                self._health.set("directory", f"Postgres cannot be read ({type(failure).__name__})")
                await self._clock.sleep(RETRY_S)
                continue
            break
        self._is_postgres_away = False
        self._ingest.gate.restore(loaded.cursors)
        self._instances.expect(loaded.cursors)
        self._health.set("directory", "loading from the log")
        has_caught_up = await self._log.join(loaded.written)
        LOAD_SECONDS.set(self._clock.monotonic() - began_s)
        self._tell_health()
        readiness.is_loaded = True
        self._health.set("directory", None)
        stores = len(loaded.cursors)
        log.info("directory.loaded", blocks=self._directory.block_count, stores=stores, has_caught_up=has_caught_up)

    async def write_behind(self, interval_s: float) -> None:
        """Write what changed, each ``interval_s``; slower while Postgres is away."""
        while True:
            await self._clock.sleep(interval_s)
            if not await self.write():
                await self._clock.sleep(RETRY_S)

    async def write(self) -> bool:
        """Write what changed, or keep it for whoever has the lease; whether that worked."""
        if not self._lease.is_held or self._is_behind():
            self._writer.seal(self._log.settled_position, self._lease.written)
            PENDING_CHANGES.set(self._writer.pending_changes)
            return True
        written = await self._writer.flush(Right(self._instance_id, self._lease.term), self._log.position)
        if written.is_fenced:
            self._lease.lose()
        self._account(written)
        return written.failure is None

    async def relay(self) -> None:
        """Tell the other instances which blocks were used here."""
        while True:
            await self._clock.sleep(RELAY_EACH_S)
            renewals = self._relay.take()
            if renewals is not None:
                await self._log.publish(renewals)

    async def watch(self) -> None:
        """Tell all which servers fell silent, and keep gauges and readiness."""
        watched_at_s = self._clock.monotonic()
        while True:
            await self._clock.sleep(WATCH_EACH_S)
            now_s = self._clock.monotonic()
            if self._lease.is_held and self._log.is_open:
                await self._tell_silent(now_s - watched_at_s)
            watched_at_s = now_s
            self._tell_health()
            self._measure()

    async def _tell_silent(self, elapsed_s: float) -> None:
        for instance_id in self._instances.advance(elapsed_s):
            cursor = self._ingest.gate.cursor(instance_id) or Cursor(0, 0)
            await self._log.publish(StoreSilent(instance_id, cursor))

    def _is_behind(self) -> bool:
        """Whether an earlier holder wrote what this instance has yet to hear."""
        at, written = self._log.position, self._lease.written
        if not self._log.is_open or at is None or written is None:
            return False
        return at.log_id == written.log_id and at.seq < written.seq

    def _tell_health(self) -> None:
        if self._completeness.is_complete:
            self._health.set("listing", None)
        else:
            self._health.degrade("listing", f"not complete, hits may be missed: {self._completeness.reason}")
        if self._log.is_open:
            self._health.set("log", None)
        else:
            self._health.degrade("log", "away; changes are applied here only and published later")
        if not self._lease.is_in_touch:
            self._is_postgres_away = True
            self._health.degrade("postgres", "away; changes wait in memory")
        elif not self._lease.is_held:
            self._is_postgres_away = False
            self._health.set("postgres", None)
        now_s = self._clock.monotonic()
        if self._lease.is_held or self._lease.holder:
            self._held_at_s = now_s
        if now_s - self._held_at_s < UNHELD_S:
            self._health.set("lease", None)
        else:
            self._health.degrade("lease", "nobody holds it: nothing is written, listed or swept")

    def _measure(self) -> None:
        BLOCKS.set(self._directory.block_count)
        STORES.set(self._instances.registered_count)
        HAS_LEASE.set(self._lease.is_held)
        WAITING_FOR_LOG.set(self._log.waiting_weight)
        EVICTED_BLOCKS.inc(self._more("evicted", self._directory.evicted_count))
        MISSED_CHANGES.inc(self._more("missed", self._log.missed_changes))
        DROPPED_RENEWALS.inc(self._more("renewals", self._relay.dropped_count))
        for fate in Fate:
            PUBLISHED_CHANGES.labels(fate.value).inc(self._more(fate, self._log.fates[fate]))

    def _more(self, name: object, total: int) -> int:
        """What was added to a running count since the last time."""
        before = self._counted.get(name, 0)
        self._counted[name] = total
        return total - before

    def _account(self, written: Written) -> None:
        PENDING_CHANGES.set(self._writer.pending_changes)
        WRITTEN_CHANGES.inc(written.changes)
        OVERFLOWED_CHANGES.inc(written.overflowed_changes)
        if written.failure is None:
            self._health.set("postgres", None)
            self._is_postgres_away = False
            return
        if written.is_fenced:
            return
        FAILED_WRITES.inc()
        if not self._is_postgres_away:
            log.warning("directory.write_failed", reason=str(written.failure))
        self._is_postgres_away = True
        dropped = " and some were dropped" if self._writer.is_full else ""
        self._health.degrade("postgres", f"away ({type(written.failure).__name__}); changes wait in memory{dropped}")
