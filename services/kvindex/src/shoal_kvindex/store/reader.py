"""Reads the durable directory: all of it into the map when the service starts, and single blocks that left the map.

The load is one stream of COPY. All columns of its rows have a fixed width, so a buffer of the stream is cut into rows
by one format. It lets the loop do other work after every few rows: health checks are answered meanwhile. If the map's
bound is smaller than the directory, what expires soonest is left out.
"""

import asyncio
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from shoal_kvindex.block_map import SplitBlock
from shoal_kvindex.directory import Directory
from shoal_kvindex.ingest.gate import Cursor
from shoal_kvindex.ingest.shared_log import LogPosition
from shoal_kvindex.names import SHARED, Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.store import tables
from shoal_kvindex.store.lease import written_position

LOAD_S = 900  # a large directory takes a minute, far longer than any other command
FIND_S = 1.0
STEP_ROWS = 1000  # two milliseconds

# For a join of whole tables: Postgres takes its condition for a rare one and would look up row by row, and with its own
# setting of memory it would spill to disk.
JOIN_ALL = text("SELECT set_config('enable_nestloop', 'off', true), set_config('work_mem', '256MB', true)")
# The soonest expiry that still fits, and with a second row that something does not. Postgres' estimate spares small
# directories the walk.
CUT = text("""
    SELECT expires_at_s FROM kvindex.blocks
    WHERE (SELECT reltuples * 2 NOT BETWEEN 0 AND :max_blocks FROM pg_class WHERE oid = 'kvindex.blocks'::regclass)
    ORDER BY expires_at_s DESC OFFSET :max_blocks - 1 LIMIT 2
""")
ROWS = """
    SELECT o.namespace_id, o.place_id, o.kv_rank, o.object_group_id, o.size_bytes, o.block_hash, b.expires_at_s
    FROM kvindex.objects o JOIN kvindex.blocks b USING (namespace_id, block_hash)
    WHERE length(o.block_hash) = 32 AND b.expires_at_s >= {cut_s}
"""
# COPY's binary rows: the number of fields, then each field's length and bytes. What many rows have in common is taken
# as one piece, and the hash in two, as the map has it: each microsecond a row is ten seconds of a start.
_COMMON = struct.Struct("!2x4xi4xi4xq4xi4xq")
_ROW = struct.Struct(f"!{_COMMON.size}s4xB31s4xq")
_HEADER_BYTES = 19

# Nothing of a prompt is found whose first block is not: then its other blocks are not looked for.
FIND = """
    WITH asked AS MATERIALIZED (
        SELECT * FROM unnest($1::int[], $2::int[], $3::bytea[], $4::bool[])
            AS asked(ask, namespace_id, block_hash, is_first)),
    shared AS MATERIALIZED (SELECT place_id FROM kvindex.places WHERE level = $5 AND instance_id = ''),
    begun AS MATERIALIZED (
        SELECT DISTINCT ask FROM asked JOIN kvindex.objects USING (namespace_id, block_hash)
        JOIN shared USING (place_id) WHERE is_first)
    SELECT namespace_id, block_hash, kv_rank, object_group_id, expires_at_s
    FROM begun JOIN asked USING (ask) JOIN kvindex.objects USING (namespace_id, block_hash)
    JOIN shared USING (place_id) JOIN kvindex.blocks USING (namespace_id, block_hash)
    WHERE expires_at_s > $6
"""


class Loaded(NamedTuple):
    """What the objects go with: the cursors of the reports, and the place in the log, up to which they are there."""

    cursors: Mapping[str, Cursor]
    written: LogPosition | None


