"""Asks lmcache servers over their own HTTP interface what they hold, and to delete it.

LMCache's protocol: GET and DELETE /cache/objects. Pages and batches are bounded, every call has a deadline, and
``force`` is never set: deleting what an engine is loading was seen to fail its request. A delete that the server says
it did may have found nothing: then no report of it will come. Nothing is tried again here.
docs/decisions/0007-the-store-tells-the-truth.md
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import httpx
import msgspec

from shoal_kvindex.coordinator_api import KeyReader, WireEntry, WireKey
from shoal_kvindex.ingest.instances import Address
from shoal_kvindex.names import Level, ObjectKey
from shoal_kvindex.ports import ListedPage, StoreFailed, StoreTrouble

PAGE_OBJECTS = 5_000  # the most that a server gives
DELETE_OBJECTS = 10_000  # and the most that it takes
MAX_ANSWER_BYTES = 32 << 20
LIST_S = 30.0
DELETE_S = 40.0  # the server gives up on its own after 30 s

TIERS = {Level.L1: "l1", Level.L2: "l2"}  # their word for a level


class Stores(Protocol):
    """Who is registered."""

    def addresses(self) -> Mapping[str, Address]: ...


class _Page(msgspec.Struct):
    entries: list[WireEntry]
    next_page_token: str | None = None
    shared: bool = False


class _DeleteBody(msgspec.Struct):
    keys: list[WireKey]
    tier: str
    force: bool = False


class _Deleted(msgspec.Struct):
    ok: bool
    skipped: int = 0
    error: str = ""


_decode_page = msgspec.json.Decoder(_Page).decode
_decode_deleted = msgspec.json.Decoder(_Deleted).decode


class HttpStoreClient:
    """Implements ``ports.StoreClient``. Owns its connections until ``close``; on one event loop."""

    def __init__(self, stores: Stores, http: httpx.AsyncClient | None = None) -> None:
        self._stores = stores
        self._http = http or httpx.AsyncClient(timeout=None, trust_env=False)  # the deadline is that of the whole call
        self._answered_last = ""

    async def close(self) -> None:
        await self._http.aclose()

    def stores(self) -> Sequence[str]:
        return sorted(self._stores.addresses(), key=lambda name: (name != self._answered_last, name))

    async def list_page(self, instance_id: str, level: Level, token: str | None) -> ListedPage:
        query = {"tier": TIERS[level], "page_size": str(PAGE_OBJECTS)} | ({"page_token": token} if token else {})
        url = self._url(instance_id).copy_with(params=query)
        status, body = await self._call(instance_id, httpx.Request("GET", url), LIST_S)
        if status == 503 or 400 <= status < 500:
            raise StoreFailed(StoreTrouble.CANNOT_LIST, instance_id, f"cannot list its {level.name} objects ({status})")
        self._check(instance_id, status)
        try:
            page = _decode_page(body)
            objects = _to_objects(page.entries)
        except (msgspec.DecodeError, ValueError) as error:
            raise _strange(instance_id, error) from error
        if level is Level.L2 and not page.shared:
            raise StoreFailed(StoreTrouble.CANNOT_LIST, instance_id, "does not declare its L2 shared")
        self._answered_last = instance_id
        return ListedPage(objects, page.next_page_token)

    async def delete(self, instance_id: str, level: Level, keys: Sequence[ObjectKey]) -> int:
        if len(keys) > DELETE_OBJECTS:
            raise ValueError(f"a store deletes {DELETE_OBJECTS} objects at a time, not {len(keys)}")
        body = msgspec.json.encode(_DeleteBody([_to_wire(key) for key in keys], TIERS[level]))
        headers = {"content-type": "application/json"}
        request = httpx.Request("DELETE", self._url(instance_id), content=body, headers=headers)
        status, answer = await self._call(instance_id, request, DELETE_S)
        self._check(instance_id, status)
        try:
            deleted = _decode_deleted(answer)
        except msgspec.DecodeError as error:
            raise _strange(instance_id, error) from error
        if not deleted.ok:
            raise StoreFailed(StoreTrouble.REFUSED, instance_id, f"could not delete: {deleted.error[:200]}")
        self._answered_last = instance_id
        return deleted.skipped

    def _url(self, instance_id: str) -> httpx.URL:
        address = self._stores.addresses().get(instance_id)
        if address is None:
            raise StoreFailed(StoreTrouble.AWAY, instance_id, "is not registered any more")
        try:
            return httpx.URL(scheme="http", host=address.host, port=address.http_port, path="/cache/objects")
        except httpx.InvalidURL as error:
            raise StoreFailed(StoreTrouble.AWAY, instance_id, "registered with an address that is none") from error

    async def _call(self, instance_id: str, request: httpx.Request, deadline_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(deadline_s), aclosing(await self._http.send(request, stream=True)) as response:
                return response.status_code, await _read_body(instance_id, response)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            reason = f"did not answer ({type(error).__name__})"
            raise StoreFailed(StoreTrouble.AWAY, instance_id, reason) from error

    @staticmethod
    def _check(instance_id: str, status: int) -> None:
        if status >= 500:
            raise StoreFailed(StoreTrouble.AWAY, instance_id, f"answered {status}")
        if status != 200:
            raise StoreFailed(StoreTrouble.REFUSED, instance_id, f"answered {status}")


async def _read_body(instance_id: str, response: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise StoreFailed(StoreTrouble.REFUSED, instance_id, f"answered with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _strange(instance_id: str, error: Exception) -> StoreFailed:
    return StoreFailed(StoreTrouble.REFUSED, instance_id, f"answered in another form: {error}")


def _to_objects(entries: Sequence[WireEntry]) -> list[tuple[ObjectKey, int]]:
    """ValueError for a hash that is not hexadecimal."""
    keys = KeyReader()
    return [(keys.read(entry.key), entry.size_bytes) for entry in entries]


def _to_wire(key: ObjectKey) -> WireKey:
    namespace, part = key.namespace, key.part
    return WireKey(key.block_hash.hex(), namespace.pool, part.kv_rank, part.object_group_id, namespace.cache_salt)
