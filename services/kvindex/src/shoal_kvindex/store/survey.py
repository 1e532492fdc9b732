"""Asks the durable directory what the lease holder's housekeeping wants to know. Reads only.

On a connection of its own, so that long questions never stand before a write. Names of namespaces and places are few
and never change their numbers: they are kept, and read again when a number is not known.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from shoal_kvindex.names import SHARED, Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.ports import BlockName, DurableBlock, Position
from shoal_kvindex.store import tables

AFTER_ALL = b"\xff" * 33  # more than any hash
BEFORE_ALL = Position(-1, -1, b"")
NEVER_S = 2**62
PIECE_ROWS = 2_000

# The lateral join reads one range of the primary key a namespace: there is no index by hash alone.
OBJECTS_AT = text("""
    SELECT o.namespace_id, o.block_hash, o.kv_rank, o.object_group_id
    FROM kvindex.namespaces n CROSS JOIN LATERAL (
        SELECT * FROM kvindex.objects o WHERE o.namespace_id = n.namespace_id
        AND o.block_hash >= :low AND o.block_hash < :high AND o.place_id = :place) o
""")
SOONEST = text("""
    SELECT namespace_id, block_hash, expires_at_s FROM kvindex.blocks
    WHERE expires_at_s < :before_s AND expires_at_s >= :after_s
      AND (expires_at_s, namespace_id, block_hash) > (:after_s, :after_namespace, :after_hash)
    ORDER BY expires_at_s, namespace_id, block_hash LIMIT :limit
""")
BLOCKS = text("""
    SELECT b.namespace_id, b.block_hash, b.expires_at_s
    FROM unnest(CAST(:namespaces AS int[]), CAST(:hashes AS bytea[])) AS d(namespace_id, block_hash)
    JOIN kvindex.blocks b USING (namespace_id, block_hash)
""")
OBJECTS = text("""
    SELECT o.namespace_id, o.block_hash, o.place_id, o.kv_rank, o.object_group_id, o.size_bytes
    FROM unnest(CAST(:namespaces AS int[]), CAST(:hashes AS bytea[])) AS d(namespace_id, block_hash)
    JOIN kvindex.objects o USING (namespace_id, block_hash)
""")
SHARED_BYTES = text("SELECT coalesce(sum(size_bytes), 0) FROM kvindex.objects WHERE place_id = :place")
AGES = text("""
    SELECT width_bucket(expires_at_s, CAST(:bounds AS bigint[])) AS bucket, count(*) AS blocks
    FROM kvindex.blocks GROUP BY 1
