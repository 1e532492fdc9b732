"""What a store answers over HTTP: kvindex lists and deletes, engines prefetch. Real and scripted stores run it.

The suite fills the store through the hooks with blocks of prompts of its own, and asserts names, order and what is
there, never times. Deletes are never forced.
"""

import random
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from shoal_contracts.ids import pack_u32
from shoal_kvblocks import block_hashes, split_hashes
from shoal_testkit.store_http import ObjectName, StoreHttp, store_http

KV_RANK = 0x01000100  # one card


@pytest.mark.asyncio(loop_scope="class")
class StoreHttpContract:
    """Subclass as ``Test<Store>`` and implement the hooks; the store has one card and one group of layers."""

    pool: str
    block_tokens: int = 128

    # Hooks

    async def url(self) -> str:
        """Where the running store answers."""
        raise NotImplementedError

    async def keep(self, token_ids: Sequence[int], cache_salt: str) -> None:
        """Have the KV of the prompt stored on both levels; return when it is."""
        raise NotImplementedError

    # Fixtures and tools

    @pytest_asyncio.fixture(loop_scope="class")
    async def store(self) -> AsyncIterator[StoreHttp]:
        async with store_http(await self.url()) as store:
            yield store

    async def kept(self, blocks: int, cache_salt: str = "") -> tuple[list[int], list[ObjectName]]:
        """A prompt that nobody else has, stored; and its objects, first block first."""
        token_ids = [random.randrange(5, 900) for _ in range(blocks * self.block_tokens + 3)]
        await self.keep(token_ids, cache_salt)
        hashes = split_hashes(block_hashes(pack_u32(token_ids), self.block_tokens))
        return token_ids, [ObjectName(name.hex(), self.pool, KV_RANK, 0, cache_salt) for name in hashes]

    # Listing

    @pytest.mark.parametrize("tier", ["l1", "l2"])
    async def test_what_was_stored_is_listed_with_its_full_name_and_size(self, store: StoreHttp, tier: str) -> None:
        _, mine = await self.kept(3)
        _, salted = await self.kept(2, "tenant")
        page = await store.page(tier)
        assert {*mine, *salted} <= page.sizes.keys()
        assert all(page.sizes[name] > 0 for name in (*mine, *salted))
        assert page.is_shared == (tier == "l2")
        assert page.adapter

    @pytest.mark.parametrize("tier", ["l1", "l2"])
    async def test_pages_together_are_the_whole_listing(self, store: StoreHttp, tier: str) -> None:
        await self.kept(3)
        whole = await store.objects(tier)
        in_pages = await store.objects(tier, page_size=2)
        assert sorted(in_pages) == sorted(whole)
        assert len(set(in_pages)) == len(in_pages)

    async def test_shared_level_is_listed_in_order_of_the_first_byte(self, store: StoreHttp) -> None:
        for _ in range(3):
            await self.kept(3)
        first_bytes = [name.block_hash_hex[:2] for name in await store.objects("l2", page_size=2)]
        assert first_bytes == sorted(first_bytes)

    async def test_listing_of_one_pool_has_no_other(self, store: StoreHttp) -> None:
        _, mine = await self.kept(1)
        assert set(mine) <= set(await store.objects("l2", model_name=self.pool))
        assert await store.objects("l2", model_name="nobody") == []

    async def test_object_deleted_between_two_pages_hides_no_other(self, store: StoreHttp) -> None:
        await self.kept(4)
        whole = await store.objects("l2")
        page = await store.page("l2", 2)
        await store.delete(list(page.sizes), "l2")
        found = list(page.sizes)
        while page.next_page_token is not None:
            page = await store.page("l2", 2, page.next_page_token)
            found += page.sizes
        assert found == whole

    @pytest.mark.parametrize(
        ("query", "status"),
        [
            ({"tier": "l2", "page_size": "5001"}, 422),
            ({"tier": "l2", "page_size": "0"}, 422),
            ({"tier": "l3"}, 422),
            ({"tier": "l2", "page_token": "no such token"}, 400),
            ({"tier": "l2", "adapter": "nobody"}, 404),
        ],
    )
    async def test_question_that_makes_no_sense_is_refused(
        self, store: StoreHttp, query: dict[str, str], status: int
    ) -> None:
        assert (await store.http.get("/cache/objects", params=query)).status_code == status

    # Deleting

    @pytest.mark.parametrize(("tier", "left"), [("l1", {"l2"}), ("l2", {"l1"}), ("all", set())])
    async def test_delete_takes_blocks_from_the_named_level(self, store: StoreHttp, tier: str, left: set[str]) -> None:
        _, mine = await self.kept(2)
        _, other = await self.kept(1)
        answer = await store.delete(mine, tier)
        assert (answer["skipped"], answer["ok"]) == (0, True)
        for level in ("l1", "l2"):
            listed = set(await store.objects(level))
            assert (set(mine) <= listed) == (level in left)
            assert level in left or not set(mine) & listed
            assert set(other) <= listed

    async def test_delete_may_be_repeated(self, store: StoreHttp) -> None:
        _, mine = await self.kept(2)
        for _ in range(2):
            answer = await store.delete(mine, "all")
            assert answer["ok"]

    async def test_deleted_block_is_stored_again(self, store: StoreHttp) -> None:
        token_ids, mine = await self.kept(2)
        await store.delete(mine, "all")
        await self.keep(token_ids, "")
        assert set(mine) <= set(await store.objects("l2"))

    async def test_delete_is_bounded_and_checked(self, store: StoreHttp) -> None:
        _, [mine] = await self.kept(1)
        too_many = {"keys": [mine.to_wire()] * 10_001, "tier": "l2"}
        assert (await store.http.request("DELETE", "/cache/objects", json=too_many)).status_code == 400
        no_hash = {"keys": [{**mine.to_wire(), "chunk_hash_hex": "no hash"}], "tier": "l2"}
        assert (await store.http.request("DELETE", "/cache/objects", json=no_hash)).status_code == 400
        assert (await store.http.request("DELETE", "/cache/objects", json={"tier": "l2"})).status_code == 422
        assert mine in await store.objects("l2")

    # Prefetching

    async def test_prefetch_brings_what_only_the_shared_level_has_into_memory(self, store: StoreHttp) -> None:
        token_ids, mine = await self.kept(3)
        await store.delete(mine, "l1")
        answer = await store.prefetch(self.pool, token_ids)
        assert (answer["found_keys"], answer["total_keys"]) == (3, 3)
        assert set(mine) <= set(await store.objects("l1"))
        polled = await store.http.get(f"/cache/prefetches/{answer['request_id']}")
        assert polled.status_code == 404  # an answer is given once

    async def test_prefetch_counts_what_was_in_memory_already(self, store: StoreHttp) -> None:
        token_ids, mine = await self.kept(2)
        await store.delete(mine[1:], "l1")
        answer = await store.prefetch(self.pool, token_ids)
        assert (answer["found_keys"], answer["total_keys"]) == (2, 2)

    async def test_prefetch_needs_a_whole_block_and_the_right_salt(self, store: StoreHttp) -> None:
        token_ids, mine = await self.kept(2, "tenant")
        await store.delete(mine, "l1")
        assert (await store.prefetch(self.pool, token_ids[:100], "tenant"))["status"] == "noop"
        assert (await store.prefetch(self.pool, token_ids, "other"))["found_keys"] == 0
        assert not set(mine) & set(await store.objects("l1"))
        assert (await store.prefetch(self.pool, token_ids, "tenant"))["found_keys"] == 2

    async def test_prefetch_of_a_pool_that_the_node_does_not_serve_is_refused(self, store: StoreHttp) -> None:
        body = {"model_name": "nobody", "world_size": 1, "token_ids": [7] * self.block_tokens}
        assert (await store.http.post("/cache/prefetches", json=body)).status_code == 503

    async def test_prefetch_of_too_many_tokens_is_refused(self, store: StoreHttp) -> None:
        body = {"model_name": self.pool, "world_size": 1, "token_ids": [7] * 1_000_001}
        assert (await store.http.post("/cache/prefetches", json=body)).status_code == 400