async def load_directory(engine: AsyncEngine, directory: Directory) -> Loaded:
    """Put every durable object into the directory, as far as its bound allows.

    Raises one of STORE_FAILURES when Postgres is away; then some objects may have been restored already.
    """
    async with engine.connect() as connection:
        # One snapshot: cursors and objects must be of the same moment.
        await connection.execution_options(isolation_level="REPEATABLE READ")
        loaded = Loaded(await _cursors(connection), await written_position(connection))
        await connection.execute(JOIN_ALL)
        last_fitting = (await connection.execute(CUT, {"max_blocks": directory.max_blocks})).scalars().all()
        cut_s = last_fitting[0] if len(last_fitting) > 1 else 0
        if cut_s:
            directory.cut()
        places = {
            row.place_id: Place(Level(row.level), row.instance_id)
            for row in await connection.execute(select(tables.places))
        }
        rows = _RowStream(await _namespaces(connection), places, directory)
        driver = (await connection.get_raw_connection()).driver_connection
        assert driver is not None
        # Not as a parameter: with one the driver asks the server first, with the short deadline of other commands.
        query = ROWS.format(cut_s=int(cut_s))
        await driver.copy_from_query(query, output=rows.feed, format="binary", timeout=LOAD_S)
    return loaded


class SharedReader:
    """Finds single blocks on the shared level. Raises one of STORE_FAILURES."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._namespaces: dict[int, Namespace] = {}
        self._namespace_ids: dict[Namespace, int] = {}

    async def find(self, asks: Sequence[tuple[Namespace, Sequence[bytes]]], now_s: int) -> list[tuple[ObjectKey, int]]:
        """Their objects, with the expiry of the block, which is later than ``now_s``. Of a prompt whose first block is
        not there nothing is looked for."""
        async with self._engine.connect() as connection:
            if any(namespace not in self._namespace_ids for namespace, _ in asks):
                self._namespaces = await _namespaces(connection)
                self._namespace_ids = {namespace: number for number, namespace in self._namespaces.items()}
            rows = [
                (number, self._namespace_ids[namespace], block_hash, position == 0)
                for number, (namespace, hashes) in enumerate(asks)
                if namespace in self._namespace_ids
                for position, block_hash in enumerate(hashes)
            ]
            if not rows:
                return []
            columns = [list(column) for column in zip(*rows, strict=True)]
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            # Straight to the driver: what lies between costs as much as the question.
            found = await driver.fetch(FIND, *columns, SHARED.level.value, now_s, timeout=FIND_S)
        return [
            (ObjectKey(self._namespaces[namespace_id], block_hash, Part(kv_rank, group_id)), expires_at_s)
            for namespace_id, block_hash, kv_rank, group_id, expires_at_s in found
        ]


async def _cursors(connection: AsyncConnection) -> dict[str, Cursor]:
    return {
        row.instance_id: Cursor(row.incarnation, row.seq) for row in await connection.execute(select(tables.cursors))
    }


async def _namespaces(connection: AsyncConnection) -> dict[int, Namespace]:
    return {
        row.namespace_id: Namespace(row.pool, row.cache_salt)
        for row in await connection.execute(select(tables.namespaces))
    }


class _RowStream:
    """Receives the pieces of a COPY, which end anywhere, and restores the rows they make."""

    def __init__(self, namespaces: Mapping[int, Namespace], places: Mapping[int, Place], directory: Directory) -> None:
        self._namespaces = namespaces
        self._places = places
        self._directory = directory
        self._rest = b""
        self._is_past_header = False

    async def feed(self, piece: bytes) -> None:
        piece = self._rest + piece
        if not self._is_past_header:
            if len(piece) < _HEADER_BYTES:
                self._rest = piece
                return
            piece = piece[_HEADER_BYTES:]
            self._is_past_header = True
        whole = len(piece) - len(piece) % _ROW.size
        self._rest = piece[whole:]  # at the end only the trailer, which is shorter than a row
        rows = memoryview(piece)[:whole]
        step = STEP_ROWS * _ROW.size
        for begin in range(0, whole, step):
            self._restore(rows[begin : begin + step])
            await asyncio.sleep(0)

    def _restore(self, rows: memoryview) -> None:
        alike: dict[bytes, list[SplitBlock]] = defaultdict(list)
        for common, first_byte, rest, expires_at_s in _ROW.iter_unpack(rows):
            alike[common].append((first_byte, rest, expires_at_s))
        for common, blocks in alike.items():
            namespace_id, place_id, kv_rank, group_id, size_bytes = _COMMON.unpack(common)
            self._directory.restore(
                self._namespaces[namespace_id], self._places[place_id], Part(kv_rank, group_id), size_bytes, blocks
            )
