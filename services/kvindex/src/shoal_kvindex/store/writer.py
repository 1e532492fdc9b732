"""Writes the directory's changes to Postgres behind its back, in batches, each one transaction.

Only the lease holder writes, fenced by its term. The cursors of the reports are written with the changes they cover,
and so is the place in the log up to which all is durable: after a crash the durable directory stands at an earlier
report, the log brings what came after it, and what it does not bring shows as a gap. A failed write keeps its changes
and is tried again; meanwhile readiness says so and serving goes on.

Instances that do not write keep their changes in buckets, each sealed with its place in the log, until the holder has
written that far; who takes the lease over writes what is left. Writing a change twice is the same as once.
docs/decisions/0008-kvindex-scales.md, docs/decisions/0009-sql-is-off-the-hot-path.md
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Table, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from shoal_kvindex.directory import Namespace, ObjectKey, Place
from shoal_kvindex.ingest.shared_log import LogPosition
from shoal_kvindex.store import tables
from shoal_kvindex.store.engine import STORE_FAILURES
from shoal_kvindex.store.lease import Fenced, check_fence, note_written
from shoal_kvindex.store.pending import PendingChanges

Row = TypeVar("Row")
Name = TypeVar("Name", Namespace, Place)

SLICE_ROWS = 10_000  # columns are built on the loop that answers requests: a few milliseconds a slice

DROP_PLACES = text("""
    WITH gone AS (DELETE FROM kvindex.objects WHERE place_id = ANY(CAST(:places AS int[]))
                  RETURNING namespace_id, block_hash)
    DELETE FROM kvindex.blocks b USING (SELECT DISTINCT namespace_id, block_hash FROM gone) g
    WHERE b.namespace_id = g.namespace_id AND b.block_hash = g.block_hash AND NOT EXISTS (
        SELECT FROM kvindex.objects o WHERE o.namespace_id = b.namespace_id AND o.block_hash = b.block_hash
        AND o.place_id <> ALL(CAST(:places AS int[])))
""")
WRITE_BLOCKS = text("""
    INSERT INTO kvindex.blocks (namespace_id, block_hash, expires_at_s)
    SELECT * FROM unnest(CAST(:namespaces AS int[]), CAST(:hashes AS bytea[]), CAST(:expiries AS bigint[]))
    ON CONFLICT (namespace_id, block_hash)
    DO UPDATE SET expires_at_s = GREATEST(blocks.expires_at_s, excluded.expires_at_s)
""")
WRITE_OBJECTS = text("""
    INSERT INTO kvindex.objects (namespace_id, block_hash, place_id, kv_rank, object_group_id, size_bytes)
    SELECT * FROM unnest(CAST(:namespaces AS int[]), CAST(:hashes AS bytea[]), CAST(:places AS int[]),
                         CAST(:ranks AS bigint[]), CAST(:groups AS int[]), CAST(:sizes AS bigint[]))
    ON CONFLICT DO NOTHING
""")
DELETE_OBJECTS = text("""
    DELETE FROM kvindex.objects o USING unnest(
        CAST(:namespaces AS int[]), CAST(:hashes AS bytea[]), CAST(:places AS int[]),
        CAST(:ranks AS bigint[]), CAST(:groups AS int[])) AS d(namespace_id, block_hash, place_id, kv_rank, group_id)
    WHERE o.namespace_id = d.namespace_id AND o.block_hash = d.block_hash AND o.place_id = d.place_id
      AND o.kv_rank = d.kv_rank AND o.object_group_id = d.group_id
""")
DELETE_BLOCKS = text("""
    DELETE FROM kvindex.blocks b USING unnest(CAST(:namespaces AS int[]), CAST(:hashes AS bytea[]))
        AS d(namespace_id, block_hash)
    WHERE b.namespace_id = d.namespace_id AND b.block_hash = d.block_hash AND NOT EXISTS (
        SELECT FROM kvindex.objects o WHERE o.namespace_id = b.namespace_id AND o.block_hash = b.block_hash)
