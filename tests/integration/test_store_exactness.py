"""Whatever the store has, has lost or is losing, an engine with it says what an engine without one says.

In float32, token for token, for a model of full attention and one with sliding windows: cold, from DRAM alone, from
the shared level alone, after eviction, during a sweep, and while exactly what is being loaded is deleted. One real
server and four engines for the file: each engine takes as long to start as all its cases take to run.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from shoal_contracts.ids import pack_u32
from shoal_engine import EngineRequest, EngineSettings, Sampling, StateKind
from shoal_engine.vllm.engine import VllmEngine
from shoal_kvblocks import block_hashes, split_hashes
from shoal_testkit.failing_store import CONNECTOR, SWITCH_VARIABLE
from shoal_testkit.models import TINY_VOCAB_TOKENS, TINY_WINDOW_TOKENS, write_tiny_model, write_tiny_window_model
from shoal_testkit.servers import LmcacheRunning, lmcache_running
from shoal_testkit.store_http import ObjectName, StoreHttp, store_http
from shoal_testkit.suites.engine_lab import Answer, read
from shoal_testkit.vllm_probe import forget_engine_copies

BLOCK = 128
STEP_TOKENS = 1024  # a long prompt is stored in several runs
ANSWER_TOKENS = 24
WINDOW_AGE_S = 15.0  # longer than a case needs between storing a window and hitting it
STANDSTILL_S = 3.0  # an engine gives its store up after one
DEADLINE_S = 60.0

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@dataclass
class Pair:
    """``alone`` has no store and its own copies are dropped before each use: it always computes everything."""

    alone: VllmEngine
    engine: VllmEngine
    store: StoreHttp
    server: LmcacheRunning
    _truths: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    @property
    def pool(self) -> str:
        return self.engine.description.pool

    @property
    def window_group(self) -> int | None:
        groups = self.engine.description.groups
        return next((group.object_group_id for group in groups if group.kind is StateKind.SLIDING_WINDOW), None)

    async def truth(self, prompt: Sequence[int], answer_tokens: int = ANSWER_TOKENS) -> list[int]:
        key = (answer_tokens, *prompt)
        if key not in self._truths:
            await forget_engine_copies(self.alone)
            answer = await self._read(self.alone, prompt, answer_tokens)
            assert answer.hit_tokens == 0
            self._truths[key] = answer.token_ids
        return self._truths[key]

    async def ask(self, prompt: Sequence[int], answer_tokens: int = ANSWER_TOKENS) -> int:
        """The answer is the true one; returns its hit, for which the engine's own copies must have been dropped."""
        truth = await self.truth(prompt, answer_tokens)
        answer = await self._read(self.engine, prompt, answer_tokens)
        assert answer.token_ids == truth
        return answer.hit_tokens

    async def ask_store(self, prompt: Sequence[int], answer_tokens: int = ANSWER_TOKENS) -> int:
        """As ``ask``, with nothing in the engine: the hit is the store's."""
        await forget_engine_copies(self.engine)
        return await self.ask(prompt, answer_tokens)

    async def put(self, *prompts: Sequence[int]) -> None:
        """All blocks of the prompts are in the store, on both levels."""
        await asyncio.gather(*(self.ask(prompt) for prompt in prompts))
        await forget_engine_copies(self.engine)
        wanted = set(itertools.chain.from_iterable(hashes_of(prompt) for prompt in prompts))
        async with asyncio.timeout(DEADLINE_S):
            while not wanted <= {name.block_hash_hex for name in await self.full_objects("l2")}:
                await asyncio.sleep(0.05)

    async def delete(self, names: Sequence[ObjectName]) -> None:
        """From both levels."""
        for level in ("l2", "l1"):
            await self.store.delete(names, level)

    async def clear_dram(self) -> None:
        (await self.store.http.post("/cache/clear")).raise_for_status()

    async def objects(self, level: str) -> list[ObjectName]:
        return await self.store.objects(level, model_name=self.pool)

    async def objects_of(self, prompt: Sequence[int], level: str) -> list[ObjectName]:
        wanted = set(hashes_of(prompt))
        return [name for name in await self.objects(level) if name.block_hash_hex in wanted]

    async def full_objects(self, level: str) -> list[ObjectName]:
        return [name for name in await self.objects(level) if name.object_group_id != self.window_group]

    async def window_objects(self, level: str) -> list[ObjectName]:
        return [name for name in await self.objects(level) if name.object_group_id == self.window_group]

    def request(self, prompt: Sequence[int], answer_tokens: int = ANSWER_TOKENS) -> EngineRequest:
        sampling = Sampling(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
        return EngineRequest(f"r{next(self._serial)}", prompt, sampling)

    async def _read(self, engine: VllmEngine, prompt: Sequence[int], answer_tokens: int) -> Answer:
        async with asyncio.timeout(DEADLINE_S):
            return await read(engine, self.request(prompt, answer_tokens))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory, failing_loads: Path) -> AsyncIterator[dict[str, Pair]]:
    directory = tmp_path_factory.mktemp("store-exactness")
    models = {"full": write_tiny_model(directory / "full"), "window": write_tiny_window_model(directory / "window")}
    async with AsyncExitStack() as stack:
        lmcache = await stack.enter_async_context(lmcache_running(directory / "shared", window_age_s=WINDOW_AGE_S))
        store = await stack.enter_async_context(store_http(lmcache.url))
        pairs = {name: a_pair(model, lmcache, store) for name, model in models.items()}
        for engine in itertools.chain.from_iterable((pair.alone, pair.engine) for pair in pairs.values()):
            stack.push_async_callback(engine.stop)
            await engine.start()  # one by one: together they would share two cores
        yield pairs


