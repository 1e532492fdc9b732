"""Lifetimes of seconds: what nobody asks for any more goes, what is used stays; the files and the directory alike."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection

import pytest
import pytest_asyncio

from shoal_engine.scripted import BlockKey
from shoal_testkit.answers import Answer, ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import BLOCK_TOKENS, STEP_MS, Cluster, Shape, cluster_running
from shoal_testkit.holdings import shared_blocks, until_equal
from shoal_testkit.waits import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

AGENT_S = 4
CHAT_S = 9
GRACE_S = 2
BUDGET_S = 6  # of a request: what it hits is kept so long, so it is shorter than a chat's blocks live
SETTINGS = {
    "kvindex": {
        "SHOAL_KVINDEX_AGENT_LIFETIME_S": str(AGENT_S),
        "SHOAL_KVINDEX_CHAT_LIFETIME_S": str(CHAT_S),
        "SHOAL_KVINDEX_UNCLAIMED_LIFETIME_S": str(AGENT_S),
        "SHOAL_KVINDEX_PROBE_LIFETIME_S": "1",
        "SHOAL_KVINDEX_SWEEP_INTERVAL_S": "0.2",
        "SHOAL_KVINDEX_SWEEP_GRACE_S": str(GRACE_S),
    },
    "prefill": {"SHOAL_SCRIPTED_PREFILL_TOKENS_PER_S": "20000"},
    "gateway": {"SHOAL_GATEWAY_REQUEST_BUDGET_S": str(BUDGET_S)},
}
WHOLE_SECOND_S = 1  # expiries are whole seconds
GONE_S = 90
TOKENS = 4
WORDS = 420
BLOCKS = 3
TOOL = {"type": "function", "function": {"name": "sail", "parameters": {"type": "object", "properties": {}}}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_cluster() -> AsyncIterator[Cluster]:
    async with cluster_running(Shape(tokenizers=1, prefill=1, decode=1), SETTINGS) as cluster:
        yield cluster


def ask(chat: ChatApi, prompt: str, tokens: int = TOKENS, *, is_agent: bool = False) -> Answer:
    """Requests with tools are an agent's."""
    return chat.ask(prompt, tokens, **({"tools": [TOOL], "tool_choice": "none"} if is_agent else {}))


async def keep(cluster: Cluster, chat: ChatApi, prompt: str, *, is_agent: bool = False) -> set[BlockKey]:
    """Ask, and find the files of it."""
    before = shared_blocks(cluster)
    answer = await ask(chat, prompt, is_agent=is_agent).read()
    assert_whole(answer, TOKENS)
    fresh = shared_blocks(cluster).keys() - before.keys()
    assert len(fresh) >= BLOCKS
    return fresh


def there(cluster: Cluster, blocks: Collection[BlockKey]) -> int:
    return len(shared_blocks(cluster).keys() & set(blocks))


async def until_gone(cluster: Cluster, blocks: Collection[BlockKey]) -> float:
    """When the first of them went."""
    await until(lambda: there(cluster, blocks) < len(blocks), GONE_S)
    first_s = time.time()
    await until(lambda: not there(cluster, blocks), GONE_S)
    return first_s


async def test_blocks_go_when_their_class_says_and_a_renewed_one_later(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(WORDS)
    asked_s = time.time()
    idle = await keep(cluster, chat, a_prompt(WORDS))
    renewed = await keep(cluster, chat, prompt)
    agent = await keep(cluster, chat, a_prompt(WORDS), is_agent=True)

    agent_s = await until_gone(cluster, agent)
    assert agent_s >= asked_s + AGENT_S - WHOLE_SECOND_S
    assert there(cluster, idle) == len(idle)
    asked_again_s = time.time()
    again = await ask(chat, prompt).read()
    assert again.receipt["hit_tokens"] >= BLOCKS * BLOCK_TOKENS

    idle_s = await until_gone(cluster, idle)
    assert idle_s >= asked_s + CHAT_S - WHOLE_SECOND_S
    renewed_s = await until_gone(cluster, renewed)
    assert renewed_s >= asked_again_s + CHAT_S - WHOLE_SECOND_S
    await until_equal(cluster, ever=[*idle, *renewed, *agent])
    cold = await ask(chat, prompt).read()
    assert_whole(cold, TOKENS)
    assert cold.receipt["hit_tokens"] == 0
    assert cold.text == again.text


async def test_a_request_that_outlasts_the_lifetime_keeps_its_blocks(cluster: Cluster, chat: ChatApi) -> None:
    tokens = int((AGENT_S + GRACE_S + 3) * 1000 / STEP_MS)
    await cluster.stop("gateway")
    with cluster.changed("gateway", SHOAL_GATEWAY_REQUEST_BUDGET_S="120"):
        await cluster.start("gateway")
        await cluster.serves_well()
        prompt = a_prompt(WORDS)
        held = await keep(cluster, chat, prompt, is_agent=True)
        idle = await keep(cluster, chat, a_prompt(WORDS), is_agent=True)
        answer = ask(chat, prompt, tokens, is_agent=True)
        await answer.has_begun()
        await until_gone(cluster, idle)
        assert answer.task is not None and not answer.task.done()
        while not answer.task.done():
            assert there(cluster, held) == len(held)
            await asyncio.sleep(0.05)
        assert_whole(await answer.read(), tokens)
        assert answer.receipt["matched_tokens"] >= BLOCKS * BLOCK_TOKENS
        await until_equal(cluster, ever=[*held, *idle])
    await cluster.stop("gateway")


async def test_a_block_that_is_used_between_mark_and_delete_stays(cluster: Cluster, chat: ChatApi) -> None:
    async def swept(verdict: str) -> float:
        return await cluster.metric("kvindex", "shoal_kvindex_swept_blocks_total", verdict=verdict)

    prompt = a_prompt(WORDS)
    marked_before, taken_back_before = await swept("marked"), await swept("renewed")
    used = await keep(cluster, chat, prompt, is_agent=True)
    idle = await keep(cluster, chat, a_prompt(WORDS), is_agent=True)
    async with asyncio.timeout(GONE_S):
        while await swept("marked") < marked_before + 2 * BLOCKS:
            await asyncio.sleep(0.02)
    assert there(cluster, used | idle) == len(used | idle)
    answer = await ask(chat, prompt, is_agent=True).read()
    assert_whole(answer, TOKENS)
    assert answer.receipt["matched_tokens"] == 0  # a mark hides it from the index, and not from the engine
    await until_gone(cluster, idle)
    assert there(cluster, used) == len(used)
    await until_equal(cluster, ever=[*used, *idle])
    assert await swept("renewed") > taken_back_before
    again = await ask(chat, prompt, is_agent=True).read()
    assert again.receipt["matched_tokens"] >= BLOCKS * BLOCK_TOKENS
