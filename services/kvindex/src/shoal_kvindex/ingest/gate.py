"""Admit or drop the reports of lmcache servers.

A server numbers its reports from 1 in each of its lives (incarnations) and never sends one again. So a number
already seen is a duplicate, an older life is stale, and a missing number is lost for ever: what the server has in
DRAM is then unknown. One cursor a server says all of it; it is written in the same transaction as the changes it
covers, because a cursor that ran ahead would hide a loss. docs/decisions/0007-the-store-tells-the-truth.md
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple


class Verdict(enum.Enum):
    """What became of one report."""

    ADMITTED = "admitted"
    AFTER_GAP = "after_gap"  # admitted, but reports before it are lost
    RESTARTED = "restarted"  # admitted, first of a new life: what the last one reported is void
    DUPLICATE = "duplicate"
    STALE = "stale"  # of a life that is over

    @property
    def is_admitted(self) -> bool:
        return self in (Verdict.ADMITTED, Verdict.AFTER_GAP, Verdict.RESTARTED)

    @property
    def voids_l1(self) -> bool:
        """Whether earlier reports about the server's DRAM can no longer be believed."""
        return self in (Verdict.AFTER_GAP, Verdict.RESTARTED)


class Cursor(NamedTuple):
    """The last report admitted from a server."""

    incarnation: int
    seq: int


class ReportGate:
    """Called for every report, in the order they came in; on one event loop. ``restore`` survives a restart."""

    def __init__(self) -> None:
        self._cursors: dict[str, Cursor] = {}

    def restore(self, cursors: Mapping[str, Cursor]) -> None:
        """Go on where the durable directory stopped."""
        self._cursors.update(cursors)

    def cursor(self, instance_id: str) -> Cursor | None:
        """The last report admitted from this server."""
        return self._cursors.get(instance_id)

    def admit(self, instance_id: str, incarnation: int, seq: int) -> Verdict:
        """Decide, and move the cursor when the report is admitted."""
        verdict = self._judge(self._cursors.get(instance_id), Cursor(incarnation, seq))
        if verdict.is_admitted:
            self._cursors[instance_id] = Cursor(incarnation, seq)
        return verdict

    @staticmethod
    def _judge(last: Cursor | None, report: Cursor) -> Verdict:
        if last is None:
            return Verdict.ADMITTED if report.seq == 1 else Verdict.AFTER_GAP
        if report.incarnation != last.incarnation:
            return Verdict.RESTARTED if report.incarnation > last.incarnation else Verdict.STALE
        if report.seq <= last.seq:
            return Verdict.DUPLICATE
        return Verdict.ADMITTED if report.seq == last.seq + 1 else Verdict.AFTER_GAP