""")


class DirectorySurvey:
    """Implements ``ports.Survey``. Used by the housekeeping only; every call may raise one of STORE_FAILURES."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._namespaces: dict[int, Namespace] = {}
        self._places: dict[int, Place] = {}
        self._parts: dict[Part, Part] = {}

    async def objects_at(self, place: Place, shards: range) -> set[ObjectKey]:
        low = bytes([shards.start])
        high = bytes([shards.stop]) if shards.stop < 256 else AFTER_ALL
        async with self._engine.connect() as connection:
            place_id = await self._place_id(connection, place)
            if place_id is None:
                return set()
            ranges = {"low": low, "high": high, "place": place_id}
            found: set[ObjectKey] = set()
            # In pieces: a shard of a large store has tens of thousands of rows, and requests wait for the loop.
            async with connection.stream(OBJECTS_AT, ranges) as rows:
                async for some in rows.partitions(PIECE_ROWS):
                    names = await self._namespaces_of(connection, {row.namespace_id for row in some})
                    found.update(
                        ObjectKey(names[namespace_id], bytes(block_hash), self._part(kv_rank, object_group_id))
                        for namespace_id, block_hash, kv_rank, object_group_id in some
                    )
        return found

    async def soonest(
        self, before_s: int | None, after: Position | None, limit: int
    ) -> tuple[Sequence[DurableBlock], Position | None]:
        after = after or BEFORE_ALL
        bounds = {
            "before_s": NEVER_S if before_s is None else before_s,
            "after_s": after.expires_at_s,
            "after_namespace": after.namespace_id,
            "after_hash": after.block_hash,
            "limit": limit,
        }
        async with self._engine.connect() as connection:
            rows = (await connection.execute(SOONEST, bounds)).all()
            blocks = await self._whole(connection, rows)
        is_last = len(rows) < limit
        position = None if is_last else Position(rows[-1].expires_at_s, rows[-1].namespace_id, rows[-1].block_hash)
        return blocks, position

    async def blocks(self, names: Sequence[BlockName]) -> Mapping[BlockName, DurableBlock]:
        async with self._engine.connect() as connection:
            ids = await self._namespace_ids(connection, {namespace for namespace, _ in names})
            known = [(ids[namespace], block_hash) for namespace, block_hash in names if namespace in ids]
            rows = (await connection.execute(BLOCKS, _columns(known))).all()
            return {block.name: block for block in await self._whole(connection, rows)}

    async def shared_bytes(self) -> int:
        async with self._engine.connect() as connection:
            place_id = await self._place_id(connection, SHARED)
            return int((await connection.execute(SHARED_BYTES, {"place": place_id})).scalar_one())

    async def ages(self, now_s: int, within_s: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Blocks beyond the last bound count in it."""
        async with self._engine.connect() as connection:
            rows = await connection.execute(AGES, {"bounds": [now_s + bound_s for bound_s in within_s]})
            counts = [0] * (len(within_s) + 1)  # the last one: beyond all bounds
            for row in rows:
                counts[row.bucket] = row.blocks
        *within, latest, beyond = counts
        return list(zip(within_s, [*within, latest + beyond], strict=True))

    async def _whole(self, connection: AsyncConnection, rows: Sequence[Any]) -> list[DurableBlock]:
        """Block rows with their objects."""
        numbers = [(row.namespace_id, row.block_hash) for row in rows]
        names = await self._namespaces_of(connection, {namespace_id for namespace_id, _ in numbers})
        objects: dict[tuple[int, bytes], list[tuple[Place, Part]]] = {}
        shared_bytes: dict[tuple[int, bytes], int] = {}
        found = (await connection.execute(OBJECTS, _columns(numbers))).all()
        places = await self._places_of(connection, {row.place_id for row in found})
        for row in found:
            number, place = (row.namespace_id, row.block_hash), places[row.place_id]
            objects.setdefault(number, []).append((place, self._part(row.kv_rank, row.object_group_id)))
            if place == SHARED:
                shared_bytes[number] = shared_bytes.get(number, 0) + row.size_bytes
        return [
            DurableBlock(
                (names[row.namespace_id], bytes(row.block_hash)),
                row.expires_at_s,
                shared_bytes.get(number, 0),
                tuple(objects.get(number, ())),
            )
            for row, number in zip(rows, numbers, strict=True)
        ]

    def _part(self, kv_rank: int, object_group_id: int) -> Part:
        part = Part(kv_rank, object_group_id)
        return self._parts.setdefault(part, part)

    async def _namespace_ids(self, connection: AsyncConnection, names: set[Namespace]) -> Mapping[Namespace, int]:
        """Those without any row are absent."""
        ids = {name: number for number, name in self._namespaces.items() if name in names}
        if len(ids) < len(names):
            await self._read_namespaces(connection)
            ids = {name: number for number, name in self._namespaces.items() if name in names}
        return ids

    async def _place_id(self, connection: AsyncConnection, place: Place) -> int | None:
        ids = {place: number for number, place in self._places.items()}
        if place not in ids:
            await self._read_places(connection)
            ids = {place: number for number, place in self._places.items()}
        return ids.get(place)

    async def _namespaces_of(self, connection: AsyncConnection, ids: set[int]) -> Mapping[int, Namespace]:
        if not self._namespaces.keys() >= ids:
            await self._read_namespaces(connection)
        return self._namespaces

    async def _places_of(self, connection: AsyncConnection, ids: set[int]) -> Mapping[int, Place]:
        if not self._places.keys() >= ids:
            await self._read_places(connection)
        return self._places

    async def _read_namespaces(self, connection: AsyncConnection) -> None:
        rows = await connection.execute(select(tables.namespaces))
        self._namespaces = {row.namespace_id: Namespace(row.pool, row.cache_salt) for row in rows}

    async def _read_places(self, connection: AsyncConnection) -> None:
        rows = await connection.execute(select(tables.places))
        self._places = {row.place_id: Place(Level(row.level), row.instance_id) for row in rows}


def _columns(numbers: Sequence[tuple[int, bytes]]) -> dict[str, list[Any]]:
    return {
        "namespaces": [namespace_id for namespace_id, _ in numbers],
        "hashes": [block_hash for _, block_hash in numbers],
    }
