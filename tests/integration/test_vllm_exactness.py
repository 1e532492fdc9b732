"""What a prefill engine, a store and a decode engine answer together is what one engine without a store answers.

In float32, token for token, around block borders, cold and on hits; and while the store dies and returns. The
engines start once for the file: each start imports vLLM.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from shoal_engine import EngineRequest, EngineSettings, Sampling
from shoal_engine.vllm.engine import VllmEngine
from shoal_testkit.models import write_tiny_model
from shoal_testkit.processes import start_process
from shoal_testkit.servers import LmcacheRunning, lmcache_running
from shoal_testkit.suites.engine_lab import Answer, read
from shoal_testkit.vllm_probe import forget_engine_copies

BLOCK = 128
PROMPT_TOKENS = (1, 127, 128, 129, 255, 256, 257, 384, 640, 1000, 2000, 3000)
ANSWER_TOKENS = 40
STORE_RETURN_S = 60.0

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


@dataclass(slots=True)
class Trio:
    """``alone`` has no store and its own copies are dropped before each use, so it always computes everything."""

    alone: VllmEngine
    prefill: VllmEngine
    decode: VllmEngine
    lmcache: LmcacheRunning
    directory: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trio(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    directory = tmp_path_factory.mktemp("exactness")
    settings = EngineSettings(
        model=str(write_tiny_model(directory / "model", context_tokens=4096)),
        dtype="float32",
        kv_memory_bytes=64 << 20,
        max_step_tokens=1024,  # long prompts take several steps
    )
    async with lmcache_running(directory / "shared") as lmcache:
        shared = settings.model_copy(update={"store_port": lmcache.spec.mq_port})
        trio = Trio(VllmEngine(settings), VllmEngine(shared), VllmEngine(shared), lmcache, directory)
        try:
            for engine in (trio.alone, trio.prefill, trio.decode):  # together they would share two cores
                await engine.start()
            yield trio
        finally:
            for engine in (trio.decode, trio.prefill, trio.alone):
                await engine.stop()
            await trio.lmcache.process.stop()


def a_request(request_id: str, prompt_tokens: int, *, seed: int = 0) -> EngineRequest:
    draw = random.Random(seed * 10_000 + prompt_tokens)
    prompt = [draw.randrange(1024) for _ in range(prompt_tokens)]
    return EngineRequest(request_id, prompt, Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0))


async def answer_of(engine: VllmEngine, request: EngineRequest) -> Answer:
    async with asyncio.timeout(60):
        return await read(engine, request)


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


@pytest.mark.parametrize("prompt_tokens", PROMPT_TOKENS)
async def test_handoff_through_the_store_answers_as_one_engine(trio: Trio, prompt_tokens: int) -> None:
    request = a_request("r", prompt_tokens)
    truth = await answer_of(trio.alone, request)
    assert truth.hit_tokens == 0

    prefilled = await trio.prefill.prefill(request)
    assert (prefilled.hit_tokens, prefilled.miss_tokens) == (0, prompt_tokens)
    assert prefilled.first_token == truth.token_ids[0]
    await forget_engine_copies(trio.prefill)  # it returns when everything is stored

    handed_over = await answer_of(trio.decode, request)
    assert handed_over.token_ids == truth.token_ids
    assert handed_over.hit_tokens == min(whole_blocks(prompt_tokens), prompt_tokens - 1)

    resumed = await answer_of(trio.decode, replace(request, resumed_token_ids=truth.token_ids[:17]))
    assert resumed.token_ids == truth.token_ids[17:]

    again = await trio.prefill.prefill(request)
    assert again.hit_tokens == handed_over.hit_tokens
    assert again.first_token == truth.token_ids[0]


@pytest.mark.parametrize("penalties", [{"frequency_penalty": 0.5}, {"presence_penalty": 2.0}])
async def test_resumed_answer_is_penalised_for_what_was_said_before(trio: Trio, penalties: dict[str, float]) -> None:
    plain = a_request("r", 200, seed=5)
    request = replace(plain, sampling=replace(plain.sampling, **penalties))
    truth = await answer_of(trio.alone, request)
    assert truth.token_ids != (await answer_of(trio.alone, plain)).token_ids
    for sent in (1, 9, 25):
        resumed = await answer_of(trio.decode, replace(request, resumed_token_ids=truth.token_ids[:sent]))
        assert resumed.token_ids == truth.token_ids[sent:]


async def test_next_turn_hits_the_answer_of_the_last(trio: Trio) -> None:
    first = a_request("r", 1000, seed=1)
    answer = await answer_of(trio.decode, replace(first, sampling=replace(first.sampling, max_tokens=300)))
    await forget_engine_copies(trio.decode)
    turn = replace(first, token_ids=[*first.token_ids, *answer.token_ids, *first.token_ids[:50]])
    second = await answer_of(trio.prefill, turn)
    # The last token of an answer is sampled, never computed on: its block may lack that one.
    assert second.hit_tokens >= whole_blocks(1000 + 300 - 1)
    assert second.token_ids == (await answer_of(trio.alone, turn)).token_ids


async def test_store_that_dies_and_returns_changes_no_token(trio: Trio) -> None:
    request, other = a_request("r", 2000, seed=2), a_request("r", 1500, seed=3)
    truth = await answer_of(trio.alone, request)
    other_truth = await answer_of(trio.alone, other)
    assert (await answer_of(trio.decode, request)).token_ids == truth.token_ids
    await forget_engine_copies(trio.decode)

    reading = asyncio.create_task(answer_of(trio.decode, request))
    trio.lmcache.process.kill()
    assert (await reading).token_ids == truth.token_ids
    assert (await answer_of(trio.decode, other)).token_ids == other_truth.token_ids
    assert trio.decode.load().is_store_lost
    started = time.monotonic()
    assert (await answer_of(trio.decode, a_request("r", 10, seed=4))).finish is not None
    assert time.monotonic() - started < 2.0  # once the loss is known nothing waits for it

    trio.lmcache.process = await start_process(trio.lmcache.process.server, trio.directory, timeout_s=180)
    await until_hit(trio.decode, request, truth)
    assert not trio.decode.load().is_store_lost


async def until_hit(engine: VllmEngine, request: EngineRequest, truth: Answer) -> None:
    """Engines find a returned store by their heartbeat; until then they compute."""
    async with asyncio.timeout(STORE_RETURN_S):
        while True:
            await forget_engine_copies(engine)
            answer = await answer_of(engine, request)
            assert answer.token_ids == truth.token_ids
            if answer.hit_tokens >= whole_blocks(len(request.token_ids)):
                return
            await asyncio.sleep(0.5)
