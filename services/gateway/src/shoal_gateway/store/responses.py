"""Responses in Postgres; see ``ports.ResponseStore``.

A row without a deadline is done. One with a deadline is generated somewhere, and counts as lost from then on: whoever
had it is gone. Expired rows are not there for anybody, before the sweep takes them.
docs/decisions/0033-stored-responses.md
"""

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_contracts.errors import BadRequest, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.request import Storage, StoredResponse
from shoal_gateway.store.items import join_items, output_items
from shoal_runtime.logs import get_logger
from shoal_runtime.postgres import STORE_FAILURES

log = get_logger(__name__)

RETRY_AFTER_S = 5.0
MAX_TURNS = 4096
MAX_HISTORY_BYTES = 8_000_000  # with a body of the same size it fits into one message to the tokenizer
SWEEP_ROWS = 500
SWEEP_LOCK = 0x5_0A1_53E9
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

_THERE = "tenant = :tenant AND id = :id AND expires_at > now()"
_IS_LOST = "(deadline_at IS NOT NULL AND deadline_at <= now())"
_TOLD = f"CASE WHEN {_IS_LOST} THEN lost_body ELSE body END AS body, deadline_at > now() AS is_running, is_background"

FIND = text(f"SELECT {_TOLD} FROM gateway.responses WHERE {_THERE}")
INPUT_ITEMS = text(f"SELECT input_items FROM gateway.responses WHERE {_THERE}")
DELETE = text(f"DELETE FROM gateway.responses WHERE {_THERE} RETURNING {_TOLD}")
PUT = text("""
    INSERT INTO gateway.responses (tenant, id, previous_response_id, created_at, expires_at, is_background, deadline_at,
                                   lost_body, input_items, output_items, body, items_bytes)
    VALUES (:tenant, :id, :previous_id, now(), now() + :retention, :is_background,
            now() + CAST(:budget AS interval), :lost_body, :input_items, :output_items, :body, :items_bytes)
    ON CONFLICT DO NOTHING
""")
FINISH = text("""
    UPDATE gateway.responses
    SET body = :body, output_items = :output_items, items_bytes = octet_length(input_items) + :output_bytes,
        deadline_at = NULL, lost_body = NULL
    WHERE tenant = :tenant AND id = :id AND deadline_at > now()
""")
# From the newest on, so that what is too long ends where the bound is reached.
CHAIN = text(f"""
    WITH RECURSIVE chain AS (
        SELECT id, previous_response_id, 1 AS turn, CAST(items_bytes AS bigint) AS bytes
        FROM gateway.responses WHERE {_THERE}
        UNION ALL
        SELECT r.id, r.previous_response_id, c.turn + 1, c.bytes + r.items_bytes
        FROM chain c JOIN gateway.responses r ON r.tenant = :tenant AND r.id = c.previous_response_id
        WHERE r.expires_at > now() AND c.turn < :max_turns AND c.bytes <= :max_bytes
    )
    SELECT r.previous_response_id, c.bytes, r.input_items, r.output_items, r.deadline_at > now() AS is_running
    FROM chain c JOIN gateway.responses r ON r.tenant = :tenant AND r.id = c.id ORDER BY c.turn DESC
""")
SWEEP = text("""
    DELETE FROM gateway.responses WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM gateway.responses WHERE expires_at <= now() ORDER BY expires_at LIMIT :rows))
""")


