import asyncio
from collections.abc import Awaitable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_engine.api import EngineRequest, FinishReason, Item, Sampling
from shoal_engine.scripted import (
    BlockStore,
    Faults,
    ScriptedEngine,
    ScriptedModel,
    SharedMemory,
    Timing,
    build_scripted_engine,
)
from shoal_engine.settings import EngineSettings
from shoal_runtime.clock import Clock, SystemClock
from shoal_testkit.clock import VirtualClock

SMALL = ScriptedModel(block_tokens=16, max_context_tokens=256, max_cached_tokens=1024)


def an_engine(
    model: ScriptedModel = SMALL,
    *,
    clock: Clock | None = None,
    store: BlockStore | None = None,
    timing: Timing | None = None,
) -> ScriptedEngine:
    return ScriptedEngine(model, clock=clock or SystemClock(), store=store or BlockStore(SharedMemory()), timing=timing)


async def answer(engine: ScriptedEngine, request: EngineRequest) -> list[int]:
    return [token_id async for step in engine.generate(request) for token_id in step.token_ids]


async def hit(engine: ScriptedEngine, request: EngineRequest) -> int:
    return sum([step.hit_tokens or 0 async for step in engine.generate(request)])


async def within(clock: VirtualClock, work: Awaitable[object], duration_s: float) -> bool:
    """Whether ``work`` is done after exactly ``duration_s`` and not a moment before."""
    task = asyncio.ensure_future(work)
    await clock.advance(duration_s * 0.999)
    was_done = task.done()
    await clock.advance(duration_s * 0.002)
    return task.done() and not was_done


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 999), min_size=1, max_size=80),
    cut=st.integers(0, 12),
    other_first=st.booleans(),
)
async def test_any_split_between_engines_equals_one_engine(prompt: list[int], cut: int, other_first: bool) -> None:
    shared = SharedMemory()
    alone, here, there = an_engine(), an_engine(store=BlockStore(shared)), an_engine(store=BlockStore(shared))
    for engine in (alone, here, there):
        await engine.start()
    whole = await answer(alone, EngineRequest("whole", prompt, Sampling(max_tokens=12)))
    if other_first:
        done = await there.prefill(EngineRequest("job", prompt))
        assert done.first_token == whole[0]
    rest = await answer(here, EngineRequest("rest", prompt, Sampling(max_tokens=12), resumed_token_ids=whole[:cut]))
    assert rest == whole[cut:]
    for engine in (alone, here, there):
        await engine.stop()


async def test_items_change_the_answer_and_the_blocks() -> None:
    engine = an_engine()
    await engine.start()
    prompt = [5] * 40
    cat = EngineRequest("cat", prompt, Sampling(max_tokens=5), items=(Item(2, 20, "cat"),))
    dog = EngineRequest("dog", prompt, Sampling(max_tokens=5), items=(Item(2, 20, "dog"),))
    assert await answer(engine, cat) != await answer(engine, dog)
    assert await hit(engine, cat) == 32
    other = EngineRequest("eel", prompt, Sampling(max_tokens=5), items=(Item(2, 20, "eel"),))
    assert await hit(engine, other) == 0
    await engine.stop()


async def test_next_turn_hits_the_whole_blocks_of_prompt_and_answer() -> None:
    engine = an_engine()
    await engine.start()
    prompt = list(range(20))
    told = await answer(engine, EngineRequest("one", prompt, Sampling(max_tokens=30)))
    # The last token was never computed: 49 of 50 have KV.
    assert await hit(engine, EngineRequest("two", [*prompt, *told, 1, 2], Sampling(max_tokens=1))) == 48
    await engine.stop()


async def test_end_of_text_ends_the_answer_unless_ignored() -> None:
    plain = an_engine()
    await plain.start()
    told = await answer(plain, EngineRequest("r", [1, 2], Sampling(max_tokens=6)))
    await plain.stop()
    ending = an_engine(ScriptedModel(eos_token_id=told[4]))
    await ending.start()
    steps = [step async for step in ending.generate(EngineRequest("r", [1, 2], Sampling(max_tokens=6)))]
    assert (steps[-1].finish, steps[-1].stop_token_id) == (FinishReason.STOP, told[4])
    assert await answer(ending, EngineRequest("r", [1, 2], Sampling(max_tokens=6, ignore_eos=True))) == told
    await ending.stop()


async def test_prefill_whose_first_token_ends_the_answer_tells_none() -> None:
    engine = an_engine()
    await engine.start()
    first = (await engine.prefill(EngineRequest("r", [1, 2]))).first_token
    assert first is not None
    stopping = EngineRequest("r", [1, 2], Sampling(stop_token_ids=(first,)))
    assert (await engine.prefill(stopping)).first_token is None
    await engine.stop()


