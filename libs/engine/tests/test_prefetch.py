"""The client of the node's store: what it asks, what it makes of the answers, and that it never raises."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from shoal_contracts.ids import pack_u32
from shoal_engine.api import EngineRequest, Item, Prefetched, StateGroup, StateKind
from shoal_engine.vllm import prefetch
from shoal_engine.vllm.prefetch import StorePrefetch
from shoal_kvblocks import block_hashes
from shoal_testkit.clock import VirtualClock, settle


@dataclass
class Store:
    """Answers with what the test put in, in order; the last answer stays."""

    answers: list[httpx.Response | Exception] = field(default_factory=list)
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    clock: VirtualClock = field(default_factory=VirtualClock)
    groups: tuple[StateGroup, ...] = ()
    parts: int = 1

    def __post_init__(self) -> None:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer), base_url="http://store")
        self.prefetch = StorePrefetch("pool", 128, http, self.clock, groups=self.groups, parts=self.parts)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.calls.append((request.method, request.url.path, json.loads(request.content) if request.content else None))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def bring(self, request: EngineRequest) -> Prefetched:
        task = asyncio.create_task(self.prefetch.bring(request))
        await self.clock.advance(1)
        return await task


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store()
    yield store
    await store.prefetch.close()
    await store.prefetch.close()


def submitted() -> httpx.Response:
    return httpx.Response(202, json={"request_id": "p1", "chunks": 2, "status": "submitted"})


def completed(found: int, total: int) -> httpx.Response:
    return httpx.Response(200, json={"status": "completed", "found_keys": found, "total_keys": total})


def a_request(tokens: int = 300, items: tuple[Item, ...] = ()) -> EngineRequest:
    return EngineRequest("r1", range(tokens), cache_salt="tenant", items=items)


async def test_whole_blocks_are_asked_for_until_they_are_there(store: Store) -> None:
    pending = httpx.Response(200, json={"status": "pending"})
    store.answers = [submitted(), pending, pending, completed(2, 2)]
    told = await store.bring(a_request())
    assert told.blocks == 2
    assert told.took_ms >= 20  # two pauses between the polls
    assert store.calls[0] == (
        "POST",
        "/cache/prefetches",
        {"model_name": "pool", "world_size": 1, "token_ids": list(range(256)), "cache_salt": "tenant"},
    )
    assert [call[:2] for call in store.calls[1:]] == [("GET", "/cache/prefetches/p1")] * 3
    assert store.prefetch.failed == 0


async def test_the_block_of_the_last_token_is_left_out(store: Store) -> None:
    store.answers = [submitted(), completed(1, 1)]
    await store.bring(a_request(256))
    assert len(store.calls[0][2]["token_ids"]) == 128


async def test_prompt_without_a_whole_block_asks_nobody(store: Store) -> None:
    assert await store.bring(a_request(128)) == Prefetched()
    assert store.calls == []


async def test_several_objects_a_block_count_as_one(store: Store) -> None:
    store.answers = [submitted(), completed(4, 4)]
    assert (await store.bring(a_request())).blocks == 2


@pytest.mark.parametrize(("found", "blocks"), [(17, 15), (10, 8), (4, 2), (2, 1), (1, 0), (0, 0)])
async def test_of_windows_only_the_last_blocks_are_brought(found: int, blocks: int) -> None:
    groups = (StateGroup(0, StateKind.SLIDING_WINDOW, 256), StateGroup(1, StateKind.FULL))
    store = Store([submitted(), completed(found, 30)], groups=groups)
    assert (await store.bring(a_request(2000))).blocks == blocks
    await store.prefetch.close()


async def test_parts_of_a_block_are_asked_for_and_counted_together() -> None:
    groups = (StateGroup(0, StateKind.SLIDING_WINDOW, 256), StateGroup(1, StateKind.FULL))
    store = Store([submitted(), completed(20, 60)], groups=groups, parts=2)
    assert (await store.bring(a_request(2000))).blocks == 8
    assert store.calls[0][2]["world_size"] == 2
    await store.prefetch.close()


async def test_items_are_named_as_the_store_names_them(store: Store) -> None:
    store.answers = [submitted(), completed(1, 1)]
    items = (Item(3, 20, "image"),)
    await store.bring(a_request(200, items))
    asked = store.calls[0][2]["token_ids"]
    assert block_hashes(pack_u32(asked), 128) == block_hashes(pack_u32(range(200)), 128, items)


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(503, json={"detail": "no layout registered"}),
        httpx.Response(202, text="no json"),
        httpx.Response(202, json={}),
        httpx.Response(202, json=[]),
        httpx.ConnectError("refused"),
    ],
)
async def test_failure_is_counted_and_never_raised(store: Store, answer: httpx.Response | Exception) -> None:
    store.answers = [answer]
    for failed in (1, 2):
        assert await store.bring(a_request()) == Prefetched()
        assert store.prefetch.failed == failed
    store.answers = [submitted(), completed(2, 2)]
    assert (await store.bring(a_request())).blocks == 2
    assert store.prefetch.failed == 2


async def test_prefetch_that_never_ends_can_be_cancelled(store: Store) -> None:
    store.answers = [submitted(), httpx.Response(200, json={"status": "pending"})]
    task = asyncio.create_task(store.prefetch.bring(a_request()))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_engine_that_stops_ends_a_prefetch_without_failing_its_job(store: Store) -> None:
    store.answers = [submitted(), httpx.Response(200, json={"status": "pending"})]
    task = asyncio.create_task(store.prefetch.bring(a_request()))
    await settle()
    await store.prefetch.close()
    await store.clock.advance(1)
    assert await task == Prefetched()


async def test_answer_that_nobody_waited_for_is_taken_by_the_next_prefetch(store: Store) -> None:
    pending = httpx.Response(200, json={"status": "pending"})
    store.answers = [submitted(), pending]
    task = asyncio.create_task(store.prefetch.bring(a_request()))
    await store.clock.advance(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for left, polls in ((pending, 1), (completed(1, 2), 1), (completed(2, 2), 0)):
        store.calls.clear()
        second = httpx.Response(202, json={"request_id": "p2", "chunks": 2, "status": "submitted"})
        store.answers = [second, *[left] * polls, completed(2, 2)]
        assert (await store.bring(a_request())).blocks == 2
        assert [path for _, path, _ in store.calls].count("/cache/prefetches/p1") == polls
        assert store.calls[-1][1] == "/cache/prefetches/p2"


async def test_answers_to_be_taken_are_bounded_and_one_that_is_gone_is_forgotten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MAX_LEFT", 2)
    for number in range(3):
        named = httpx.Response(202, json={"request_id": f"left{number}", "chunks": 2, "status": "submitted"})
        store.answers = [named, httpx.Response(200, json={"status": "pending"})]
        task = asyncio.create_task(store.prefetch.bring(a_request()))
        await store.clock.advance(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gone = httpx.Response(404, json={"detail": "unknown"})
    store.calls.clear()
    store.answers = [submitted(), gone, gone, completed(2, 2)]
    assert (await store.bring(a_request())).blocks == 2
    assert [path for _, path, _ in store.calls[1:3]] == ["/cache/prefetches/left1", "/cache/prefetches/left2"]
    assert store.prefetch.failed == 0
    store.calls.clear()
    store.answers = [submitted(), completed(2, 2)]
    await store.bring(a_request())
    assert len(store.calls) == 2


async def test_name_of_the_store_is_asked_and_may_stay_unknown(store: Store) -> None:
    store.answers = [httpx.Response(200, json={"mp": {"instance_id": "node-a"}})]
    assert await store.prefetch.store_instance_id() == "node-a"
    store.answers = [httpx.Response(200, json={})]
    assert await store.prefetch.store_instance_id() == ""
    assert store.prefetch.failed == 1