class PostgresResponses:
    """Implements ``ports.ResponseStore``. ``is_ready`` is the watch's to set; a statement that fails takes it back."""

    def __init__(self, engine: AsyncEngine, retention: timedelta) -> None:
        self._engine = engine
        self._retention = retention
        self.is_ready = False

    @property
    def is_away(self) -> bool:
        return not self.is_ready

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        return _first(await self._ask(FIND, {"tenant": tenant, "id": response_id}))

    async def input_items(self, tenant: str, response_id: str) -> bytes | None:
        rows = await self._ask(INPUT_ITEMS, {"tenant": tenant, "id": response_id})
        return bytes(rows[0].input_items) if rows else None

    async def delete(self, tenant: str, response_id: str) -> StoredResponse | None:
        return _first(await self._ask(DELETE, {"tenant": tenant, "id": response_id}))

    async def put_running(self, tenant: str, storage: Storage, budget_s: float) -> None:
        values = self._values(tenant, storage, storage.pending_body)
        await self._run(PUT, values | {"budget": timedelta(seconds=budget_s), "lost_body": storage.lost_body})

    async def finish(self, tenant: str, response_id: str, body: bytes) -> None:
        output = output_items(body)
        values = {"body": body, "output_items": output, "output_bytes": len(output)}
        await self._run(FINISH, {"tenant": tenant, "id": response_id, **values})

    async def put_done(self, tenant: str, storage: Storage, body: bytes) -> None:
        await self._run(PUT, self._values(tenant, storage, body) | {"budget": None, "lost_body": None})

    async def history(self, tenant: str, response_id: str) -> bytes:
        bounds = {"max_turns": MAX_TURNS, "max_bytes": MAX_HISTORY_BYTES}
        rows = await self._ask(CHAIN, {"tenant": tenant, "id": response_id, **bounds})
        if not rows:
            raise _not_found(response_id)
        if any(row.is_running for row in rows):
            raise BadRequest(
                pb.INVALID_REQUEST,
                f"The response '{response_id}' is still generated; wait until it has ended.",
                param="previous_response_id",
            )
        oldest = rows[0]
        if len(rows) >= MAX_TURNS or oldest.bytes > MAX_HISTORY_BYTES:
            raise BadRequest(
                pb.REQUEST_TOO_LARGE,
                "The conversation before this response is too long to go on with: send the part that matters as input.",
                param="previous_response_id",
            )
        if oldest.previous_response_id is not None:
            raise _not_found(oldest.previous_response_id)
        return join_items(array for row in rows for array in (row.input_items, row.output_items))

    async def sweep(self) -> int:
        """Delete some expired rows, where no other gateway does so now; how many."""
        async with self._engine.begin() as connection:
            question = text("SELECT pg_try_advisory_xact_lock(:key)")
            if not (await connection.execute(question, {"key": SWEEP_LOCK})).scalar_one():
                return 0
            return (await connection.execute(SWEEP, {"rows": SWEEP_ROWS})).rowcount

    def _values(self, tenant: str, storage: Storage, body: bytes) -> dict[str, Any]:
        output = output_items(body)
        return {
            "tenant": tenant,
            "id": storage.response_id,
            "previous_id": storage.previous_response_id,
            "retention": self._retention,
            "is_background": storage.is_background,
            "input_items": storage.input_items,
            "output_items": output,
            "body": body,
            "items_bytes": len(storage.input_items) + len(output),
        }

    async def _ask(self, question: TextClause, values: Mapping[str, Any]) -> Sequence[Row[Any]]:
        if not _ID.fullmatch(values["id"]):
            return []  # we never make such ids, and Postgres does not take every letter
        return await self._run(question, values)

    async def _run(self, statement: TextClause, values: Mapping[str, Any]) -> Sequence[Row[Any]]:
        if not self.is_ready:
            raise _away()
        try:
            async with self._engine.begin() as connection:
                result = await connection.execute(statement, values)
                return result.all() if result.returns_rows else []
        except STORE_FAILURES as failure:
            self.is_ready = False
            log.warning("responses.store_failed", reason=type(failure).__name__)
            raise _away() from failure


def _first(rows: Sequence[Row[Any]]) -> StoredResponse | None:
    if not rows:
        return None
    row = rows[0]
    return StoredResponse(bytes(row.body), bool(row.is_running), row.is_background)


def _not_found(response_id: str) -> BadRequest:
    return BadRequest(
        pb.NOT_FOUND, f"Previous response with id '{response_id}' not found.", param="previous_response_id"
    )


def _away() -> Unavailable:
    return Unavailable(pb.UNAVAILABLE, "stored responses cannot be reached now; try again", retry_after_s=RETRY_AFTER_S)
