"""Everything that changes an index, as the instances of kvindex tell it to each other.

Whoever hears something publishes it to a ChangeLog; every instance applies what the log brings, in its order, its own
changes too. Applying a change twice is the same as once: reports carry cursors, times only grow, the rest is absolute.
docs/decisions/0008-kvindex-scales.md
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal_kvindex.directory import Namespace, ObjectKey, Place
from shoal_kvindex.ingest.gate import Cursor
from shoal_kvindex.ingest.reports import Report, Summary


@dataclass(frozen=True, slots=True)
class Reports:
    """One delivery of an lmcache server."""

    reports: Sequence[Report]


class Sign(enum.Enum):
    """What an lmcache server did."""

    REGISTERED = "registered"
    BEAT = "beat"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class StoreSign:
    """An lmcache server is there, or left. A beat also tells what is known of it, for instances that came later.

    ``is_l1_void``: what it had in DRAM is not known any more: it started anew, or an instance missed reports of it.
    """

    instance_id: str
    sign: Sign
    host: str = ""
    http_port: int = 0
    shared_capacity_bytes: int = 0  # 0: it told none
    is_l1_void: bool = False


@dataclass(frozen=True, slots=True)
class StoreSilent:
    """The lease holder does not hear this server; holds for what it reported up to ``cursor``."""

    instance_id: str
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Renewal:
    """These blocks were used: they expire at ``expires_at_s`` (Unix) or later, also those whose report is to come."""

    namespace: Namespace
    block_hashes: Sequence[bytes]
    expires_at_s: int


@dataclass(frozen=True, slots=True)
class Renewals:
    """What was used within one short while."""

    renewals: Sequence[Renewal]


@dataclass(frozen=True, slots=True)
class Marks:
    """The sweep is about to delete these blocks, or does not want to any more."""

    blocks: Sequence[tuple[Namespace, Sequence[bytes]]]
    is_taken_back: bool = False
    is_for_room: bool = False


@dataclass(frozen=True, slots=True)
class PendingBlocks:
    """A request computes these blocks for ``for_s`` seconds more; 0: it does not any more."""

    namespace: Namespace
    block_hashes: Sequence[bytes]
    request_id: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Correction:
    """What a listing of ``place`` has and the directory had not (with sizes), and the reverse."""

    place: Place
    found: Sequence[tuple[ObjectKey, int]]
    gone: Sequence[ObjectKey]


@dataclass(frozen=True, slots=True)
class SweepCounts:
    """Since the start of the lease holder."""

    marked_blocks: int = 0
    renewed_blocks: int = 0
    expired_blocks: int = 0
    evicted_blocks: int = 0
    orphan_objects: int = 0
    phantom_objects: int = 0


@dataclass(frozen=True, slots=True)
class IndexState:
    """What the lease holder says about the whole index. ``ages`` pairs "expires within seconds" with blocks."""

    is_complete: bool
    reason: str
    lease_holder: str
    last_listing_s: int | None = None  # Unix
    sweep: SweepCounts = SweepCounts()
    ages: Sequence[tuple[int, int]] = ()


Change: TypeAlias = Reports | StoreSign | StoreSilent | Renewals | Marks | PendingBlocks | Correction | IndexState


class ChangeLog(Protocol):
    """Where changes go. Never raises: what cannot be published is applied here and published later."""

    async def publish(self, change: Change) -> Summary | None:
        """Returns when the log has the change and it was applied here, or when it was applied here because the log
        is away; what it came to here. None: the log has it, and this instance lags behind."""