@pytest.fixture(scope="module")
def failing_loads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """While this file exists the store promises blocks and cannot load them."""
    switch = tmp_path_factory.mktemp("failing-loads") / "on"
    os.environ[SWITCH_VARIABLE] = str(switch)  # before the engines start
    yield switch
    del os.environ[SWITCH_VARIABLE]


def a_pair(model: Path, lmcache: LmcacheRunning, store: StoreHttp) -> Pair:
    settings = EngineSettings(
        model=str(model),
        dtype="float32",
        max_context_tokens=4096,
        kv_memory_bytes=16 << 20,  # little, so that memory which one request leaves is soon taken by another
        max_step_tokens=STEP_TOKENS,
    )
    reach = {"store_port": lmcache.spec.mq_port, "store_http_port": lmcache.spec.http_port}
    engine = VllmEngine(settings.model_copy(update=reach), connector=CONNECTOR)
    return Pair(VllmEngine(settings), engine, store, lmcache)


@pytest.fixture(params=["full", "window"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


@pytest.fixture
def windowed(pairs: dict[str, Pair]) -> Pair:
    return pairs["window"]


def a_prompt(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(TINY_VOCAB_TOKENS) for _ in range(tokens)]


def hashes_of(prompt: Sequence[int]) -> list[str]:
    return [block_hash.hex() for block_hash in split_hashes(block_hashes(pack_u32(prompt), BLOCK))]


def whole(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


# Both models


async def test_cold_then_from_dram_alone_then_from_the_shared_level_alone(pair: Pair) -> None:
    prompt = a_prompt(2000, seed=1)
    assert await pair.ask(prompt) == 0
    await pair.put(prompt)

    await pair.store.delete(await pair.objects_of(prompt, "l2"), "l2")
    assert await pair.ask_store(prompt) == whole(2000)

    other = a_prompt(1900, seed=2)
    await pair.put(other)
    await pair.clear_dram()
    assert await pair.objects_of(other, "l1") == []
    assert await pair.ask_store(other) == whole(1900)


@pytest.mark.parametrize("prompt_tokens", [128, 129, 255, 256, 384, 1024, 1025, 3000])
async def test_lengths_around_borders_of_blocks_windows_and_steps(pair: Pair, prompt_tokens: int) -> None:
    prompt = a_prompt(prompt_tokens, seed=10)
    await pair.put(prompt)
    await pair.clear_dram()
    # The last token is always computed: it is what the answer begins from.
    assert await pair.ask_store(prompt) == min(whole(prompt_tokens), prompt_tokens - 1)


async def test_what_was_evicted_is_computed_and_stored_again(pair: Pair) -> None:
    prompt = a_prompt(2000, seed=20)
    await pair.put(prompt)
    await pair.delete(await pair.objects_of(prompt, "l2"))
    assert await pair.objects_of(prompt, "l2") == []
    assert await pair.ask_store(prompt) == 0
    await pair.put(prompt)
    await pair.clear_dram()
    assert await pair.ask_store(prompt) == whole(2000)


async def test_a_hole_ends_the_hit_and_is_filled(pair: Pair) -> None:
    prompt = a_prompt(2000, seed=21)
    await pair.put(prompt)
    hole = hashes_of(prompt)[8]  # the first block of the second run
    await pair.store.delete([name for name in await pair.objects_of(prompt, "l2") if name.block_hash_hex == hole], "l2")
    await pair.clear_dram()
    assert await pair.ask_store(prompt) == 8 * BLOCK
    await pair.put(prompt)
    await pair.clear_dram()
    assert await pair.ask_store(prompt) == whole(2000)


async def test_answers_stay_true_while_a_sweep_deletes_under_them(pair: Pair) -> None:
    prompts = [a_prompt(tokens, seed=30 + tokens) for tokens in (700, 1300, 1500, 2000)]
    await pair.put(*prompts)
    deleted = 0

    async def sweep() -> None:
        nonlocal deleted
        dice = random.Random(31)
        while True:
            found = await pair.objects("l2")
            some = dice.sample(found, len(found) // 16)
            await pair.delete(some)
            deleted += len(some)
            await asyncio.sleep(0.05)

    sweeping = asyncio.create_task(sweep())
    try:
        for _ in range(4):
            await asyncio.gather(*(pair.ask(prompt) for prompt in prompts))
            await forget_engine_copies(pair.engine)
    finally:
        sweeping.cancel()
        await asyncio.wait([sweeping])
    assert sweeping.cancelled(), sweeping.exception()
    assert deleted > len(hashes_of(prompts[0]))


@pytest.mark.parametrize("level", ["l1", "l2"])
async def test_answers_stay_true_while_what_they_load_is_deleted(pair: Pair, level: str) -> None:
    prompt = a_prompt(2500, seed=40)
    hits = []
    for delay_ms in (0, 2, 5, 12, 30):
        await pair.put(prompt)
        if level == "l2":
            await pair.clear_dram()
        objects = await pair.objects_of(prompt, level)
        await forget_engine_copies(pair.engine)
        asking = asyncio.create_task(pair.ask(prompt))
        await asyncio.sleep(delay_ms / 1000)
        await pair.store.delete(objects, level)
        hits.append(await asking)
    assert all(hit <= whole(2500) for hit in hits)
    await pair.put(prompt)
    await pair.clear_dram()
    assert await pair.ask_store(prompt) == whole(2500)


async def test_a_store_that_stood_still_keeps_nothing_that_was_written_over_meanwhile(pair: Pair) -> None:
    prompts = [a_prompt(tokens, seed=100 + tokens) for tokens in (1500, 2500, 3500, 3499)]
    others = [a_prompt(3000, seed=200 + number) for number in range(4)]
    for prompt in (*prompts, *others):
        await pair.truth(prompt)
    asked = [asyncio.create_task(pair.ask(prompt)) for prompt in prompts]
    async with asyncio.timeout(DEADLINE_S):
        while pair.engine.load().cached_tokens == 0:
            await asyncio.sleep(0.01)
    os.kill(pair.server.process.process.pid, signal.SIGSTOP)
    try:
        asked += [asyncio.create_task(pair.ask(prompt)) for prompt in others]
        await asyncio.sleep(STANDSTILL_S)
    finally:
        os.kill(pair.server.process.process.pid, signal.SIGCONT)
    await asyncio.gather(*asked)
    forks = [prompt[:cut] for prompt in (*prompts, *others) for cut in (500, 900, 1300, len(prompt))]
    for fork in forks:
        await pair.ask_store(fork)
    new = a_prompt(1500, seed=300)
    await pair.put(new)
    assert await pair.ask_store(new) == whole(1500)


async def test_a_load_that_fails_is_computed(pair: Pair, failing_loads: Path) -> None:
    prompt = a_prompt(2000, seed=45)
    await pair.put(prompt)
    failed_loads = pair.engine.load().failed_loads
    failing_loads.touch()
    try:
        assert await pair.ask_store(prompt) == 0
    finally:
        failing_loads.unlink()
    assert pair.engine.load().failed_loads == failed_loads + 1
    async with asyncio.timeout(DEADLINE_S):
        while await pair.ask_store(prompt) < whole(2000):  # the engine finds its store by the next heartbeat
            await asyncio.sleep(0.1)


async def test_what_was_prefetched_is_hit_in_dram(pair: Pair) -> None:
    prompt = a_prompt(2000, seed=46)
    await pair.put(prompt)
    await pair.clear_dram()
    await forget_engine_copies(pair.engine)
    assert (await pair.engine.prefetch(pair.request(prompt))).blocks == len(hashes_of(prompt))
    await pair.store.delete(await pair.objects_of(prompt, "l2"), "l2")
    assert await pair.ask(prompt) == whole(2000)


async def test_the_next_turn_hits_the_answer_of_the_last(pair: Pair) -> None:
    prompt = a_prompt(1000, seed=50)
    await pair.ask(prompt, answer_tokens=300)
    answer = await pair.truth(prompt, answer_tokens=300)
    # The last token of an answer is sampled, never computed on.
    await pair.put([*prompt, *answer[:-1]])
    await pair.clear_dram()
    assert await pair.ask_store([*prompt, *answer, *a_prompt(60, seed=51)]) >= whole(1000 + 300 - 1)


# Sliding windows


async def test_groups_are_told_as_the_store_numbers_them(pairs: dict[str, Pair]) -> None:
    assert [group.kind for group in pairs["full"].engine.description.groups] == [StateKind.FULL]
    windowed = pairs["window"]
    groups = windowed.engine.description.groups
    assert [(group.kind, group.window_tokens, group.is_replayable) for group in groups] == [
        (StateKind.SLIDING_WINDOW, TINY_WINDOW_TOKENS, False),
        (StateKind.FULL, 0, False),
    ]
    prompt = a_prompt(1024, seed=60)
    await windowed.put(prompt)
    stored = {name.object_group_id for name in await windowed.objects_of(prompt, "l1")}
    assert stored == {group.object_group_id for group in groups}


async def test_of_each_run_only_the_last_window_is_shared(windowed: Pair) -> None:
    prompt = a_prompt(2000, seed=61)
    await windowed.put(prompt)
    order = {block_hash: number for number, block_hash in enumerate(hashes_of(prompt))}
    shared = set(await windowed.objects_of(prompt, "l2"))
    window_blocks = sorted(order[name.block_hash_hex] for name in await windowed.window_objects("l2") if name in shared)
    full_blocks = sorted(order[name.block_hash_hex] for name in await windowed.full_objects("l2") if name in shared)
    assert full_blocks == list(range(15))
    assert window_blocks == [6, 7, 13, 14]


async def test_prompts_that_share_steps_keep_a_window_each(windowed: Pair) -> None:
    prompts = [a_prompt(tokens, seed=70 + tokens) for tokens in (400, 500, 650, 900, 1100, 1500)]
    await windowed.put(*prompts)
    hashes = {block_hash for prompt in prompts for block_hash in hashes_of(prompt)}
    shared = [name for name in await windowed.window_objects("l2") if name.block_hash_hex in hashes]
    assert len(shared) < len(hashes)  # it is the policy that is tested, not a store that keeps everything
    await windowed.clear_dram()
    for prompt in prompts:
        assert await windowed.ask_store(prompt) == whole(len(prompt))


async def test_what_a_window_has_left_behind_is_stored_as_it_was(windowed: Pair) -> None:
    """Its blocks are free for other requests as soon as it has moved on, and the store reads them later."""
    for number in range(2):
        prompts = [a_prompt(tokens, seed=1000 * number + tokens) for tokens in (700, 1300, 1500, 2000)]
        forks = [prompt[: border + 1] for prompt in prompts for border in range(BLOCK, len(prompt), BLOCK)]
        for prompt in (*prompts, *forks):
            await windowed.truth(prompt)
        await windowed.put(*prompts)
        hits = [await windowed.ask_store(fork) for fork in forks]
        assert sum(hit > 0 for hit in hits) > len(forks) / 2  # the last ones may have left DRAM


@pytest.mark.parametrize("way", ["cleared", "aged"])
async def test_a_fork_inside_a_run_hits_while_its_window_is_in_dram_and_later_if_it_was_used(
    windowed: Pair, way: str
) -> None:
    prompt = a_prompt(2000, seed=80 + len(way))
    # One block behind the fork: less than a window, so its hit needs blocks from before it.
    used, unused, early = ([*prompt[:at], *a_prompt(100, seed=at)] for at in (1500, 1300, 700))
    for fork in (used, unused, early, prompt):
        await windowed.truth(fork)
    await windowed.put(prompt)
    assert await windowed.ask_store(used) == whole(1500)
    await windowed.put(used)

    if way == "cleared":
        await windowed.clear_dram()
    else:
        await until_windows_aged(windowed, prompt)

    assert await windowed.ask_store(used) == whole(len(used))
    assert await windowed.ask_store(prompt) == whole(2000)
    assert await windowed.ask_store(unused) == STEP_TOKENS  # where a run ended
    assert await windowed.ask_store(early) == 0


async def until_windows_aged(windowed: Pair, prompt: Sequence[int]) -> None:
    """Its windows leave DRAM, what has full attention does not, of any prompt."""
    full = set(await windowed.full_objects("l1"))
    started_s = time.monotonic()
    async with asyncio.timeout(WINDOW_AGE_S + DEADLINE_S):
        while set(await windowed.objects_of(prompt, "l1")) & set(await windowed.window_objects("l1")):
            await asyncio.sleep(0.2)
    assert time.monotonic() - started_s > WINDOW_AGE_S / 2
    assert full <= set(await windowed.full_objects("l1"))
