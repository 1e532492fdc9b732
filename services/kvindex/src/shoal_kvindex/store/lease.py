"""The lease as a row in Postgres: compare, and swap; and the fence that every write of the holder passes.

A write takes the row FOR KEY SHARE: whoever takes the lease over waits for the commit, the holder's own beats do not.
A holder that is stopped in the middle of a write would keep the row for ever, so its session is ended by Postgres
after ``IDLE_WRITE_S``. docs/decisions/0008-kvindex-scales.md
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_kvindex.ingest.shared_log import LogPosition
from shoal_kvindex.lease import LeaseRow
from shoal_kvindex.store.engine import STORE_FAILURES

IDLE_WRITE_S = 3

COLUMNS = "holder, term, beat, log_id, written_seq"
READ = text(f"SELECT {COLUMNS} FROM kvindex.lease WHERE name = 'directory'")
BEAT = text(f"""
    UPDATE kvindex.lease SET beat = beat + 1 WHERE name = 'directory' AND holder = :holder AND term = :term
    RETURNING {COLUMNS}
""")
TAKE = text(f"""
    UPDATE kvindex.lease SET holder = :holder, term = term + 1, beat = beat + 1
    WHERE name = 'directory' AND term = :term AND beat = :beat
    RETURNING {COLUMNS}
""")
GIVE_BACK = text("""
    UPDATE kvindex.lease SET holder = '', beat = beat + 1
    WHERE name = 'directory' AND holder = :holder AND term = :term
""")
BOUND_WRITE = text(f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_WRITE_S}s'")
FENCE = text("""
    SELECT term FROM kvindex.lease WHERE name = 'directory' AND holder = :holder AND term = :term FOR KEY SHARE
""")
WRITTEN = text("UPDATE kvindex.lease SET log_id = :log_id, written_seq = :seq WHERE name = 'directory'")


class Fenced(Exception):
    """Somebody else has the lease: nothing of this transaction may be written."""


class PostgresLeaseStore:
    """Implements ``shoal_kvindex.lease.LeaseStore``, on an engine of its own: a beat waits for nobody."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def read(self) -> LeaseRow:
        row = await self._ask(READ, {})
        if row is None:
            raise Unavailable(pb.UNAVAILABLE, "the lease is not there")
        return row

    async def beat(self, holder: str, term: int) -> LeaseRow | None:
        return await self._ask(BEAT, {"holder": holder, "term": term})

    async def take(self, seen: LeaseRow, holder: str) -> LeaseRow | None:
        return await self._ask(TAKE, {"holder": holder, "term": seen.term, "beat": seen.beat})

    async def give_back(self, holder: str, term: int) -> None:
        try:
            async with self._engine.begin() as connection:
                await connection.execute(GIVE_BACK, {"holder": holder, "term": term})
        except STORE_FAILURES as failure:
            raise _away(failure) from failure

    async def _ask(self, question: TextClause, values: Mapping[str, Any]) -> LeaseRow | None:
        try:
            async with self._engine.begin() as connection:
                row = (await connection.execute(question, values)).one_or_none()
        except STORE_FAILURES as failure:
            raise _away(failure) from failure
        return None if row is None else to_row(row)


def to_row(row: Row[Any]) -> LeaseRow:
    return LeaseRow(row.holder, row.term, row.beat, to_position(row))


def to_position(row: Row[Any]) -> LogPosition | None:
    return LogPosition(row.log_id, row.written_seq) if row.log_id else None


async def written_position(connection: AsyncConnection) -> LogPosition | None:
    """Up to which change all is durable, as this connection's transaction sees it."""
    row = (await connection.execute(READ)).one_or_none()
    return None if row is None else to_position(row)


async def check_fence(connection: AsyncConnection, holder: str, term: int) -> None:
    """To be called first in every transaction that writes. Fenced when the lease is not this holder's."""
    await connection.execute(BOUND_WRITE)
    if (await connection.execute(FENCE, {"holder": holder, "term": term})).one_or_none() is None:
        raise Fenced(f"term {term} is over")


async def note_written(connection: AsyncConnection, position: LogPosition) -> None:
    """Everything up to here is durable with this transaction. To be called last: beats wait from here on."""
    await connection.execute(WRITTEN, {"log_id": position.log_id, "seq": position.seq})


def _away(failure: BaseException) -> Unavailable:
    return Unavailable(pb.UNAVAILABLE, f"Postgres is away ({type(failure).__name__})")
