"""Changes of the directory that are not written yet: the last word on each object wins, within a bound.

A copy that is stored and deleted between two writes costs little. When Postgres is away the changes wait here;
past the bound they are dropped and counted. A server whose DRAM changes were dropped is remembered, and the next
write empties its DRAM copies first: the durable directory then knows too little, never too much. For the shared
level a dropped delete may leave a row too much, which costs a recompute.
docs/decisions/0007-the-store-tells-the-truth.md
"""

from shoal_kvindex.directory import Level, Namespace, ObjectKey, Place
from shoal_kvindex.ingest.gate import Cursor


class PendingChanges:
    """A Journal in memory. Written in this order: dropped places, blocks, objects, cursors."""

    def __init__(self, max_changes: int) -> None:
        self._max_changes = max_changes
        self.dropped_places: set[Place] = set()
        self.expiries: dict[tuple[Namespace, bytes], int] = {}
        self.sizes: dict[tuple[ObjectKey, Place], int | None] = {}  # None: deleted
        self.cursors: dict[str, Cursor] = {}
        self.overflowed_changes = 0

    def __len__(self) -> int:
        return len(self.expiries) + len(self.sizes)

    @property
    def is_empty(self) -> bool:
        return not (self.dropped_places or self.expiries or self.sizes or self.cursors)

    def object_stored(self, key: ObjectKey, place: Place, size_bytes: int, expires_at_s: int) -> None:
        if self._has_room((key, place)):
            self.sizes[key, place] = size_bytes
            self.expiries[key.namespace, key.block_hash] = expires_at_s

    def object_deleted(self, key: ObjectKey, place: Place) -> None:
        if self._has_room((key, place)):
            self.sizes[key, place] = None

    def block_renewed(self, namespace: Namespace, block_hash: bytes, expires_at_s: int) -> None:
        if (namespace, block_hash) in self.expiries or len(self) < self._max_changes:
            self.expiries[namespace, block_hash] = expires_at_s
        else:
            self.overflowed_changes += 1

    def place_dropped(self, place: Place) -> None:
        for change in [change for change in self.sizes if change[1] == place]:
            del self.sizes[change]
        self.dropped_places.add(place)

    def cursor_moved(self, instance_id: str, incarnation: int, seq: int) -> None:
        self.cursors[instance_id] = Cursor(incarnation, seq)

    def followed_by(self, later: "PendingChanges") -> None:
        """Add what happened after: for a write that failed and is tried again."""
        for place in later.dropped_places:
            self.place_dropped(place)
        self.sizes.update(later.sizes)
        self.expiries.update(later.expiries)
        self.cursors.update(later.cursors)
        self.overflowed_changes += later.overflowed_changes

    def set_bound(self, max_changes: int) -> None:
        """What waits elsewhere shares the bound."""
        self._max_changes = max_changes

    def _has_room(self, change: tuple[ObjectKey, Place]) -> bool:
        if change in self.sizes or len(self) < self._max_changes:
            return True
        self.overflowed_changes += 1
        place = change[1]
        if place.level is Level.L1:
            self.dropped_places.add(place)
        return False
