"""What the housekeeping needs of the world outside: the stores' own HTTP, Postgres, and the right to act.

Implemented by ``store_client.py``, ``store/survey.py`` and the lease; in tests by fakes. Every call has a deadline of
its own. A store that fails raises ``StoreFailed``; Postgres raises what ``store.engine.STORE_FAILURES`` lists.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from shoal_kvindex.ingest.changes import ChangeLog
from shoal_kvindex.names import Level, Namespace, ObjectKey, Part, Place
from shoal_runtime.clock import Clock

BlockName: TypeAlias = tuple[Namespace, bytes]


class StoreTrouble(enum.Enum):
    """Why a store did not do what it was asked."""

    CANNOT_LIST = "cannot_list"  # it will not learn to: another store, or none
    AWAY = "away"  # not there, late, or broken: later
    REFUSED = "refused"  # it answered, and not with what was asked


class StoreFailed(Exception):
    """``instance_id`` names the lmcache server; "" when there was none to ask."""

    def __init__(self, trouble: StoreTrouble, instance_id: str, reason: str) -> None:
        super().__init__(f"store {instance_id} {reason}" if instance_id else reason)
        self.trouble = trouble
        self.instance_id = instance_id


@dataclass(frozen=True, slots=True)
class ListedPage:
    """Objects with their sizes; ``next_token`` is None on the last page."""

    objects: Sequence[tuple[ObjectKey, int]]
    next_token: str | None


class StoreClient(Protocol):
    """Asks lmcache servers by their instance id. Raises StoreFailed."""

    def stores(self) -> Sequence[str]:
        """The registered ones, the one that answered last first."""

    async def list_page(self, instance_id: str, level: Level, token: str | None) -> ListedPage:
        """``token`` of the page before, None for the first."""

    async def delete(self, instance_id: str, level: Level, keys: Sequence[ObjectKey]) -> int:
        """Objects that are not there count as deleted. Returns how many were skipped because they are being read."""


class DurableBlock(NamedTuple):
    """A row of the durable directory."""

    name: BlockName
    expires_at_s: int
    shared_bytes: int
    objects: tuple[tuple[Place, Part], ...]


class Position(NamedTuple):
    """Where a walk in the order of expiry stands: Postgres' own numbers, opaque to its caller."""

    expires_at_s: int
    namespace_id: int
    block_hash: bytes


class Survey(Protocol):
    """Questions to the durable directory, all of them bounded but the last two."""

    async def objects_at(self, place: Place, shards: range) -> set[ObjectKey]:
        """Objects whose hash begins with one of these bytes."""

    async def soonest(
        self, before_s: int | None, after: Position | None, limit: int
    ) -> tuple[Sequence[DurableBlock], Position | None]:
        """Blocks in the order of their expiry, those before ``before_s`` only, from ``after`` on; and where the next
        ones begin (None: these were all)."""

    async def blocks(self, names: Sequence[BlockName]) -> Mapping[BlockName, DurableBlock]:
        """The rows of these blocks; those without a row are absent."""

    async def shared_bytes(self) -> int:
        """What lies on the shared level."""

    async def ages(self, now_s: int, within_s: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Blocks by when they expire: each of ``within_s`` (ascending) with those not counted before."""


class Lease(Protocol):
    """The right to write, list and delete, of one instance at a time."""

    @property
    def is_held(self) -> bool:
        """False also when this instance cannot be sure any more."""

    @property
    def term(self) -> int:
        """Counts the holders; another number means that somebody else held it in between."""


@dataclass(frozen=True, slots=True)
class Duties:
    """What all work of the lease holder needs. ``hears_all``: what the other instances tell arrives here now."""

    client: StoreClient
    survey: Survey
    log: ChangeLog
    lease: Lease
    clock: Clock
    hears_all: Callable[[], bool]
