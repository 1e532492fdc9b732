"""LMCache's HTTP interface as it answers, fails, and answers strangely."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from shoal_kvindex.ingest.instances import Address
from shoal_kvindex.names import Level, Namespace, ObjectKey, Part
from shoal_kvindex.ports import StoreFailed, StoreTrouble
from shoal_kvindex.store_client import DELETE_OBJECTS, MAX_ANSWER_BYTES, HttpStoreClient

KEY = ObjectKey(Namespace("pool", "tenant"), bytes(range(32)), Part(0x01000100, 1))
WIRE = {
    "chunk_hash_hex": bytes(range(32)).hex(),
    "model_name": "pool",
    "kv_rank": 0x01000100,
    "object_group_id": 1,
    "cache_salt": "tenant",
}
PAGE = {"adapter": "plugin", "shared": True, "entries": [{"key": WIRE, "size_bytes": 7}], "next_page_token": "t"}

Answer = Callable[[httpx.Request], httpx.Response]


class Registered:
    """Two servers."""

    def addresses(self) -> Mapping[str, Address]:
        return {"node-a": Address("127.0.0.1", 8080), "node-b": Address("::1", 8081)}


def client(answer: Answer) -> HttpStoreClient:
    return HttpStoreClient(Registered(), httpx.AsyncClient(transport=httpx.MockTransport(answer)))


def always(status: int, body: Any) -> Answer:
    return lambda _: httpx.Response(status, json=body)


async def test_a_page_has_full_names_sizes_and_the_next_token() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=PAGE)

    page = await client(answer).list_page("node-a", Level.L2, "token of before")
    assert (page.objects, page.next_token) == ([(KEY, 7)], "t")
    assert str(asked[0].url).startswith("http://127.0.0.1:8080/cache/objects?")
    assert dict(asked[0].url.params) == {"tier": "l2", "page_size": "5000", "page_token": "token of before"}


async def test_dram_needs_not_be_shared_and_the_last_page_has_no_token() -> None:
    page = await client(always(200, PAGE | {"shared": False, "next_page_token": None})).list_page(
        "node-b", Level.L1, None
    )
    assert page.next_token is None


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (always(503, {"detail": "L2 adapter 'fs' does not support listing"}), StoreTrouble.CANNOT_LIST),
        (always(400, {"detail": "tier 'l1' not supported"}), StoreTrouble.CANNOT_LIST),
        (always(404, {"detail": "Not Found"}), StoreTrouble.CANNOT_LIST),
        (always(200, PAGE | {"shared": False}), StoreTrouble.CANNOT_LIST),
        (always(500, {}), StoreTrouble.AWAY),
        (always(200, []), StoreTrouble.REFUSED),
        (always(200, PAGE | {"entries": [{"key": WIRE | {"kv_rank": "x"}}]}), StoreTrouble.REFUSED),
        (always(200, PAGE | {"entries": [{"key": WIRE | {"chunk_hash_hex": "z" * 64}}]}), StoreTrouble.REFUSED),
        (lambda _: httpx.Response(200, content=bytes(MAX_ANSWER_BYTES + 1)), StoreTrouble.REFUSED),
    ],
)
async def test_what_goes_wrong_with_a_listing_has_a_type(answer: Answer, trouble: StoreTrouble) -> None:
    with pytest.raises(StoreFailed, match="store node-a") as failed:
        await client(answer).list_page("node-a", Level.L2, None)
    assert failed.value.trouble is trouble


async def test_a_server_that_is_not_there_is_away() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    for ask in (
        client(refuse).list_page("node-a", Level.L2, None),
        client(refuse).delete("node-a", Level.L2, [KEY]),
        client(always(200, PAGE)).list_page("node-z", Level.L2, None),
    ):
        with pytest.raises(StoreFailed) as failed:
            await ask
        assert failed.value.trouble is StoreTrouble.AWAY


async def test_a_server_that_hangs_is_away_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_kvindex.store_client.LIST_S", 0.01)

    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    hanging = HttpStoreClient(Registered(), httpx.AsyncClient(transport=httpx.MockTransport(hang)))
    with pytest.raises(StoreFailed, match="did not answer") as failed:
        await hanging.list_page("node-a", Level.L2, None)
    assert failed.value.trouble is StoreTrouble.AWAY


async def test_a_delete_names_its_objects_and_is_never_forced() -> None:
    bodies: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"deleted": 1, "skipped": 2, "ok": True})

    assert await client(answer).delete("node-a", Level.L1, [KEY]) == 2
    assert bodies == [{"keys": [WIRE], "tier": "l1", "force": False}]


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (always(200, {"deleted": 0, "skipped": 0, "ok": False, "error": "disk"}), StoreTrouble.REFUSED),
        (always(400, {"detail": "too many keys"}), StoreTrouble.REFUSED),
        (always(503, {"detail": "not initialized"}), StoreTrouble.AWAY),
        (always(200, {"deleted": 1}), StoreTrouble.REFUSED),
    ],
)
async def test_what_goes_wrong_with_a_delete_has_a_type(answer: Answer, trouble: StoreTrouble) -> None:
    with pytest.raises(StoreFailed) as failed:
        await client(answer).delete("node-a", Level.L2, [KEY])
    assert failed.value.trouble is trouble


async def test_a_delete_is_bounded() -> None:
    with pytest.raises(ValueError, match="10000"):
        await client(always(200, {})).delete("node-a", Level.L2, [KEY] * (DELETE_OBJECTS + 1))


async def test_the_server_that_answered_last_is_asked_first() -> None:
    asking = client(always(200, PAGE))
    assert asking.stores() == ["node-a", "node-b"]
    await asking.list_page("node-b", Level.L2, None)
    assert asking.stores() == ["node-b", "node-a"]
