"""One job from taken to answered: every way it can end, on the scripted engine and virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest

from shoal_contracts.errors import ShoalError, Unavailable
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_engine.api import EngineRequest
from shoal_engine.scripted import BlockStore, Faults, ScriptedEngine, ScriptedModel, SharedMemory, Timing
from shoal_kvblocks import block_hashes
from shoal_prefill.prefill_job import (
    MAX_REMEMBERED_CANCELS,
    Answer,
    JobLimits,
    Outcome,
    Prefilled,
    PrefillJob,
    PrefillJobs,
    Settled,
    Stored,
)
from shoal_testkit.clock import VirtualClock, settle

TOKENS_PER_S = 100.0
MODEL = ScriptedModel(pool="pool", block_tokens=128, max_context_tokens=2000)


def a_job(
    tokens: int = 200, request_id: str = "r1", pool: str = "pool", budget_s: float = 600.0, caller: str = "gateway-a"
) -> PrefillJob:
    token_ids = range(tokens)
    return PrefillJob(pool, EngineRequest(request_id, token_ids), pack_u32(token_ids), budget_s, caller)


@dataclass
class FakeDelivery:
    job: PrefillJob
    number: int = 1
    is_bus_there: bool = True
    events: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def span(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    async def answer(self, answer: Answer) -> bool:
        if self.is_bus_there:
            self.answers.append(answer)
            self.events.append("answer")
        return self.is_bus_there

    async def claim(self) -> None:
        self.events.append("claim")

    async def ack(self) -> None:
        self.events.append("ack")

    async def give_back(self) -> None:
        self.events.append("give_back")

    async def terminate(self) -> None:
        self.events.append("terminate")

    @property
    def ends(self) -> list[str]:
        return [event for event in self.events if event != "claim"]

    @property
    def failure(self) -> pb.ErrorCode.ValueType:
        [answer] = self.answers
        assert isinstance(answer, ShoalError)
        return answer.code

    @property
    def done(self) -> Prefilled:
        [answer] = self.answers
        assert isinstance(answer, Prefilled)
        return answer


@dataclass
class FakeIndex:
    """Says ``is_there`` after ``delay_s``, or that nobody can tell."""

    clock: VirtualClock
    is_there: bool = True
    is_away: bool = False
    delay_s: float = 0.0
    asked: list[bytes] = field(default_factory=list)

    async def is_stored(self, job: PrefillJob, block_hash: bytes, wait_s: float) -> bool:
        if self.is_away:
            raise Unavailable(pb.UNAVAILABLE, "no kvindex instance is ready")
        self.asked.append(block_hash)
        await self.clock.sleep(min(self.delay_s, wait_s))
        return self.is_there and self.delay_s <= wait_s


@dataclass
class Worker:
    clock: VirtualClock
    engine: ScriptedEngine
    index: FakeIndex
    jobs: PrefillJobs
    settled: list[Settled]

    def spawn(self, delivery: FakeDelivery) -> "asyncio.Task[None]":
        return asyncio.create_task(self.jobs.work(delivery))

    async def work(self, delivery: FakeDelivery, *, within_s: float = 60.0) -> None:
        task = self.spawn(delivery)
        await self.clock.advance(within_s)
        assert task.done()
        await task

    @property
    def outcome(self) -> Outcome:
        return self.settled[-1].outcome


@contextlib.asynccontextmanager
async def a_worker(faults: Faults | None = None, handoff_wait_s: float = 0.5) -> AsyncIterator[Worker]:
    clock, settled = VirtualClock(), list[Settled]()
    timing = Timing(prefill_tokens_per_s=TOKENS_PER_S)
    engine = ScriptedEngine(MODEL, clock=clock, store=BlockStore(SharedMemory()), timing=timing, faults=faults)
    index = FakeIndex(clock)
    await engine.start()
    jobs = PrefillJobs(engine, index, JobLimits(3, handoff_wait_s), clock, settled.append)
    yield Worker(clock, engine, index, jobs, settled)
    await engine.stop()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with a_worker() as worker:
        yield worker


async def test_a_job_is_computed_answered_and_only_then_acknowledged(worker: Worker) -> None:
    delivery = FakeDelivery(a_job(200))
    await worker.work(delivery)
    assert delivery.ends == ["answer", "ack"]
    assert (delivery.done.hit_tokens, delivery.done.miss_tokens, delivery.done.stored) == (0, 200, Stored.YES)
    assert delivery.done.first_token is not None
    assert 1900 <= delivery.done.compute_ms <= 2200
    assert worker.outcome is Outcome.DONE and len(worker.jobs) == 0


async def test_the_last_whole_block_is_what_is_waited_for(worker: Worker) -> None:
    job = a_job(300)
    await worker.work(FakeDelivery(job))
    assert worker.index.asked == [block_hashes(job.packed_token_ids, 128)[-32:]]


async def test_a_hit_counts_and_a_prompt_without_a_new_whole_block_waits_for_nothing(worker: Worker) -> None:
    await worker.work(FakeDelivery(a_job(300)))
    again = FakeDelivery(a_job(300, "r2"))
    await worker.work(again)
    assert (again.done.hit_tokens, again.done.miss_tokens, again.done.stored) == (256, 44, Stored.NONE)
    assert len(worker.index.asked) == 1


async def test_a_prompt_shorter_than_a_block_waits_for_nothing(worker: Worker) -> None:
    delivery = FakeDelivery(a_job(127))
    await worker.work(delivery)
    assert delivery.done.stored is Stored.NONE and worker.index.asked == []


async def test_a_slow_store_is_waited_for_briefly(worker: Worker) -> None:
    worker.index.delay_s = 30
    delivery = FakeDelivery(a_job())
    await worker.work(delivery)
    assert delivery.done.stored is Stored.UNKNOWN
    assert delivery.done.store_wait_ms == 500


async def test_an_index_that_is_away_costs_nothing_but_the_knowledge(worker: Worker) -> None:
    worker.index.is_away = True
    delivery = FakeDelivery(a_job())
    await worker.work(delivery)
    assert (delivery.done.stored, delivery.done.store_wait_ms) == (Stored.UNKNOWN, 0)
    assert worker.outcome is Outcome.DONE


async def test_a_running_job_is_claimed_each_second(worker: Worker) -> None:
    delivery = FakeDelivery(a_job(1000))
    await worker.work(delivery)
    assert 9 <= delivery.events.count("claim") <= 11


@pytest.mark.parametrize(
    ("delivery", "code"),
    [
        (FakeDelivery(a_job(), number=4), pb.TOO_MANY_DELIVERIES),
        (FakeDelivery(a_job(pool="other")), pb.POOL_MISMATCH),
        (FakeDelivery(a_job(2000)), pb.CONTEXT_LENGTH_EXCEEDED),
    ],
)
async def test_what_this_worker_will_not_compute_is_answered_and_terminated(
    worker: Worker, delivery: FakeDelivery, code: pb.ErrorCode.ValueType
) -> None:
    await worker.work(delivery, within_s=0)
    assert delivery.failure == code
    assert delivery.ends == ["answer", "terminate"]
    assert worker.outcome is Outcome.FAILED


async def test_a_prompt_that_is_too_long_is_told_both_numbers(worker: Worker) -> None:
    delivery = FakeDelivery(a_job(3000))
    await worker.work(delivery)
    [answer] = delivery.answers
    assert "3000" in str(answer) and "2000" in str(answer)


async def test_a_budget_that_is_spent_aborts_once(worker: Worker) -> None:
    delivery = FakeDelivery(a_job(budget_s=0.01))
    task = worker.spawn(delivery)
    await asyncio.sleep(0.05)
    await worker.clock.advance(0)
    await task
    assert delivery.failure == pb.DEADLINE_EXCEEDED
    assert worker.engine.aborted_requests == 1


async def test_a_cancel_aborts_once_and_nobody_answers(worker: Worker) -> None:
    delivery = FakeDelivery(a_job())
    task = worker.spawn(delivery)
    await worker.clock.advance(0.5)
    worker.jobs.cancel("r1")
    worker.jobs.cancel("r1")
    await settle()
    await task
    assert delivery.ends == ["terminate"] and delivery.answers == []
    assert worker.engine.aborted_requests == 1
    assert worker.outcome is Outcome.CANCELLED


async def test_a_cancel_while_waiting_for_the_store_ends_the_job_too(worker: Worker) -> None:
    worker.index.delay_s = 30
    delivery = FakeDelivery(a_job(200))
    task = worker.spawn(delivery)
    await worker.clock.advance(2.2)
    worker.jobs.cancel("r1")
    await settle()
    await task
    assert delivery.ends == ["terminate"] and worker.engine.aborted_requests == 0


async def test_a_cancel_that_overtakes_its_job_ends_it_before_anything_is_computed(worker: Worker) -> None:
    worker.jobs.cancel("r1")
    delivery = FakeDelivery(a_job())
    await worker.work(delivery, within_s=0)
    assert delivery.ends == ["terminate"]
    later = FakeDelivery(a_job())
    await worker.work(later)
    assert later.ends == ["answer", "ack"]


async def test_remembered_cancels_are_bounded(worker: Worker) -> None:
    for number in range(MAX_REMEMBERED_CANCELS + 1):
        worker.jobs.cancel(f"r{number}")
    first, last = FakeDelivery(a_job(request_id="r0")), FakeDelivery(a_job(request_id=f"r{MAX_REMEMBERED_CANCELS}"))
    await worker.work(first)
    await worker.work(last)
    assert (first.ends, last.ends) == (["answer", "ack"], ["terminate"])


async def test_a_second_delivery_joins_the_running_one_and_is_settled_with_it(worker: Worker) -> None:
    first, second = FakeDelivery(a_job()), FakeDelivery(a_job(), number=2)
    tasks = [worker.spawn(first), worker.spawn(second)]
    await worker.clock.advance(10)
    await asyncio.gather(*tasks)
    assert (first.ends, second.ends) == (["answer", "ack"], ["ack"])
    assert "claim" in second.events
    assert len(worker.settled) == 1


async def test_a_worker_that_leaves_gives_its_job_back(worker: Worker) -> None:
    delivery = FakeDelivery(a_job())
    task = worker.spawn(delivery)
    await worker.clock.advance(0.5)
    task.cancel()
    await settle()
    assert task.cancelled() and delivery.ends == ["give_back"]
    assert worker.engine.aborted_requests == 1 and worker.outcome is Outcome.GIVEN_BACK


async def test_an_engine_that_stops_gives_its_job_back(worker: Worker) -> None:
    delivery = FakeDelivery(a_job())
    task = worker.spawn(delivery)
    await worker.clock.advance(0.5)
    await worker.engine.stop()
    await settle()
    await task
    assert delivery.ends == ["give_back"]


async def test_an_engine_that_died_gives_its_job_back_for_another_worker() -> None:
    async with a_worker(Faults(breaks_step=lambda step: step == 0)) as worker:
        delivery = FakeDelivery(a_job())
        await worker.work(delivery)
        assert delivery.ends == ["give_back"] and worker.outcome is Outcome.GIVEN_BACK


async def test_an_answer_that_cannot_be_sent_leaves_the_job_to_the_queue(worker: Worker) -> None:
    delivery = FakeDelivery(a_job(), is_bus_there=False)
    await worker.work(delivery)
    assert delivery.ends == [] and worker.outcome is Outcome.ANSWER_LOST


async def test_no_wait_for_the_store_when_it_is_switched_off() -> None:
    async with a_worker(handoff_wait_s=0) as worker:
        delivery = FakeDelivery(a_job())
        await worker.work(delivery)
        assert delivery.done.stored is Stored.UNKNOWN and worker.index.asked == []


@pytest.mark.parametrize("live", [{"gateway-b": 1}, {"gateway-a": 2, "gateway-b": 1}], ids=["silent", "started anew"])
async def test_jobs_of_a_lost_gateway_are_aborted_once_and_those_of_others_go_on(
    worker: Worker, live: dict[str, int]
) -> None:
    lost, kept = FakeDelivery(a_job(request_id="lost")), FakeDelivery(a_job(request_id="kept", caller="gateway-b"))
    worker.jobs.see_callers({"gateway-a": 1, "gateway-b": 1})
    tasks = [worker.spawn(lost), worker.spawn(kept)]
    await worker.clock.advance(1.0)
    worker.jobs.see_callers(live)
    worker.jobs.see_callers(live)
    await worker.clock.advance(60.0)
    await asyncio.gather(*tasks)
    assert (lost.ends, kept.ends) == (["answer", "terminate"], ["answer", "ack"])
    assert lost.failure == pb.UNAVAILABLE  # for a gateway that was only frozen
    assert sorted(settled.outcome.value for settled in worker.settled) == ["caller_lost", "done"]
    assert worker.engine.aborted_requests == 1


async def test_a_job_that_a_lost_gateway_left_in_the_queue_is_not_computed(worker: Worker) -> None:
    worker.jobs.see_callers({"gateway-a": 1})
    worker.jobs.see_callers({})
    left = FakeDelivery(a_job())
    await worker.work(left)
    assert left.ends == ["answer", "terminate"]
    assert worker.engine.aborted_requests == 0 and worker.engine.load().running_requests == 0
    worker.jobs.see_callers({"gateway-a": 1})  # it was only cut off
    again = FakeDelivery(a_job())
    await worker.work(again)
    assert again.ends == ["answer", "ack"]


async def test_a_gateway_that_was_never_heard_is_not_lost(worker: Worker) -> None:
    worker.jobs.see_callers({"gateway-b": 1})
    delivery = FakeDelivery(a_job())
    await worker.work(delivery)
    assert delivery.ends == ["answer", "ack"]
