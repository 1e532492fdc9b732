import asyncio
from collections.abc import AsyncGenerator

import pytest

from shoal_decode.token_stream import Outcome, Placement, StreamEnd, TokenStream
from shoal_engine.api import (
    ConstraintRefused,
    Engine,
    EngineFailed,
    EngineRequest,
    FinishReason,
    RequestRefused,
    Sampling,
    Step,
)
from shoal_engine.scripted import BlockStore, Faults, ScriptedEngine, ScriptedModel, SharedMemory
from shoal_runtime.clock import SystemClock


class Sink:
    def __init__(self, max_tokens: int = 10_000) -> None:
        self.steps: list[Step] = []
        self.ends: list[StreamEnd] = []
        self.began = asyncio.Event()
        self._max_tokens = max_tokens

    def step(self, step: Step) -> bool:
        assert not self.ends
        self.steps.append(step)
        self.began.set()
        return len(self.token_ids) <= self._max_tokens

    def finished(self, end: StreamEnd) -> None:
        self.ends.append(end)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for step in self.steps for token_id in step.token_ids]

    @property
    def end(self) -> StreamEnd:
        [end] = self.ends
        return end


class Broken(ScriptedEngine):
    """Raises on the first read."""

    def __init__(self, error: Exception) -> None:
        super().__init__(ScriptedModel(), clock=SystemClock(), store=BlockStore(SharedMemory()))
        self._error = error

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Step, None]:
        raise self._error
        yield Step(())


def a_placement(max_tokens: int | None = 5, budget_s: float = 30, resumed: tuple[int, ...] = ()) -> Placement:
    request = EngineRequest("r", [1, 2, 3], Sampling(max_tokens=max_tokens), resumed_token_ids=resumed)
    return Placement(request, "pool", False, budget_s)


async def an_engine(faults: Faults | None = None) -> ScriptedEngine:
    engine = ScriptedEngine(ScriptedModel(), clock=SystemClock(), store=BlockStore(SharedMemory()), faults=faults)
    await engine.start()
    return engine


async def end_early(engine: Engine, *reasons: Outcome) -> Sink:
    sink = Sink()
    stream = TokenStream(engine, a_placement(max_tokens=None), sink)
    task = asyncio.create_task(stream.run())
    await sink.began.wait()
    for reason in reasons:
        stream.end(reason)
    await task
    stream.end(Outcome.LOST)
    return sink


async def test_stream_ends_as_its_engine_does() -> None:
    engine, sink = await an_engine(), Sink()
    stream = TokenStream(engine, a_placement(resumed=(7,)), sink)
    await stream.run()
    assert sink.end == StreamEnd(Outcome.LENGTH, completion_tokens=5)
    assert len(sink.token_ids) == 4
    assert (stream.hit_tokens, stream.cached_tokens) == (0, 8)
    await engine.stop()
    assert engine.aborted_requests == 0


@pytest.mark.parametrize("reason", [Outcome.CANCELLED, Outcome.LOST, Outcome.LEAVING])
async def test_whatever_ends_it_early_aborts_once_and_the_first_reason_wins(reason: Outcome) -> None:
    engine = await an_engine()
    sink = await end_early(engine, reason, Outcome.LOST, Outcome.CANCELLED)
    assert sink.end.outcome is reason
    assert sink.end.completion_tokens == len(sink.token_ids)
    assert engine.aborted_requests == 1
    await engine.stop()


async def test_ended_before_it_ran_never_reaches_the_engine() -> None:
    engine, sink = await an_engine(), Sink()
    stream = TokenStream(engine, a_placement(), sink)
    stream.end(Outcome.CANCELLED)
    await stream.run()
    assert sink.end == StreamEnd(Outcome.CANCELLED, 0)
    assert engine.aborted_requests == 0
    await engine.stop()


async def test_spent_budget_aborts() -> None:
    engine, sink = await an_engine(), Sink()
    await TokenStream(engine, a_placement(max_tokens=None, budget_s=0.01), sink).run()
    assert sink.end.outcome is Outcome.BUDGET_SPENT
    assert engine.aborted_requests == 1
    await engine.stop()


async def test_reader_that_is_too_slow_ends_its_own_stream() -> None:
    engine, sink = await an_engine(), Sink(max_tokens=20)
    await TokenStream(engine, a_placement(max_tokens=None), sink).run()
    assert sink.end.outcome is Outcome.UNREAD
    assert engine.aborted_requests == 1
    await engine.stop()


async def test_engine_that_stops_is_not_the_gateways_cancel() -> None:
    engine, sink = await an_engine(), Sink()
    running = asyncio.create_task(TokenStream(engine, a_placement(max_tokens=None), sink).run())
    await sink.began.wait()
    await engine.stop()
    await running
    assert sink.end.outcome is Outcome.LEAVING


async def test_process_that_closes_still_tells_the_end() -> None:
    engine, sink = await an_engine(), Sink()
    running = asyncio.create_task(TokenStream(engine, a_placement(max_tokens=None), sink).run())
    await sink.began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sink.end.outcome is Outcome.LEAVING
    assert engine.aborted_requests == 1
    await engine.stop()


@pytest.mark.logs_error("stream.crashed")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (EngineFailed("gone"), Outcome.ENGINE_FAILED),
        (RequestRefused("too odd"), Outcome.ENGINE_REFUSED),
        (ConstraintRefused("make it simpler"), Outcome.ENGINE_REFUSED),
        (ZeroDivisionError(), Outcome.CRASHED),
        (TimeoutError(), Outcome.CRASHED),
    ],
)
async def test_every_failure_of_the_engine_is_an_outcome(error: Exception, outcome: Outcome) -> None:
    sink = Sink()
    await TokenStream(Broken(error), a_placement(), sink).run()
    assert sink.end.outcome is outcome
    assert sink.end.reason == ("make it simpler" if isinstance(error, ConstraintRefused) else None)


async def test_stop_token_is_told() -> None:
    engine, sink = await an_engine(), Sink()
    request = EngineRequest("r", [1, 2, 3], Sampling(max_tokens=1))
    async for step in engine.generate(request):
        first = step.token_ids[0]
        assert step.finish is FinishReason.LENGTH
    stopping = EngineRequest("r", [1, 2, 3], Sampling(stop_token_ids=(first,)))
    await TokenStream(engine, Placement(stopping, "pool", False, 30), sink).run()
    assert sink.end == StreamEnd(Outcome.STOP, 0, first)
    await engine.stop()
