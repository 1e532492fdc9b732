"""The shared level is smaller than the traffic: what would expire soonest goes, and requests go on."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shoal_engine.scripted import BlockKey
from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import BLOCK_TOKENS, Cluster, Shape, cluster_running
from shoal_testkit.holdings import shared_blocks, until_equal
from shoal_testkit.waits import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

BLOCK_BYTES = 1024 * BLOCK_TOKENS
CAPACITY_BLOCKS = 60
HIGH, LOW = 0.6, 0.4
CAPACITY = {"SHOAL_SCRIPTED_SHARED_CAPACITY_BYTES": str(CAPACITY_BLOCKS * BLOCK_BYTES)}
SETTINGS = {
    "kvindex": {
        "SHOAL_KVINDEX_HIGH_WATERMARK": str(HIGH),
        "SHOAL_KVINDEX_LOW_WATERMARK": str(LOW),
        "SHOAL_KVINDEX_SWEEP_INTERVAL_S": "0.2",
        "SHOAL_KVINDEX_SWEEP_GRACE_S": "2",  # a fresh block may be marked, and is settled meanwhile
        "SHOAL_KVINDEX_UNCLAIMED_LIFETIME_S": str(3 * 86_400),  # as an agent's
    },
    "prefill": {"SHOAL_SCRIPTED_PREFILL_TOKENS_PER_S": "20000", **CAPACITY},
    "decode": CAPACITY,
}
TOKENS = 4
WORDS = 560
BLOCKS = 4
AGENTS = 6  # together below the high mark
CHATS = 20
DOWN_S = 90
SAME_S = 3.0  # expiries are whole seconds, counted from the end of a request
TOOL = {"type": "function", "function": {"name": "sail", "parameters": {"type": "object", "properties": {}}}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_cluster() -> AsyncIterator[Cluster]:
    async with cluster_running(Shape(tokenizers=1, prefill=1, decode=1), SETTINGS) as cluster:
        yield cluster


class Level:
    """Looks at the shared folder all the time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.most_blocks = 0
        self.gone_at_s: dict[BlockKey, float] = {}
        self._seen: set[BlockKey] = set()

    def look(self) -> set[BlockKey]:
        found = set(shared_blocks(self._cluster))
        self.most_blocks = max(self.most_blocks, len(found))
        self.gone_at_s |= dict.fromkeys(self._seen - found, time.monotonic())
        self._seen = found
        return found

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def level(cluster: Cluster) -> AsyncIterator[Level]:
    watched = Level(cluster)
    task = asyncio.create_task(watched.watch(), name="level")
    yield watched
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def keep(chat: ChatApi, level: Level, prompt: str, *, is_agent: bool) -> list[BlockKey]:
    """Ask; an agent's blocks are wanted for three days and a chat's for seven. Returns the files of it."""
    before = level.look()
    fields = {"tools": [TOOL], "tool_choice": "none"} if is_agent else {}
    answer = await chat.ask(prompt, TOKENS, **fields).read()
    assert_whole(answer, TOKENS)
    assert answer.receipt["fallbacks"] == []
    return sorted(level.look() - before, key=lambda key: key.block_hash)


async def swept(cluster: Cluster, verdict: str) -> float:
    return await cluster.metric("kvindex", "shoal_kvindex_swept_blocks_total", verdict=verdict)


async def test_it_stays_below_its_capacity_and_what_expires_soonest_goes(
    cluster: Cluster, chat: ChatApi, level: Level
) -> None:
    high_blocks = int(HIGH * CAPACITY_BLOCKS)
    agents = [await keep(chat, level, a_prompt(WORDS), is_agent=True) for _ in range(AGENTS)]
    prompts = [a_prompt(WORDS) for _ in range(CHATS)]
    chats, asked_at_s = [], []
    for prompt in prompts:
        # What comes within a round of the sweep and its grace has room above the mark.
        await until(lambda: len(level.look()) <= high_blocks + BLOCKS, DOWN_S)
        asked_at_s.append(time.monotonic())
        chats.append(await keep(chat, level, prompt, is_agent=False))
    await until(lambda: len(level.look()) <= high_blocks, DOWN_S)
    assert level.most_blocks <= CAPACITY_BLOCKS
    print(f"{(AGENTS + CHATS) * BLOCKS} blocks stored, {level.most_blocks} at most at a time, of {CAPACITY_BLOCKS}")

    await until_equal(cluster, ever=list(level.gone_at_s))
    left = level.look()
    assert not left & {key for blocks in agents for key in blocks}
    last_agent_s = max(level.gone_at_s[key] for blocks in agents for key in blocks)
    first_chat_s = min(level.gone_at_s[key] for blocks in chats for key in blocks if key in level.gone_at_s)
    assert last_agent_s <= first_chat_s
    left_of = [len(left & set(blocks)) for blocks in chats]
    print(f"left of the chats, the oldest first: {left_of}")
    last_gone = max(number for number, count in enumerate(left_of) if count < len(chats[number]))
    first_left = min(number for number, count in enumerate(left_of) if count)
    assert last_gone < CHATS - 1
    assert asked_at_s[last_gone] <= asked_at_s[first_left] + SAME_S
    async with asyncio.timeout(DOWN_S):  # one mark, one delete, but for those that were settled meanwhile
        while await swept(cluster, "marked") - await swept(cluster, "renewed") != len(level.gone_at_s):
            await asyncio.sleep(0.1)
    newest, oldest = await chat.ask(prompts[-1], TOKENS).read(), await chat.ask(prompts[0], TOKENS).read()
    assert newest.receipt["matched_tokens"] >= BLOCKS * BLOCK_TOKENS
    assert oldest.receipt["matched_tokens"] == 0
    assert_whole(oldest, TOKENS)
