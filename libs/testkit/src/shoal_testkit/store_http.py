"""Asks a store's HTTP side, as kvindex and engines do: list, delete, prefetch. Real and scripted stores alike."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx

CALL_S = 30.0
WIRE_HASH = "chunk_hash_hex"  # the protocol's word for a block


@dataclass(frozen=True, slots=True, order=True)
class ObjectName:
    """The store's full name of one object; block hash first, so that sorting is the order of a listing."""

    block_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str

    @classmethod
    def of_wire(cls, key: dict[str, Any]) -> "ObjectName":
        fields = dict(key)
        return cls(block_hash_hex=fields.pop(WIRE_HASH), **fields)

    def to_wire(self) -> dict[str, Any]:
        fields = asdict(self)
        return {WIRE_HASH: fields.pop("block_hash_hex"), **fields}


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """One answer to a listing."""

    adapter: str
    is_shared: bool
    sizes: dict[ObjectName, int]
    next_page_token: str | None


class StoreHttp:
    """Made by ``store_http``."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def page(self, tier: str, page_size: int = 5000, page_token: str | None = None, **query: str) -> ObjectPage:
        asked: dict[str, str | int] = {"tier": tier, "page_size": page_size, **query}
        if page_token is not None:
            asked["page_token"] = page_token
        reply = await self.http.get("/cache/objects", params=asked)
        reply.raise_for_status()
        body = reply.json()
        sizes = {ObjectName.of_wire(entry["key"]): entry["size_bytes"] for entry in body["entries"]}
        return ObjectPage(body["adapter"], body["shared"], sizes, body["next_page_token"])

    async def objects(self, tier: str, page_size: int = 5000, **query: str) -> list[ObjectName]:
        """All pages, in the order of the answers."""
        page = await self.page(tier, page_size, **query)
        found = list(page.sizes)
        while page.next_page_token is not None:
            page = await self.page(tier, page_size, page.next_page_token, **query)
            found += page.sizes
        return found

    async def delete(self, names: Sequence[ObjectName], tier: str) -> dict[str, Any]:
        body = {"keys": [name.to_wire() for name in names], "tier": tier, "force": False}
        reply = await self.http.request("DELETE", "/cache/objects", json=body)
        reply.raise_for_status()
        return dict(reply.json())

    async def prefetch(self, pool: str, token_ids: Sequence[int], cache_salt: str = "") -> dict[str, Any]:
        """Submit, and ask until it is completed."""
        body = {"model_name": pool, "world_size": 1, "token_ids": list(token_ids), "cache_salt": cache_salt}
        reply = await self.http.post("/cache/prefetches", json=body)
        reply.raise_for_status()
        answer = dict(reply.json())
        deadline_s = time.monotonic() + CALL_S
        while answer["status"] not in ("completed", "noop"):
            assert time.monotonic() < deadline_s, "the prefetch never ended"
            await asyncio.sleep(0.01)
            reply = await self.http.get(f"/cache/prefetches/{answer['request_id']}")
            reply.raise_for_status()
            answer = dict(reply.json())
        return answer


@asynccontextmanager
async def store_http(url: str) -> AsyncIterator[StoreHttp]:
    async with httpx.AsyncClient(base_url=url, timeout=CALL_S, trust_env=False) as http:
        yield StoreHttp(http)
