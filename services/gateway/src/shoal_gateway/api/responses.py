"""/v1/responses/{id}: what was stored is read, listed, cancelled and deleted.

Only a response in the background can be cancelled: any other ends with the connection that asked for it. What nobody
generates any more, because its gateway died, is told as lost, at the latest when its time is over.
docs/decisions/0033-stored-responses.md
"""

import json
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from shoal_contracts.errors import BadRequest, Unavailable
from shoal_contracts.ids import new_request_id
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.api.query import read_limit
from shoal_gateway.ports import ResponseStore
from shoal_gateway.request import ONE_TENANT, StoredResponse
from shoal_gateway.store.items import list_items
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

CANCEL_WAIT_S = 5.0
CANCEL_LOOK_EACH_S = 0.05
ITEMS = 20
MAX_ITEMS = 100


class Cancels(Protocol):
    """``links.cancels.ResponseCancels``."""

    async def cancel(self, tenant: str, response_id: str) -> None: ...


class StoredResponses:
    """Starlette endpoints; an error that they raise is told by the application."""

    def __init__(self, store: ResponseStore, cancels: Cancels, clock: Clock) -> None:
        self._store = store
        self._cancels = cancels
        self._clock = clock

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") not in ("false", "0", ""):
            raise BadRequest(
                pb.UNSUPPORTED,
                "The events of a stored response cannot be read again: ask without 'stream' until it has ended.",
                param="stream",
            )
        response_id = request.path_params["id"]
        return _respond((await self._find(response_id)).body)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        deleted = await self._store.delete(ONE_TENANT, response_id)
        if deleted is None:
            raise _not_found(response_id)
        if deleted.is_running:
            try:
                await self._cancels.cancel(ONE_TENANT, response_id)
            except Unavailable:  # it ends by itself, and finds no row to write to
                log.warning("response.cancel_lost", response_id=response_id)
        return _respond(json.dumps({"id": response_id, "object": "response", "deleted": True}).encode())

    async def cancel(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        found = await self._find(response_id)
        if not found.is_background:
            raise BadRequest(pb.INVALID_REQUEST, "Only a response with 'background' true can be cancelled.")
        if found.is_running:
            await self._cancels.cancel(ONE_TENANT, response_id)
            found = await self._await_end(response_id)
        return _respond(found.body)

    async def input_items(self, request: Request) -> Response:
        response_id, query = request.path_params["id"], request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest(pb.INVALID_REQUEST, "'order' must be 'asc' or 'desc'.", param="order")
        limit = read_limit(query.get("limit"), ITEMS, MAX_ITEMS)
        items = await self._store.input_items(ONE_TENANT, response_id)
        if items is None:
            raise _not_found(response_id)
        return _respond(list_items(items, is_newest_first=order == "desc", after=query.get("after"), limit=limit))

    async def _find(self, response_id: str) -> StoredResponse:
        found = await self._store.find(ONE_TENANT, response_id)
        if found is None:
            raise _not_found(response_id)
        return found

    async def _await_end(self, response_id: str) -> StoredResponse:
        until_s = self._clock.monotonic() + CANCEL_WAIT_S
        while (found := await self._find(response_id)).is_running:
            if self._clock.monotonic() >= until_s:
                raise Unavailable(
                    pb.PEER_SILENT,
                    "the gateway that generates this response does not answer; the response ends with its time",
                    retry_after_s=CANCEL_WAIT_S,
                )
            await self._clock.sleep(CANCEL_LOOK_EACH_S)
        return found


def _not_found(response_id: str) -> BadRequest:
    return BadRequest(pb.NOT_FOUND, f"Response with id '{response_id}' not found.")


def _respond(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"x-request-id": new_request_id()})
