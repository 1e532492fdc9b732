"""The whole system: a request that waits behind another one finds its stored blocks in its worker's DRAM."""

import asyncio

import pytest

from shoal_testkit.answers import Answer, ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import MODEL, Cluster, Shape, cluster_running
from shoal_testkit.store_http import store_http

DEADLINE_S = 60.0
WORDS = 600
TOKENS = 4


async def _leave_on_shared_level(cluster: Cluster) -> None:
    for url in cluster.stores.values():
        async with store_http(url) as store:
            await store.delete(await store.objects("l1"), "l1")


async def _ask_behind_another(cluster: Cluster, chat: ChatApi, prompt: str) -> Answer:
    ahead = chat.ask(a_prompt(WORDS), TOKENS)
    await cluster.whose("prefill")
    waiting = await chat.ask(prompt, TOKENS).read()
    await ahead.read()
    return waiting


@pytest.mark.timeout(180)
async def test_what_was_prefetched_stands_in_the_receipt() -> None:
    async with cluster_running(Shape(tokenizers=1, prefill=1, decode=1)) as cluster:
        chat = ChatApi(cluster.url, MODEL)
        prompt = a_prompt(WORDS)
        cold = await chat.ask(prompt, TOKENS).read()
        assert "prefetched_blocks" not in cold.receipt["prefill"]
        async with asyncio.timeout(DEADLINE_S):
            while True:  # until the index has heard that DRAM does not have the blocks any more
                await _leave_on_shared_level(cluster)
                answer = await _ask_behind_another(cluster, chat, f"{prompt} {a_prompt(WORDS // 2)}")
                prefill = answer.receipt["prefill"]
                if "prefetched_blocks" in prefill:
                    break
        assert_whole(answer, TOKENS)
        assert prefill["prefetched_blocks"] >= 4
        assert answer.receipt["hit_tokens"] >= 128 * prefill["prefetched_blocks"]
        assert await cluster.metric("prefill-1", "shoal_prefill_prefetched_blocks_total") >= 4
        assert await cluster.metric("prefill-1", "shoal_prefill_failed_prefetches") == 0
