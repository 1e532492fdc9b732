"""The HTTP side of a simulated store, in the protocol of an ``lmcache server``: list, delete, prefetch.

It is there before the store registers at kvindex and goes after it has signed off. Deletes are reported as any other
event; there are no locks, so nothing is ever skipped. One suite holds this and the real server to the same answers
(testkit/suites/store_http.py). ``chunk`` is the protocol's word for a block.
"""

import asyncio
import uuid
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shoal_contracts.ids import pack_u32
from shoal_engine.scripted.reporter import BACKENDS, HOST, StoreReporter, wire_object
from shoal_engine.scripted.store import KV_RANK, OBJECT_GROUP, BlockKey, BlockStore, Level, StoredObject
from shoal_kvblocks import block_hashes, split_hashes
from shoal_runtime.http import serve_on

MAX_DELETED_KEYS = 10_000
MAX_PREFETCH_TOKENS = 1_000_000
MAX_PREFETCHES = 1024  # of those that nobody asked about again, the oldest are forgotten
LEVELS: dict[str, tuple[Level, ...]] = {"l1": ("l1",), "l2": ("l2",), "all": ("l1", "l2")}

Tier = Literal["l1", "l2", "all"]


class _Refused(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _WireKey(msgspec.Struct, kw_only=True):
    block_hash_hex: str = msgspec.field(name="chunk_hash_hex")
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class _Delete(msgspec.Struct):
    """Body of DELETE /cache/objects."""

    keys: list[_WireKey]
    tier: Tier = "l2"
    force: bool = False
    adapter: str | None = None


class _Prefetch(msgspec.Struct):
    """Body of POST /cache/prefetches."""

    model_name: str
    world_size: int
    token_ids: list[int]
    cache_salt: str = ""


class _Listing(msgspec.Struct):
    """Query of GET /cache/objects."""

    tier: Tier = "l2"
    adapter: str | None = None
    model_name: str | None = None
    page_size: Annotated[int, Meta(ge=1, le=5000)] = 500
    page_token: str | None = None


@dataclass(frozen=True, slots=True)
class ServedPool:
    """Whose blocks a prefetch can name by token ids."""

    pool: str
    block_tokens: int


class StoreServer:
    """One for each store, run by its engine. ``prefetch`` brings blocks into L1 and tells how many it has then."""

    def __init__(
        self,
        store: BlockStore,
        served: ServedPool,
        prefetch: Callable[[Sequence[BlockKey]], Awaitable[int]],
        reporter: StoreReporter | None = None,
        port: int = 0,
    ) -> None:
        self.port = port  # the real one after ``start``
        self._store = store
        self._served = served
        self._prefetch = prefetch
        self._reporter = reporter
        self._prefetches: dict[str, tuple[asyncio.Task[int], int]] = {}
        self._stack = AsyncExitStack()

    @property
    def instance_id(self) -> str:
        """Its name at kvindex; empty when it does not report."""
        return self._reporter.instance_id if self._reporter is not None else ""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        """Listen, then register. OSError when the port is taken."""
        self.port = await serve_on(self._stack, self.app(), HOST, self.port)
        if self._reporter is not None:
            await self._reporter.start(self.port)

    async def stop(self) -> None:
        """Sign off, then close. Idempotent."""
        if self._reporter is not None:
            await self._reporter.stop()
        for task, _ in self._prefetches.values():
            task.cancel()
        self._prefetches.clear()
        await self._stack.aclose()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/healthcheck", _healthy, methods=["GET"]),
                Route("/cache/objects", self._list, methods=["GET"]),
                Route("/cache/objects", self._delete, methods=["DELETE"]),
                Route("/cache/prefetches", self._submit, methods=["POST"]),
                Route("/cache/prefetches/{request_id}", self._poll, methods=["GET"]),
            ],
            exception_handlers={
                _Refused: _refuse,
                msgspec.ValidationError: _invalid,
                msgspec.DecodeError: _invalid,
                RecursionError: _invalid,  # nested too deeply
                ClientDisconnect: _invalid,  # nobody hears it
            },
        )

    async def _list(self, request: Request) -> Response:
        asked = msgspec.convert(dict(request.query_params), _Listing, strict=False)
        if asked.tier == "all":
            raise _Refused(400, "tier 'all' not supported")
        if asked.adapter not in (None, BACKENDS[asked.tier]):
            raise _Refused(404, f"no L2 adapter with type_name={asked.adapter!r}")
        found = [each for each in self._store.objects(asked.tier) if asked.model_name in (None, each.key.pool)]
        first = 0 if asked.page_token is None else bisect_right(found, _cursor(asked.page_token), key=_order)
        page = found[first : first + asked.page_size]
        is_last = first + asked.page_size >= len(found)
        return JSONResponse(
            {
                "adapter": BACKENDS[asked.tier],
                "shared": asked.tier == "l2",
                "entries": [wire_object(each.key, each.size_bytes) for each in page],
                "next_page_token": None if is_last else "@".join(_order(page[-1])),
            }
        )

    async def _delete(self, request: Request) -> Response:
        asked = msgspec.json.decode(await request.body(), type=_Delete)
        if len(asked.keys) > MAX_DELETED_KEYS:
            raise _Refused(400, f"too many keys in a single request (limit={MAX_DELETED_KEYS}, got={len(asked.keys)})")
        keys = [_block_of(place, key) for place, key in enumerate(asked.keys)]
        ours = [key for key in keys if key is not None]
        deleted = 0
        for level in LEVELS[asked.tier]:
            removed = self._store.delete(ours, level)
            # Of L2 the real server counts what was asked for, of L1 what was there.
            deleted += len(keys) if level == "l2" else removed
        return JSONResponse({"deleted": deleted, "skipped": 0, "ok": True})

    async def _submit(self, request: Request) -> Response:
        asked = msgspec.json.decode(await request.body(), type=_Prefetch)
        if (asked.model_name, asked.world_size) != (self._served.pool, 1):
            raise _Refused(503, f"no layout registered for model_name={asked.model_name!r}")
        if len(asked.token_ids) > MAX_PREFETCH_TOKENS:
            raise _Refused(400, f"too many token_ids in a single request (limit={MAX_PREFETCH_TOKENS})")
        hashes = split_hashes(block_hashes(pack_u32(asked.token_ids), self._served.block_tokens))
        if not hashes:
            return JSONResponse({"chunks": 0, "status": "noop"}, 202)
        keys = [BlockKey(asked.model_name, block_hash, asked.cache_salt) for block_hash in hashes]
        request_id = uuid.uuid4().hex
        task = asyncio.ensure_future(self._prefetch(keys))
        self._prefetches[request_id] = (task, len(keys))
        while len(self._prefetches) > MAX_PREFETCHES:
            self._prefetches.pop(next(iter(self._prefetches)))[0].cancel()
        return JSONResponse({"request_id": request_id, "chunks": len(keys), "status": "submitted"}, 202)

    async def _poll(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        if request_id not in self._prefetches:
            raise _Refused(404, f"unknown prefetch request_id={request_id!r} (already completed or never submitted)")
        task, total = self._prefetches[request_id]
        if not task.done():
            return JSONResponse({"request_id": request_id, "status": "pending"})
        del self._prefetches[request_id]
        found = {"found_keys": task.result(), "total_keys": total}
        return JSONResponse({"request_id": request_id, "status": "completed", **found})


def _order(each: StoredObject) -> tuple[str, str, str]:
    return each.key.block_hash.hex(), each.key.pool, each.key.cache_salt


def _cursor(token: str) -> tuple[str, str, str]:
    parts = token.split("@")
    if len(parts) != 3:
        raise _Refused(400, "malformed page_token")
    return parts[0], parts[1], parts[2]


def _block_of(place: int, key: _WireKey) -> BlockKey | None:
    """None: an object that this store never has."""
    try:
        block_hash = bytes.fromhex(key.block_hash_hex)
    except ValueError as error:
        raise _Refused(400, f"keys[{place}]: {error}") from error
    if (key.kv_rank, key.object_group_id) != (KV_RANK, OBJECT_GROUP):
        return None
    return BlockKey(key.model_name, block_hash, key.cache_salt)


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "healthy"})


def _refuse(request: Request, error: Any) -> Response:
    return JSONResponse({"detail": str(error)}, error.status)


def _invalid(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 422)
