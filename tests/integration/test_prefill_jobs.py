"""Prefill workers behind a real JetStream queue, on the scripted engine: what the gateway sees of DESIGN decision 3."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal_contracts import subjects
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, kvindex_pb2, kvindex_pb2_grpc, prefill_pb2
from shoal_engine.scripted import BlockStore, Faults, ScriptedEngine, ScriptedModel, SharedMemory, Timing
from shoal_prefill import metrics
from shoal_prefill.service import PrefillService
from shoal_prefill.settings import PrefillSettings
from shoal_runtime import nats as runtime_nats
from shoal_runtime.clock import SystemClock
from shoal_runtime.grpc import create_server, serve
from shoal_runtime.presence import Announcer, Fleet, Presence
from shoal_runtime.process import Process, new_process, running
from shoal_runtime.queues import ACK_WAIT_S, JobQueue, ensure_prefill_queue
from shoal_runtime.servers import ServerCommand
from shoal_runtime.settings import ServiceSettings
from shoal_testkit.builders import a_prefill_job
from shoal_testkit.processes import process_running, service_command, start_process
from shoal_testkit.servers import NatsRunning, nats_running
from shoal_testkit.waits import until

MILLION = 1_000_000
TIER = "all"


@dataclass
class Gateway:
    """Publishes jobs and hears answers, as a gateway does."""

    process: Process
    bus: runtime_nats.NatsConnection
    pool: str
    queue: JobQueue[prefill_pb2.PrefillJob]
    answers: list[prefill_pb2.PrefillAnswer] = field(default_factory=list)

    def a_job(self, request_id: str, prompt_tokens: int = 300, seed: int = 0) -> prefill_pb2.PrefillJob:
        subject = subjects.prefill_answer(self.process.instance_id)
        return a_prefill_job(prompt_tokens, seed=seed, request_id=request_id, answer_subject=subject, pool=self.pool)

    async def publish(self, job: prefill_pb2.PrefillJob, attempt: int = 1) -> int:
        return await self.queue.publish(job, job_id=job.request_id, attempt=attempt, expires_s=60)

    async def answer(self, number: int = 1, timeout_s: float = 15.0) -> prefill_pb2.PrefillAnswer:
        await until(lambda: len(self.answers) >= number, timeout_s)
        return self.answers[number - 1]

    async def ask(self, job: prefill_pb2.PrefillJob) -> prefill_pb2.PrefillAnswer:
        await self.publish(job)
        return await self.answer()

    async def cancel(self, request_id: str) -> None:
        cancel = prefill_pb2.PrefillCancel(request_id=request_id)
        await self.bus.publish(subjects.prefill_cancel(self.pool), cancel)

    async def queued_jobs(self) -> int:
        info = await self.bus.jetstream.stream_info(subjects.prefill_stream(self.pool, TIER))
        return int(info.state.messages)


@contextlib.asynccontextmanager
async def a_gateway(nats: NatsRunning, pool: str) -> AsyncIterator[Gateway]:
    process = new_process("gateway", ServiceSettings())
    try:
        bus = await runtime_nats.connect(process, nats.url)
        gateway = Gateway(process, bus, pool, await ensure_prefill_queue(bus, pool, TIER))
        await bus.subscribe(
            subjects.prefill_answer(process.instance_id), prefill_pb2.PrefillAnswer, gateway.answers.append
        )
        yield gateway
    finally:
        await process.tasks.close()
        await process.stack.aclose()


@dataclass
class Index(kvindex_pb2_grpc.KvIndexServicer):
    """A kvindex that has seen every block, or none."""

    is_stored: bool = True
    asked: list[kvindex_pb2.AwaitRequest] = field(default_factory=list)

    async def Await(self, request: kvindex_pb2.AwaitRequest, context: object) -> kvindex_pb2.AwaitReply:  # type: ignore[override]
        self.asked.append(request)
        return kvindex_pb2.AwaitReply(is_stored=self.is_stored)


@contextlib.asynccontextmanager
async def an_index(nats: NatsRunning) -> AsyncIterator[Index]:
    process, index = new_process("kvindex", ServiceSettings()), Index()
    try:
        bus = await runtime_nats.connect(process, nats.url)
        server = create_server(process)
        kvindex_pb2_grpc.add_KvIndexServicer_to_server(index, server)
        address = await serve(process, server)
        await Announcer(process, bus, fleet_pb2.KVINDEX, lambda: Presence(address)).start()
        yield index
    finally:
        await process.tasks.close()
        await process.stack.aclose()


@dataclass
class Worker:
    engine: ScriptedEngine
    process: Process


@contextlib.asynccontextmanager
async def a_worker(
    nats: NatsRunning,
    pool: str,
    *,
    tokens_per_s: float = 1e9,
    context_tokens: int = 8192,
    max_step_tokens: int = 2048,
    faults: Faults | None = None,
    store: BlockStore | None = None,
    **settings: object,
) -> AsyncIterator[Worker]:
    model = ScriptedModel(
        pool=pool,
        vocabulary_tokens=1000,
        max_context_tokens=context_tokens,
        max_cached_tokens=4_000_000,
        max_step_tokens=max_step_tokens,
    )
    timing = Timing(prefill_tokens_per_s=tokens_per_s)
    store = store or BlockStore(SharedMemory())
    engine = ScriptedEngine(model, clock=SystemClock(), store=store, timing=timing, faults=faults)
    chosen = PrefillSettings.model_validate({"nats_url": nats.url, "drain_s": 5, **settings})
    async with running(PrefillService(chosen, engine), chosen) as process:
        yield Worker(engine, process)


def a_worker_command(nats: NatsRunning, name: str, tokens_per_s: float) -> ServerCommand:
    """A worker as a process of its own."""
    environ = {
        "SHOAL_NATS_URL": nats.url,
        "SHOAL_PREFILL_INSTANCE_ID": name,
        "SHOAL_ENGINE_KIND": "scripted",
        "SHOAL_ENGINE_MODEL": "scripted",
        "SHOAL_SCRIPTED_PREFILL_TOKENS_PER_S": str(tokens_per_s),
    }
    return service_command("prefill", environ)


async def the_worker_of(gateway: Gateway) -> fleet_pb2.Beat:
    """The beat of the one worker."""
    beats: list[fleet_pb2.Beat] = []
    subscription = await gateway.bus.subscribe(subjects.beats(fleet_pb2.PREFILL), fleet_pb2.Beat, beats.append)
    await until(lambda: any(beat.model.pool == gateway.pool for beat in beats))
    await subscription.unsubscribe()
    return next(beat for beat in beats if beat.model.pool == gateway.pool)


async def test_a_job_is_answered_with_what_was_hit_computed_and_stored(nats: NatsRunning) -> None:
    async with an_index(nats) as index, a_gateway(nats, "answered") as gateway, a_worker(nats, "answered") as worker:
        await asyncio.sleep(1.1)  # the next beat of the index
        first = await gateway.ask(gateway.a_job("r1"))
        assert (first.request_id, first.delivery, first.WhichOneof("outcome")) == ("r1", 1, "done")
        assert first.instance_id == worker.process.instance_id
        assert (first.done.hit_tokens, first.done.miss_tokens, first.done.stored) == (0, 300, prefill_pb2.STORED_YES)
        assert first.done.HasField("first_token")
        [asked] = index.asked
        assert (asked.pool, len(asked.block_hash), asked.level) == ("answered", 32, pb.L2)
        await gateway.publish(gateway.a_job("r2"))
        second = await gateway.answer(2)
        assert (second.done.hit_tokens, second.done.miss_tokens) == (256, 44)
        assert second.done.stored == prefill_pb2.STORED_NONE
        assert second.done.first_token == first.done.first_token
        assert await gateway.queued_jobs() == 0


async def test_a_store_that_says_no_and_an_index_that_is_away_are_unknown_and_counted(nats: NatsRunning) -> None:
    before = metrics.CATALOGUE.value("handoffs_total", stored="unknown")
    async with a_gateway(nats, "unknown") as gateway, a_worker(nats, "unknown"):
        answer = await gateway.ask(gateway.a_job("r1"))
        assert answer.done.stored == prefill_pb2.STORED_UNKNOWN
        assert metrics.CATALOGUE.value("index_failures_total", code="UNAVAILABLE") >= 1
        async with an_index(nats) as index:
            index.is_stored = False
            await asyncio.sleep(1.1)
            await gateway.publish(gateway.a_job("r2", seed=2))
            assert (await gateway.answer(2)).done.stored == prefill_pb2.STORED_UNKNOWN
            assert len(index.asked) == 1
    assert metrics.CATALOGUE.value("handoffs_total", stored="unknown") == before + 2


async def test_a_job_that_waits_behind_another_finds_its_blocks_in_dram(nats: NatsRunning) -> None:
    shared = SharedMemory()
    store = BlockStore(shared, block_bytes=1 << 20)
    async with a_gateway(nats, "p-prefetch") as gateway:
        async with a_worker(nats, "p-prefetch", store=BlockStore(shared)):
            await gateway.ask(gateway.a_job("before", 1000, seed=2))
        async with a_worker(nats, "p-prefetch", tokens_per_s=2000, store=store, max_step_tokens=256) as worker:
            first, waiting = gateway.a_job("first", 8000, seed=1), gateway.a_job("waiting", 1000, seed=2)
            waiting.expected_hit_tokens = 896
            await gateway.publish(first)
            await until(lambda: worker.engine.load().running_requests == 1, 10)
            await gateway.publish(waiting)
            done = {answer.request_id: answer.done for answer in [await gateway.answer(n) for n in (2, 3)]}
    assert (done["waiting"].hit_tokens, done["waiting"].prefetched_blocks) == (896, 7)
    assert done["first"].prefetched_blocks == 0
    assert len(store.objects("l1")) >= 7


async def test_a_job_of_a_million_tokens_is_computed(nats: NatsRunning) -> None:
    async with (
        a_gateway(nats, "million") as gateway,
        a_worker(nats, "million", context_tokens=MILLION + 1, handoff_wait_ms=0),
    ):
        await gateway.publish(gateway.a_job("r1", MILLION))
        answer = await gateway.answer(timeout_s=40)
        assert (answer.done.hit_tokens, answer.done.miss_tokens) == (0, MILLION)
        assert await gateway.queued_jobs() == 0


async def test_work_longer_than_the_ack_wait_is_not_delivered_twice(nats: NatsRunning) -> None:
    async with (
        a_gateway(nats, "long") as gateway,
        a_worker(nats, "long", tokens_per_s=1000 / (ACK_WAIT_S + 2), handoff_wait_ms=0),
        a_worker(nats, "long", handoff_wait_ms=0),
    ):
        for number in range(2):  # one for each worker
            await gateway.publish(gateway.a_job(f"r{number}", 1000, seed=number))
        await gateway.answer(2)
        await asyncio.sleep(0.5)
        assert [answer.delivery for answer in gateway.answers] == [1, 1]


async def test_a_prompt_that_is_too_long_and_another_pools_job_are_answered(nats: NatsRunning) -> None:
    async with a_gateway(nats, "refusals") as gateway, a_worker(nats, "refusals", context_tokens=1000):
        answer = await gateway.ask(gateway.a_job("r1", 1000))
        assert answer.failure.code == pb.CONTEXT_LENGTH_EXCEEDED
        foreign = gateway.a_job("r2")
        foreign.pool = "other"
        await gateway.publish(foreign)
        assert (await gateway.answer(2)).failure.code == pb.POOL_MISMATCH
        broken = gateway.a_job("r3")
        broken.token_ids = b"123"
        await gateway.publish(broken)
        assert (await gateway.answer(3)).failure.code == pb.INVALID_REQUEST
        await asyncio.sleep(0.1)
        assert await gateway.queued_jobs() == 0


async def test_a_budget_that_is_spent_is_answered_and_aborted_once(nats: NatsRunning) -> None:
    async with a_gateway(nats, "budget") as gateway, a_worker(nats, "budget", tokens_per_s=100) as worker:
        job = gateway.a_job("r1", 1000)
        job.budget_ms = 200
        answer = await gateway.ask(job)
        assert answer.failure.code == pb.DEADLINE_EXCEEDED
        assert worker.engine.aborted_requests == 1


async def test_a_cancel_ends_a_running_job_at_once_and_nobody_answers(nats: NatsRunning) -> None:
    async with a_gateway(nats, "cancel") as gateway, a_worker(nats, "cancel", tokens_per_s=100) as worker:
        await gateway.publish(gateway.a_job("r1", 1000))
        await until(lambda: worker.engine.load().running_requests == 1)
        cancelled_s = time.monotonic()
        await gateway.cancel("r1")
        await gateway.cancel("nobody")
        await until(lambda: worker.engine.aborted_requests == 1, 1)
        assert time.monotonic() - cancelled_s < 0.25
        await asyncio.sleep(0.2)
        assert await gateway.queued_jobs() == 0 and gateway.answers == []


async def test_a_cancelled_job_can_be_taken_out_of_the_queue(nats: NatsRunning) -> None:
    async with a_gateway(nats, "unqueue") as gateway:
        sequence = await gateway.publish(gateway.a_job("r1"))
        assert await gateway.queue.delete(sequence)
        async with a_worker(nats, "unqueue"):
            answer = await gateway.ask(gateway.a_job("r2"))
            assert answer.request_id == "r2" and len(gateway.answers) == 1


async def test_too_many_deliveries_are_a_typed_failure(nats: NatsRunning) -> None:
    async with a_gateway(nats, "poison") as gateway:
        await gateway.publish(gateway.a_job("r1"))
        for _ in range(2):
            delivery = await gateway.queue.pull(wait_s=2)
            assert delivery is not None
            await delivery.nak()
        async with a_worker(nats, "poison", max_deliveries=2):
            answer = await gateway.answer()
            assert (answer.failure.code, answer.delivery) == (pb.TOO_MANY_DELIVERIES, 3)
            await asyncio.sleep(0.1)
            assert await gateway.queued_jobs() == 0


async def test_a_worker_that_leaves_finishes_what_it_has_time_for_and_gives_back_the_rest(nats: NatsRunning) -> None:
    async with a_gateway(nats, "leaving") as gateway:
        async with a_worker(nats, "leaving", tokens_per_s=600, handoff_wait_ms=0) as worker:
            await gateway.publish(gateway.a_job("r1", 300))
            await until(lambda: worker.engine.load().running_requests == 1)
        assert (await gateway.answer()).WhichOneof("outcome") == "done"
        async with a_worker(nats, "leaving", tokens_per_s=10, drain_s=1.5) as worker:
            await gateway.publish(gateway.a_job("r2", 300, seed=2))
            await until(lambda: worker.engine.load().running_requests == 1)
        async with a_worker(nats, "leaving"):
            answer = await gateway.answer(2, timeout_s=2)
            assert (answer.request_id, answer.delivery) == ("r2", 2)


async def test_a_worker_says_what_it_serves_and_how_busy_it_is(nats: NatsRunning) -> None:
    async with a_gateway(nats, "presence") as gateway, a_worker(nats, "presence", tokens_per_s=100) as worker:
        beat = await the_worker_of(gateway)
        assert (beat.instance_id, beat.is_ready, list(beat.model.tiers)) == (worker.process.instance_id, True, [TIER])
        assert (beat.model.block_tokens, beat.model.max_context_tokens) == (128, 8192)
        assert beat.load.max_running_requests == worker.engine.description.max_running_requests
        job = gateway.a_job("r1", 1000)
        await gateway.publish(job)
        await until(lambda: worker.engine.load().running_requests == 1)
        fleet = Fleet(gateway.process, gateway.bus, [fleet_pb2.PREFILL])
        await fleet.start()

        def is_busy() -> bool:
            member = fleet.get(worker.process.instance_id)
            return member is not None and member.load is not None and member.load.cached_tokens == 1000

        await until(is_busy)
        await gateway.cancel("r1")


async def test_a_lost_store_is_told_and_the_worker_stays_ready(nats: NatsRunning) -> None:
    is_lost = True
    async with a_worker(nats, "lost", faults=Faults(loses_store=lambda: is_lost), check_each_s=0.05) as worker:
        health = worker.process.health
        await until(lambda: metrics.CATALOGUE.value("store_lost") == 1)
        assert health.is_ready and health.report == {"store": "away; prompts are computed without it"}
        is_lost = False
        await until(lambda: metrics.CATALOGUE.value("store_lost") == 0)
        assert health.report == {}


async def test_several_tiers_are_served_by_one_worker(nats: NatsRunning) -> None:
    async with a_gateway(nats, "tiers") as gateway, a_worker(nats, "tiers", tiers=("all", "long")):
        long_queue = await ensure_prefill_queue(gateway.bus, "tiers", "long")
        await gateway.publish(gateway.a_job("r1"))
        job = gateway.a_job("r2", seed=2)
        await long_queue.publish(job, job_id="r2", attempt=1, expires_s=60)
        await gateway.answer(2)
        assert {answer.request_id for answer in gateway.answers} == {"r1", "r2"}


@contextlib.asynccontextmanager
async def a_fleet(nats: NatsRunning) -> AsyncIterator[Fleet]:
    process = new_process("watcher", ServiceSettings())
    try:
        fleet = Fleet(process, await runtime_nats.connect(process, nats.url), [fleet_pb2.PREFILL])
        await fleet.start()
        yield fleet
    finally:
        await process.tasks.close()
        await process.stack.aclose()


@pytest.mark.chaos
async def test_a_job_of_a_killed_worker_is_answered_by_another_one(tmp_path: Path) -> None:
    async with nats_running() as nats, a_fleet(nats) as fleet:
        slow = await start_process(a_worker_command(nats, "slow", 50), tmp_path)
        member = await fleet.wait_for(fleet_pb2.PREFILL, timeout_s=10)
        assert member.model is not None
        async with a_gateway(nats, member.model.pool) as gateway:
            await gateway.publish(gateway.a_job("r1", 1000))

            def is_busy() -> bool:
                member = fleet.get("slow")
                return member is not None and member.load is not None and member.load.running_requests == 1

            await until(is_busy)
            slow.kill()
            killed_s = time.monotonic()
            async with process_running(a_worker_command(nats, "fast", 1e9), tmp_path):
                answer = await gateway.answer(timeout_s=30)
            print(f"answered {time.monotonic() - killed_s:.1f} s after the kill, the start of another worker included")
            assert (answer.instance_id, answer.delivery) == ("fast", 2)
            assert answer.done.miss_tokens == 1000


@pytest.mark.chaos
async def test_a_restarted_nats_gets_the_job_again_and_one_answer_comes() -> None:
    async with (
        nats_running() as nats,
        a_gateway(nats, "outage") as gateway,
        a_worker(nats, "outage", tokens_per_s=300, handoff_wait_ms=0) as worker,
    ):
        await gateway.publish(gateway.a_job("r1", 600))
        await until(lambda: worker.engine.load().running_requests == 1)
        nats.kill()
        await until(lambda: not gateway.bus.is_connected)
        await nats.start()
        await until(lambda: not gateway.process.health.report and not worker.process.health.report)
        await gateway.publish(gateway.a_job("r1", 600), attempt=2)
        answer = await gateway.answer()
        assert answer.done.miss_tokens == 600
        await asyncio.sleep(0.3)
        assert len(gateway.answers) == 1 and await gateway.queued_jobs() == 0
        await gateway.publish(gateway.a_job("r2", seed=2))
        assert (await gateway.answer(2)).request_id == "r2"
