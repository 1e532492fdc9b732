import asyncio

from shoal_decode.acceptance import Limits, Occupancy, Refusal
from shoal_decode.placements import Placements
from shoal_decode.token_stream import Outcome, Placement, StreamEnd, TokenStream
from shoal_engine.api import EngineRequest, Sampling, Step
from shoal_engine.scripted import BlockStore, ScriptedEngine, ScriptedModel, SharedMemory
from shoal_runtime.clock import SystemClock


class Sink:
    def __init__(self) -> None:
        self.end: StreamEnd | None = None

    def step(self, step: Step) -> bool:
        return True

    def finished(self, end: StreamEnd) -> None:
        self.end = end


class Lab:
    def __init__(self) -> None:
        self.engine = ScriptedEngine(ScriptedModel(pool="pool"), clock=SystemClock(), store=BlockStore(SharedMemory()))
        self.tasks: list[asyncio.Task[None]] = []
        limits = Limits("pool", 8192, max_running_requests=2, max_cached_tokens=9000, max_local_prefill_tokens=500)
        self.placements = Placements(self.engine, limits, lambda work: self.tasks.append(asyncio.create_task(work)))

    def place(self, max_tokens: int | None = None, tokens: int = 10, is_local: bool = False) -> TokenStream | Refusal:
        request = EngineRequest("same", range(tokens), Sampling(max_tokens=max_tokens))
        return self.placements.place(Placement(request, "pool", is_local, 30), Sink())


async def test_burst_of_one_turn_is_judged_by_what_was_just_taken() -> None:
    lab = Lab()
    await lab.engine.start()
    first, second = lab.place(), lab.place()
    assert isinstance(first, TokenStream)
    assert isinstance(second, TokenStream)
    assert lab.place() is Refusal.TOO_MANY_REQUESTS
    assert lab.placements.occupancy() == Occupancy(running_requests=2, cached_tokens=20)
    first.end(Outcome.CANCELLED)
    second.end(Outcome.CANCELLED)
    await asyncio.gather(*lab.tasks)
    assert lab.placements.occupancy() == Occupancy()
    await lab.engine.stop()


async def test_request_placed_again_does_not_meet_its_own_end_in_the_engine() -> None:
    lab = Lab()
    await lab.engine.start()
    streams = [lab.place(max_tokens=3), lab.place(max_tokens=3)]
    await asyncio.gather(*lab.tasks)
    assert all(isinstance(stream, TokenStream) and stream.answer_tokens == 3 for stream in streams)
    await lab.engine.stop()


async def test_local_prefill_counts_until_its_first_step() -> None:
    lab = Lab()
    await lab.engine.start()
    stream = lab.place(tokens=400, is_local=True)
    assert isinstance(stream, TokenStream)
    assert lab.placements.occupancy().local_prefill_tokens == 400
    assert lab.place(tokens=200, is_local=True) is Refusal.NO_LOCAL_PREFILL
    while stream.hit_tokens is None:
        await asyncio.sleep(0)
    assert lab.placements.occupancy().local_prefill_tokens == 0
    stream.end(Outcome.CANCELLED)
    await asyncio.gather(*lab.tasks)
    await lab.engine.stop()


async def test_drain_takes_nothing_new_and_waits_for_what_runs() -> None:
    lab = Lab()
    await lab.engine.start()
    lab.place(max_tokens=20)
    draining = asyncio.create_task(lab.placements.drain())
    await asyncio.sleep(0)
    assert lab.place() is Refusal.LEAVING
    assert not draining.done()
    await draining
    assert lab.placements.occupancy() == Occupancy(is_leaving=True)
    await lab.engine.stop()
