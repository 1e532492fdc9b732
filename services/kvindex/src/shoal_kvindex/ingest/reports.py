"""What lmcache servers report, and what became of it: the types of one delivery."""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal_kvindex.directory import Level, ObjectKey
from shoal_kvindex.ingest.gate import Verdict


class Kind(enum.Enum):
    """What a report says about its objects."""

    STORE = "store"
    DELETE = "delete"
    CAPACITY = "capacity"  # of the shared level, in ``capacity_bytes``
    OTHER = "other"  # access and the like: they count for the cursor and change nothing


class Fence(enum.Enum):
    """Why the DRAM copies of a server were dropped."""

    GAP = "gap"
    RESTARTED = "restarted"
    LEFT = "left"
    SILENT = "silent"


class ReportSource(NamedTuple):
    """Who reports, in which life, and the number of the report in it; their order is the order to apply."""

    instance_id: str
    incarnation: int
    seq: int


@dataclass(frozen=True, slots=True)
class Report:
    """One numbered report. ``objects`` pairs each key with its size; only STORE and DELETE have any."""

    source: ReportSource
    kind: Kind
    level: Level
    is_shared: bool
    objects: Sequence[tuple[ObjectKey, int]] = ()
    capacity_bytes: int = 0


@dataclass(slots=True)
class Summary:
    """What one delivery of reports, or any other change, came to."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    fences: list[tuple[str, Fence]] = field(default_factory=list)  # with the instance that lost its DRAM copies
    capacities: dict[str, int] = field(default_factory=dict)  # bytes of the shared level, by who told it
    stored_objects: int = 0
    deleted_objects: int = 0
    unshared_objects: int = 0  # on a disk of one node: readable by nobody else and not tracked

    def add(self, other: "Summary") -> None:
        """Take in what another piece of the same delivery came to."""
        self.verdicts += other.verdicts
        self.fences += other.fences
        self.capacities |= other.capacities
        self.stored_objects += other.stored_objects
        self.deleted_objects += other.deleted_objects
        self.unshared_objects += other.unshared_objects


def shared_capacities(reports: Sequence[Report]) -> dict[str, int]:
    """Bytes of the shared level, by who tells it."""
    return {
        report.source.instance_id: report.capacity_bytes
        for report in reports
        if report.kind is Kind.CAPACITY and report.level is Level.L2 and report.is_shared
    }
