"""Prefetching beside a job: only for one that waits and hits outside of DRAM; never waited for, never left behind."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from shoal_engine.api import EngineDescription, EngineLoad, EngineRequest, Prefetched
from shoal_engine.scripted import BlockStore, ScriptedEngine, ScriptedModel, SharedMemory, Timing
from shoal_prefill.prefetch import MAX_AT_ONCE, Prefetches
from shoal_testkit.clock import VirtualClock, settle

BLOCK_BYTES = 1000
MODEL = ScriptedModel(pool="pool", max_context_tokens=4000, max_step_tokens=256)


@dataclass(frozen=True)
class Job:
    """What a job says of its hit."""

    request: EngineRequest
    expected_hit_tokens: int | None
    dram_store_ids: tuple[str, ...]


def a_job(first_token: int = 0, tokens: int = 300, hit_tokens: int | None = 256, dram: tuple[str, ...] = ()) -> Job:
    token_ids = range(first_token, first_token + tokens)
    return Job(EngineRequest(f"r{first_token}", token_ids), hit_tokens, dram)


class NamedEngine(ScriptedEngine):
    """Its store has a name without reporting to anybody."""

    is_store_lost = False

    @property
    def description(self) -> EngineDescription:
        return replace(super().description, store_instance_id="node-a")

    def load(self) -> EngineLoad:
        return replace(super().load(), is_store_lost=self.is_store_lost)


@dataclass
class Worker:
    """An engine that loads a block a second, whose store has blocks on the shared level only."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    shared: SharedMemory = field(default_factory=SharedMemory)

    def __post_init__(self) -> None:
        self.store = BlockStore(self.shared, block_bytes=BLOCK_BYTES)
        timing = Timing(prefill_tokens_per_s=100, load_bytes_per_s=BLOCK_BYTES)
        self.engine = NamedEngine(MODEL, clock=self.clock, store=self.store, timing=timing)
        self.prefetches = Prefetches(self.engine)
        self.running: list[asyncio.Task[Prefetched]] = []

    async def compute(self, job: Job) -> None:
        """Have it stored on the shared level."""
        computing = asyncio.create_task(self.engine.prefill(replace(job.request, request_id="before")))
        await self.clock.advance(60)
        await computing
        self.store.drop_l1()

    def spawn(self, job: Job) -> "asyncio.Task[Prefetched]":
        async def work() -> Prefetched:
            async with self.prefetches.beside(job) as prefetch:
                await self.engine.prefill(job.request)
            return prefetch.told

        self.running.append(asyncio.create_task(work()))
        return self.running[-1]

    @property
    def dram_blocks(self) -> int:
        return len(self.store.objects("l1"))


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    await worker.engine.start()
    yield worker
    await worker.engine.stop()
    if worker.running:
        await asyncio.wait(worker.running)


async def test_job_behind_others_has_its_blocks_in_dram_when_its_turn_comes(worker: Worker) -> None:
    job = a_job()
    await worker.compute(job)
    worker.spawn(a_job(10_000, tokens=1000))
    await settle()
    waiting = worker.spawn(job)
    await worker.clock.advance(3)
    assert worker.dram_blocks >= 2 and not waiting.done()
    await worker.clock.advance(9)
    assert waiting.done()
    told = await waiting
    assert told.blocks == 2
    assert told.took_ms >= 2000  # what its turn did not take


async def test_job_that_starts_at_once_is_loaded_by_the_engine_alone(worker: Worker) -> None:
    job = a_job()
    await worker.compute(job)
    starting = worker.spawn(job)
    await worker.clock.advance(5)
    assert await starting == Prefetched()
    assert worker.dram_blocks == 0


@pytest.mark.parametrize(
    "job",
    [a_job(hit_tokens=None), a_job(hit_tokens=0), a_job(dram=("node-b", "node-a"))],
    ids=["unknown", "no hit", "in DRAM"],
)
async def test_nothing_is_prefetched_without_a_hit_or_when_dram_has_it(worker: Worker, job: Job) -> None:
    await worker.compute(job)
    worker.spawn(a_job(10_000, tokens=1000))
    await settle()
    waiting = worker.spawn(job)
    await worker.clock.advance(20)
    assert await waiting == Prefetched()


async def test_nothing_is_prefetched_while_the_store_is_lost(worker: Worker) -> None:
    job = a_job()
    await worker.compute(job)
    worker.spawn(a_job(10_000, tokens=1000))
    await settle()
    worker.engine.is_store_lost = True
    waiting = worker.spawn(job)
    await worker.clock.advance(20)
    assert await waiting == Prefetched()


async def test_what_has_not_come_when_the_job_ends_counts_as_nothing(worker: Worker) -> None:
    job = a_job(tokens=10 * 128 + 3)
    await worker.compute(job)
    worker.spawn(a_job(10_000, tokens=300))
    await settle()
    waiting = worker.spawn(job)
    await worker.clock.advance(2)
    await worker.engine.abort("r0")  # in the middle of the prefetch
    await worker.clock.advance(1)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await worker.clock.advance(20)
    assert worker.dram_blocks == 2  # of the other job


async def test_cancelled_job_leaves_no_prefetch_behind(worker: Worker) -> None:
    job = a_job()
    await worker.compute(job)
    worker.spawn(a_job(10_000, tokens=1000))
    await settle()
    waiting = worker.spawn(job)
    await worker.clock.advance(1)
    waiting.cancel()
    await settle()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "prefetch"] == []


async def test_only_some_are_prefetched_at_once_first_come_first_served(worker: Worker) -> None:
    jobs = [a_job(1000 * number) for number in range(4)]
    for job in jobs:
        await worker.compute(job)
    worker.spawn(a_job(10_000, tokens=3000))
    await settle()
    for job in jobs:
        worker.spawn(job)
    computed = 2  # whole blocks of the first job in each step of 256 tokens, 2.56 s long
    await worker.clock.advance(2.5)
    assert worker.dram_blocks == MAX_AT_ONCE * 2
    await worker.clock.advance(2.5)
    assert worker.dram_blocks == computed + 4 * 2