async def test_requests_over_the_limit_wait_their_turn() -> None:
    engine = an_engine(ScriptedModel(max_running_requests=2, max_context_tokens=256))
    await engine.start()
    work = [asyncio.create_task(answer(engine, EngineRequest(f"r{i}", [i], Sampling(max_tokens=20)))) for i in range(5)]
    while (load := engine.load()).running_requests == 0:
        await asyncio.sleep(0)
    assert (load.running_requests, load.waiting_requests) == (2, 3)
    assert [len(told) for told in await asyncio.gather(*work)] == [20] * 5
    await engine.stop()


async def test_answers_that_outgrow_memory_wait_and_come_out_the_same() -> None:
    roomy = an_engine(ScriptedModel(block_tokens=16, max_context_tokens=256, max_cached_tokens=4096))
    tight = an_engine(ScriptedModel(block_tokens=16, max_context_tokens=256, max_cached_tokens=300))
    told = []
    for engine in (roomy, tight):
        await engine.start()
        requests = [EngineRequest(f"r{i}", [i] * 20, Sampling(max_tokens=200)) for i in range(4)]
        told.append(await asyncio.gather(*(answer(engine, request) for request in requests)))
        await engine.stop()
    assert told[0] == told[1]


async def test_lost_store_is_told_and_everything_is_computed_the_same() -> None:
    is_lost = False
    engine = ScriptedEngine(
        SMALL, clock=SystemClock(), store=BlockStore(SharedMemory()), faults=Faults(loses_store=lambda: is_lost)
    )
    await engine.start()
    request = EngineRequest("r", [4] * 40, Sampling(max_tokens=4))
    told = await answer(engine, request)
    is_lost = True
    assert engine.load().is_store_lost
    assert await hit(engine, request) == 0
    assert await answer(engine, request) == told
    other = EngineRequest("s", [5] * 40)
    await engine.prefill(other)
    is_lost = False
    assert not engine.load().is_store_lost
    assert (await engine.prefill(other)).hit_tokens == 0
    assert await hit(engine, request) == 32
    await engine.stop()


async def test_step_lasts_as_long_as_the_timing_says() -> None:
    clock = VirtualClock()
    engine = an_engine(clock=clock, timing=Timing(prefill_tokens_per_s=100, base_step_s=0.5, step_s_per_request=0.25))
    await engine.start()
    assert await within(clock, answer(engine, EngineRequest("r", [1] * 50, Sampling(max_tokens=1))), 1.25)
    assert await within(clock, answer(engine, EngineRequest("s", [2], Sampling(max_tokens=3))), 3 * 0.75)
    await engine.stop()


async def test_load_takes_its_bytes_and_does_not_hold_up_others() -> None:
    clock, shared = VirtualClock(), SharedMemory()
    warm = an_engine(store=BlockStore(shared))
    await warm.start()
    prompt = list(range(33))
    await warm.prefill(EngineRequest("r", prompt))
    await warm.stop()
    store = BlockStore(shared, block_bytes=1000)
    engine = an_engine(clock=clock, store=store, timing=Timing(load_bytes_per_s=100, base_step_s=1.0))
    await engine.start()
    loading = asyncio.create_task(answer(engine, EngineRequest("r", prompt, Sampling(max_tokens=1))))
    await clock.advance(1)
    assert await within(clock, answer(engine, EngineRequest("s", [7], Sampling(max_tokens=2))), 2)
    assert not loading.done()
    await clock.advance(20)
    assert loading.done()
    await engine.stop()


async def test_abort_while_a_load_is_under_way_ends_at_once() -> None:
    clock, shared = VirtualClock(), SharedMemory()
    warm = an_engine(store=BlockStore(shared))
    await warm.start()
    await warm.prefill(EngineRequest("r", [3] * 40))
    await warm.stop()
    engine = an_engine(clock=clock, store=BlockStore(shared), timing=Timing(load_bytes_per_s=1))
    await engine.start()
    reading = asyncio.create_task(answer(engine, EngineRequest("r", [3] * 40)))
    await clock.advance(1)
    await engine.abort("r")
    await clock.advance(0)
    assert await reading == []
    assert engine.aborted_requests == 1
    await engine.stop()


def test_model_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError):
        ScriptedModel(max_context_tokens=100, max_cached_tokens=99)
    with pytest.raises(ValueError):
        ScriptedModel(max_running_requests=10, max_step_tokens=9)


async def test_engine_from_settings_serves_and_its_pool_names_what_can_be_shared() -> None:
    chosen = EngineSettings(kind="scripted", model="models/tiny", max_context_tokens=512)
    engine = build_scripted_engine(chosen)
    await engine.start()
    assert engine.description.model == "tiny"
    assert len(await answer(engine, EngineRequest("r", [1], Sampling(max_tokens=3)))) == 3
    await engine.stop()
    assert build_scripted_engine(chosen).description.pool == engine.description.pool
    other = chosen.model_copy(update={"dtype": "float32"})
    assert build_scripted_engine(other).description.pool != engine.description.pool
