"""Collects the renewals that Match and Settle make here, for the other instances; a batch each short while.

Stands before the journal and passes everything on to it. What it collects is bounded: past the bound renewals are
counted as dropped, and the blocks expire elsewhere as they would have, which the next use mends. A renewal of a block
that is not stored yet (a claim) goes the same way. docs/decisions/0010-expiry-follows-the-traffic-class.md
"""

from collections.abc import Iterator
from contextlib import contextmanager

from shoal_kvindex.directory import Journal, Namespace, ObjectKey, Place
from shoal_kvindex.ingest.changes import Renewal, Renewals


class Relay:
    """A Journal; on one event loop."""

    def __init__(self, journal: Journal, max_blocks: int) -> None:
        self._journal = journal
        self._max_blocks = max_blocks
        self._expiries: dict[tuple[Namespace, bytes], int] = {}
        self._dropped_count = 0
        self._is_deaf = False

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """While a change of the log is applied: the others hear it from the log themselves."""
        before, self._is_deaf = self._is_deaf, True
        try:
            yield
        finally:
            self._is_deaf = before

    @property
    def dropped_count(self) -> int:
        """Renewals that the bound dropped, since start."""
        return self._dropped_count

    def collect(self, namespace: Namespace, block_hash: bytes, expires_at_s: int) -> None:
        """A block was used here, or claimed before it is stored."""
        if self._is_deaf:
            return
        key = (namespace, block_hash)
        if key not in self._expiries and len(self._expiries) >= self._max_blocks:
            self._dropped_count += 1
            return
        self._expiries[key] = max(expires_at_s, self._expiries.get(key, 0))

    def take(self) -> Renewals | None:
        """What was collected since the last time; None when nothing was."""
        if not self._expiries:
            return None
        expiries, self._expiries = self._expiries, {}
        together: dict[tuple[Namespace, int], list[bytes]] = {}
        for (namespace, block_hash), expires_at_s in expiries.items():
            together.setdefault((namespace, expires_at_s), []).append(block_hash)
        return Renewals([Renewal(namespace, hashes, at_s) for (namespace, at_s), hashes in together.items()])

    def object_stored(self, key: ObjectKey, place: Place, size_bytes: int, expires_at_s: int) -> None:
        self._journal.object_stored(key, place, size_bytes, expires_at_s)

    def object_deleted(self, key: ObjectKey, place: Place) -> None:
        self._journal.object_deleted(key, place)

    def block_renewed(self, namespace: Namespace, block_hash: bytes, expires_at_s: int) -> None:
        self._journal.block_renewed(namespace, block_hash, expires_at_s)
        self.collect(namespace, block_hash, expires_at_s)

    def place_dropped(self, place: Place) -> None:
        self._journal.place_dropped(place)

    def cursor_moved(self, instance_id: str, incarnation: int, seq: int) -> None:
        self._journal.cursor_moved(instance_id, incarnation, seq)