""")
WRITE_CURSORS = text("""
    INSERT INTO kvindex.cursors (instance_id, incarnation, seq)
    SELECT * FROM unnest(CAST(:instances AS text[]), CAST(:incarnations AS bigint[]), CAST(:seqs AS bigint[]))
    ON CONFLICT (instance_id) DO UPDATE SET incarnation = excluded.incarnation, seq = excluded.seq
""")


class Right(NamedTuple):
    """To write: who holds the lease, and its term."""

    holder: str
    term: int


@dataclass(frozen=True, slots=True)
class Written:
    """What one flush did. ``failure`` is None when everything pending is durable."""

    changes: int
    overflowed_changes: int
    failure: BaseException | None = None

    @property
    def is_fenced(self) -> bool:
        return isinstance(self.failure, Fenced)


class DirectoryWriter:
    """Owns the pending changes; ``flush`` and ``seal`` are called by one task only, one at a time."""

    def __init__(self, engine: AsyncEngine, max_changes: int) -> None:
        self._engine = engine
        self._max_changes = max_changes
        self._pending = PendingChanges(max_changes)
        self._sealed: deque[tuple[LogPosition, PendingChanges]] = deque()
        self._kept = 0  # changes that are sealed or being written
        self._noted: LogPosition | None = None
        self._namespace_ids: dict[Namespace, int] = {}
        self._place_ids: dict[Place, int] = {}

    @property
    def pending_changes(self) -> int:
        return len(self._pending) + self._kept

    @property
    def is_full(self) -> bool:
        """Whether further changes are dropped."""
        return self.pending_changes >= self._max_changes

    def object_stored(self, key: ObjectKey, place: Place, size_bytes: int, expires_at_s: int) -> None:
        self._pending.object_stored(key, place, size_bytes, expires_at_s)

    def object_deleted(self, key: ObjectKey, place: Place) -> None:
        self._pending.object_deleted(key, place)

    def block_renewed(self, namespace: Namespace, block_hash: bytes, expires_at_s: int) -> None:
        self._pending.block_renewed(namespace, block_hash, expires_at_s)

    def place_dropped(self, place: Place) -> None:
        self._pending.place_dropped(place)

    def cursor_moved(self, instance_id: str, incarnation: int, seq: int) -> None:
        self._pending.cursor_moved(instance_id, incarnation, seq)

    def seal(self, position: LogPosition | None, written: LogPosition | None) -> None:
        """Instead of ``flush``, where another instance writes. ``position``: everything told so far is in the log up
        to here (None: something is not yet). ``written``: what the holder has made durable is let go."""
        if position is not None:
            if not self._pending.is_empty:
                self._sealed.append((position, self._pending))
                self._kept += len(self._pending)
                self._pending = PendingChanges(self._max_changes - self._kept)
            if self._sealed and self._sealed[0][0].log_id != position.log_id:
                # Of a log that is gone: its last seconds are in this one too, and all before them is written.
                self._sealed = deque((position, changes) for _, changes in self._sealed)
        while self._sealed and written is not None and _is_covered(self._sealed[0][0], written):
            self._kept -= len(self._sealed.popleft()[1])
            self._pending.set_bound(self._max_changes - self._kept)

    async def flush(self, right: Right, position: LogPosition | None) -> Written:
        """Write all that is pending. A failure is returned, not raised; its changes stay pending.

        ``position``: the last change of the log that was told to this journal.
        """
        changes = self._take_all()
        if changes.is_empty and position == self._noted:
            return Written(0, 0)
        overflowed, changes.overflowed_changes = changes.overflowed_changes, 0
        self._kept = len(changes)
        # What comes meanwhile shares the bound with what is being written.
        self._pending = PendingChanges(self._max_changes - self._kept)
        try:
            await self._write(changes, right, position)
        except (Fenced, *STORE_FAILURES) as failure:
            return Written(0, overflowed, failure)
        else:
            changes = PendingChanges(self._max_changes)
            self._noted = position
            return Written(self._kept, overflowed)
        finally:
            # After a failure or a cancel the changes are pending again, under those that came meanwhile.
            changes.followed_by(self._pending)
            self._pending = changes
            self._kept = 0

    def _take_all(self) -> PendingChanges:
        whole = PendingChanges(self._max_changes)
        for _, earlier in self._sealed:
            whole.followed_by(earlier)
        self._sealed.clear()
        whole.followed_by(self._pending)
        return whole

    async def _write(self, changes: PendingChanges, right: Right, position: LogPosition | None) -> None:
        namespaces = {namespace for namespace, _ in changes.expiries} | {key.namespace for key, _ in changes.sizes}
        places = changes.dropped_places | {place for _, place in changes.sizes}
        unnumbered = namespaces - self._namespace_ids.keys(), places - self._place_ids.keys()
        if any(unnumbered):
            async with self._engine.begin() as connection:
                await check_fence(connection, *right)
                namespace_ids = await _number(connection, tables.namespaces, unnumbered[0])
                place_ids = await _number(connection, tables.places, unnumbered[1])
            # Only now: a number whose transaction was rolled back must not be used.
            self._namespace_ids |= namespace_ids
            self._place_ids |= place_ids
        async with self._engine.begin() as connection:
            await check_fence(connection, *right)
            if changes.dropped_places:
                dropped = [self._place_ids[place] for place in changes.dropped_places]
                await connection.execute(DROP_PLACES, {"places": dropped})
            for expiries in _slices(changes.expiries.items()):
                await connection.execute(WRITE_BLOCKS, self._block_columns(expiries))
            await self._write_objects(connection, changes)
            if changes.cursors:
                await connection.execute(WRITE_CURSORS, _cursor_columns(changes))
            if position is not None:
                await note_written(connection, position)

    async def _write_objects(self, connection: AsyncConnection, changes: PendingChanges) -> None:
        # All that is stored before all that is deleted: a delete takes the block's own row when no object is left.
        stored = ((change, size) for change, size in changes.sizes.items() if size is not None)
        for rows in _slices(stored):
            columns = self._object_columns([change for change, _ in rows])
            await connection.execute(WRITE_OBJECTS, columns | {"sizes": [size for _, size in rows]})
        for deleted in _slices(change for change, size in changes.sizes.items() if size is None):
            columns = self._object_columns(deleted)
            await connection.execute(DELETE_OBJECTS, columns)
            await connection.execute(DELETE_BLOCKS, {name: columns[name] for name in ("namespaces", "hashes")})

    def _block_columns(self, rows: Sequence[tuple[tuple[Namespace, bytes], int]]) -> dict[str, list[Any]]:
        return {
            "namespaces": [self._namespace_ids[namespace] for (namespace, _), _ in rows],
            "hashes": [block_hash for (_, block_hash), _ in rows],
            "expiries": [expires_at_s for _, expires_at_s in rows],
        }

    def _object_columns(self, rows: Sequence[tuple[ObjectKey, Place]]) -> dict[str, list[Any]]:
        return {
            "namespaces": [self._namespace_ids[key.namespace] for key, _ in rows],
            "hashes": [key.block_hash for key, _ in rows],
            "places": [self._place_ids[place] for _, place in rows],
            "ranks": [key.part.kv_rank for key, _ in rows],
            "groups": [key.part.object_group_id for key, _ in rows],
        }


def _is_covered(sealed: LogPosition, written: LogPosition) -> bool:
    return sealed.log_id == written.log_id and sealed.seq <= written.seq


def _cursor_columns(changes: PendingChanges) -> dict[str, list[Any]]:
    return {
        "instances": list(changes.cursors),
        "incarnations": [cursor.incarnation for cursor in changes.cursors.values()],
        "seqs": [cursor.seq for cursor in changes.cursors.values()],
    }


def _slices(rows: Iterable[Row]) -> Iterator[list[Row]]:
    source = iter(rows)
    while rows_of_slice := list(islice(source, SLICE_ROWS)):
        yield rows_of_slice


async def _number(connection: AsyncConnection, table: Table, names: Iterable[Name]) -> dict[Name, int]:
    """Give each name its number in ``table``; another instance may have done so already."""
    number, first, second = table.columns
    numbers = {}
    for name in names:
        values = {first.name: name[0], second.name: name[1]}
        await connection.execute(insert(table).values(values).on_conflict_do_nothing())
        row = await connection.execute(select(number).where(first == name[0], second == name[1]))
        numbers[name] = int(row.scalar_one())
    return numbers
