"""Turn admitted reports into changes of the directory, in the order in which their server numbered them.

``access`` creates nothing: it is also sent for objects whose store failed. A gap or a new life of a server drops
its DRAM copies before the report is applied; what it shares stays, because files outlive processes.
docs/decisions/0007-the-store-tells-the-truth.md
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shoal_kvindex.claims import Claims
from shoal_kvindex.directory import SHARED, Directory, Journal, Level, Namespace, ObjectKey, Place
from shoal_kvindex.ingest.changes import Correction
from shoal_kvindex.ingest.gate import ReportGate, Verdict
from shoal_kvindex.ingest.recorder import ChangeRecorder
from shoal_kvindex.ingest.reports import Fence, Kind, Report, Summary, shared_capacities
from shoal_kvindex.prefixes import Prefixes
from shoal_kvindex.waiters import Waiters, satisfies
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Awaited:
    """What requests asked of blocks that were not stored yet."""

    claims: Claims
    waiters: Waiters
    prefixes: Prefixes


class Ingest:
    """Applies reports at once; on the loop that answers requests."""

    def __init__(
        self,
        directory: Directory,
        journal: Journal,
        awaited: Awaited,
        recorder: ChangeRecorder,
        clock: Clock,
        unclaimed_s: int,
    ) -> None:
        self._gate = ReportGate()
        self._directory = directory
        self._journal = journal
        self._claims = awaited.claims
        self._waiters = awaited.waiters
        self._prefixes = awaited.prefixes
        self._recorder = recorder
        self._clock = clock
        self._unclaimed_s = unclaimed_s

    @property
    def gate(self) -> ReportGate:
        return self._gate

    def apply(self, reports: Sequence[Report], *, is_again: bool = False) -> Summary:
        """Admit and apply one delivery. ``is_again``: it was applied out of the log's order before, so what it says
        of the shared level, of which several servers tell, is applied once more in its order."""
        summary = Summary()
        for report in sorted(reports, key=lambda report: report.source):
            verdict = self._gate.admit(*report.source)
            summary.verdicts[verdict] += 1
            if verdict.voids_l1:
                reason = Fence.GAP if verdict is Verdict.AFTER_GAP else Fence.RESTARTED
                self.fence(report.source.instance_id, reason)
                summary.fences.append((report.source.instance_id, reason))
            if verdict.is_admitted:
                self._apply_one(report, summary)
                self._journal.cursor_moved(*report.source)
            elif is_again and report.level is Level.L2:
                self._apply_one(report, Summary())
        return summary

    def fence(self, instance_id: str, reason: Fence) -> None:
        """Forget what a server has in DRAM. Its shared copies stay until they are listed: after a gap the index may
        not know one that is there, or know one whose delete was lost. The latter costs a recompute."""
        self._directory.drop_l1(instance_id)
        self._recorder.dropped(Place(Level.L1, instance_id))
        log.warning("copies.dropped", store_instance_id=instance_id, store_level="L1", reason=reason.value)

    def correct(self, correction: Correction) -> None:
        """What a listing has and the directory had not, and the reverse."""
        for key in correction.gone:
            self._directory.delete(key, correction.place)
        self._store(correction.found, correction.place)

    def _apply_one(self, report: Report, summary: Summary) -> None:
        summary.capacities |= shared_capacities([report])
        if report.level is Level.L2 and not report.is_shared:
            summary.unshared_objects += len(report.objects)
            return
        place = SHARED if report.level is Level.L2 else Place(Level.L1, report.source.instance_id)
        if report.kind is Kind.DELETE:
            for key, _ in report.objects:
                self._directory.delete(key, place)
                self._recorder.deleted(key, place)
            summary.deleted_objects += len(report.objects)
        elif report.kind is Kind.STORE:
            self._store(report.objects, place)
            for key, size_bytes in report.objects:
                self._recorder.stored(key, place, size_bytes)
            summary.stored_objects += len(report.objects)

    def _store(self, objects: Sequence[tuple[ObjectKey, int]], place: Place) -> None:
        unclaimed_until_s = int(self._clock.now()) + self._unclaimed_s
        now_s = self._clock.monotonic()
        for key, size_bytes in objects:
            asked_s = self._claims.take(key.namespace, key.block_hash, now_s) if self._claims else None
            self._directory.store(key, place, size_bytes, asked_s or unclaimed_until_s)
            if asked_s is not None:  # the block may have been known, with an earlier expiry
                self._directory.renew(key.namespace, [key.block_hash], partial(_latest, asked_s))
            self._tell_awaiting(key.namespace, key.block_hash)

    def _tell_awaiting(self, namespace: Namespace, block_hash: bytes) -> None:
        is_pending = self._prefixes.is_pending(namespace, block_hash)
        if not is_pending and not self._waiters.awaits(namespace, block_hash):
            return
        for readable in self._directory.readable_run(namespace, [block_hash]):
            self._waiters.wake(namespace, block_hash, readable)
            if is_pending and satisfies(readable, None):
                self._prefixes.stored(namespace, block_hash)


def _latest(asked_s: int, expires_at_s: int) -> int | None:
    return asked_s if asked_s > expires_at_s else None
