"""The runtime on a real NATS: limits, work queues, outages, presence, trace headers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shoal_contracts import subjects
from shoal_contracts.errors import BadRequest, Refused, Unavailable
from shoal_contracts.ids import count_u32, pack_u32
from shoal_contracts.v1 import fleet_pb2, prefill_pb2
from shoal_runtime import nats as runtime_nats
from shoal_runtime import queues, tracing
from shoal_runtime.presence import PROVE_EACH_S, Announcer, Fleet, Load, Presence, Served, ServedGroup
from shoal_runtime.process import Process, new_process
from shoal_runtime.queues import ensure_prefill_queue
from shoal_runtime.settings import ServiceSettings
from shoal_testkit.faults import a_gate
from shoal_testkit.servers import NatsRunning, nats_running
from shoal_testkit.waits import until

MILLION = 1_000_000


@asynccontextmanager
async def a_connection(url: str, name: str = "probe") -> AsyncIterator[tuple[Process, runtime_nats.NatsConnection]]:
    process = new_process(name, ServiceSettings())
    try:
        yield process, await runtime_nats.connect(process, url)
    finally:
        await process.tasks.close()
        await process.stack.aclose()


def a_job(tokens: int = 4) -> prefill_pb2.PrefillJob:
    return prefill_pb2.PrefillJob(request_id="r1", token_ids=pack_u32(range(tokens)))


async def test_a_job_of_a_million_tokens_passes(nats: NatsRunning) -> None:
    async with a_connection(nats.url) as (_, bus):
        queue = await ensure_prefill_queue(bus, "million", "t0")
        await queue.publish(a_job(MILLION), job_id="r1", attempt=1, expires_s=30)
        delivery = await queue.pull(wait_s=5)
        assert delivery is not None and count_u32(delivery.job.token_ids) == MILLION
        await delivery.ack()


async def test_what_is_over_the_limit_is_refused_before_it_is_sent(nats: NatsRunning) -> None:
    async with a_connection(nats.url) as (_, bus):
        with pytest.raises(BadRequest):
            await bus.publish("anything", a_job(3 * MILLION))
        assert await bus.prove()


async def test_an_attempt_is_queued_once_and_a_new_attempt_again(nats: NatsRunning) -> None:
    async with a_connection(nats.url) as (_, bus):
        queue = await ensure_prefill_queue(bus, "dedup", "t0")
        first = await queue.publish(a_job(), job_id="r1", attempt=1, expires_s=30)
        assert await queue.publish(a_job(), job_id="r1", attempt=1, expires_s=30) == first
        assert await queue.publish(a_job(), job_id="r1", attempt=2, expires_s=30) != first


async def test_a_job_that_was_settled_unheard_is_queued_again_each_time_it_is_published(nats: NatsRunning) -> None:
    async with a_connection(nats.url) as (_, bus):
        queue = await ensure_prefill_queue(bus, "unheard", "t0")
        for _ in range(3):
            sequence = await queue.publish(a_job(), job_id="r1", attempt=1, expires_s=30)
            delivery = await queue.pull(wait_s=2)
            assert delivery is not None and delivery.number == 1
            assert await queue.publish(a_job(), job_id="r1", attempt=1, expires_s=30) == sequence
            await delivery.ack()
            assert await bus.prove()


async def test_a_queued_job_can_be_taken_out_and_a_stale_one_expires(nats: NatsRunning) -> None:
    async with a_connection(nats.url) as (_, bus):
        queue = await ensure_prefill_queue(bus, "delete", "t0")
        sequence = await queue.publish(a_job(), job_id="r1", attempt=1, expires_s=30)
        assert await queue.delete(sequence)
        assert not await queue.delete(sequence)
        await queue.publish(a_job(), job_id="r2", attempt=1, expires_s=0.5)
        await asyncio.sleep(2.2)
        assert await queue.pull(wait_s=0.1) is None


async def test_a_job_that_its_worker_gives_back_is_delivered_again_and_counted(nats: NatsRunning) -> None:
    async with a_connection(nats.url) as (_, bus):
        queue = await ensure_prefill_queue(bus, "nak", "t0")
        await queue.publish(a_job(), job_id="r1", attempt=1, expires_s=30)
        numbers = []
        for _ in range(3):
            delivery = await queue.pull(wait_s=2)
            assert delivery is not None
            numbers.append(delivery.number)
            await delivery.nak()
        assert numbers == [1, 2, 3]


async def test_a_silent_worker_loses_its_job_and_a_working_one_keeps_it(nats: NatsRunning) -> None:
    async with a_connection(nats.url) as (_, bus), a_connection(nats.url) as (_, other_bus):
        mine = await ensure_prefill_queue(bus, "silent", "t0")
        other = await ensure_prefill_queue(other_bus, "silent", "t0")
        await mine.publish(a_job(), job_id="r1", attempt=1, expires_s=30)
        delivery = await mine.pull(wait_s=1)
        assert delivery is not None
        for _ in range(4):
            await delivery.in_progress()
            assert await other.pull(wait_s=1) is None
        again = await other.pull(wait_s=2 * queues.ACK_WAIT_S)
        assert again is not None and again.number == 2
        await again.term()


async def test_a_full_queue_refuses(nats: NatsRunning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MAX_JOBS", 2)
    async with a_connection(nats.url) as (_, bus):
        queue = await ensure_prefill_queue(bus, "full", "t0")
        for attempt in (1, 2):
            await queue.publish(a_job(), job_id="r1", attempt=attempt, expires_s=30)
        with pytest.raises(Refused, match="full"):
            await queue.publish(a_job(), job_id="r1", attempt=3, expires_s=30)


async def test_the_trace_reaches_the_worker(nats: NatsRunning) -> None:
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    async with a_connection(nats.url) as (_, bus):
        queue = await ensure_prefill_queue(bus, "trace", "t0")
        heard: list[dict[str, str]] = []

        def listen(message: fleet_pb2.Beat) -> None:
            carrier: dict[str, str] = {}
            tracing.inject(carrier)
            heard.append(carrier)

        await bus.subscribe("trace-test", fleet_pb2.Beat, listen)
        with tracing.start_span("x", tracing.extract(parent)):
            await queue.publish(a_job(), job_id="r1", attempt=1, expires_s=30)
            await bus.publish("trace-test", fleet_pb2.Beat())
        delivery = await queue.pull(wait_s=1)
        assert delivery is not None
        with tracing.start_span("y", delivery.trace):
            listen(fleet_pb2.Beat())
        await until(lambda: len(heard) == 2)
        assert {carrier["traceparent"].split("-")[1] for carrier in heard} == {"0af7651916cd43dd8448eb211c80319c"}


@pytest.mark.logs_error("nats.handler_crashed")
async def test_a_handler_that_crashes_is_logged_and_hears_the_next_message(nats: NatsRunning) -> None:
    async with a_connection(nats.url) as (_, bus):
        heard: list[str] = []

        def listen(beat: fleet_pb2.Beat) -> None:
            if not beat.instance_id:
                raise RuntimeError("boom")
            heard.append(beat.instance_id)

        await bus.subscribe("crash-test", fleet_pb2.Beat, listen)
        await bus.publish("crash-test", fleet_pb2.Beat())
        await bus.publish("crash-test", fleet_pb2.Beat(instance_id="a"))
        await until(lambda: heard == ["a"])


async def test_presence_tells_what_is_announced(nats: NatsRunning) -> None:
    presence = Presence(
        "10.0.0.1:5",
        Served("m", "pool", 128, 8192, ("t0",), (ServedGroup(0), ServedGroup(1, 256, True))),
        Load(1, 2, 3, 4, 5),
    )
    async with a_connection(nats.url) as (watcher, bus), a_connection(nats.url, "decode") as (process, its_bus):
        fleet = Fleet(watcher, bus, [fleet_pb2.DECODE])
        await fleet.start()
        await Announcer(process, its_bus, fleet_pb2.DECODE, lambda: presence).start()
        member = await fleet.wait_for(fleet_pb2.DECODE, timeout_s=5)
        assert (member.address, member.model, member.load) == (presence.address, presence.model, presence.load)


@pytest.mark.chaos
async def test_a_restarted_nats_is_told_again_what_it_forgot() -> None:
    async with nats_running() as nats, a_connection(nats.url) as (process, bus):
        queue = await ensure_prefill_queue(bus, "outage", "t0")
        fleet = Fleet(process, bus, [fleet_pb2.PREFILL])
        await fleet.start()
        await Announcer(process, bus, fleet_pb2.PREFILL, Presence).start()
        await fleet.wait_for(fleet_pb2.PREFILL, timeout_s=5)
        nats.kill()
        await until(lambda: not bus.is_connected)
        assert "nats" in process.health.report
        with pytest.raises(Unavailable):
            await queue.publish(a_job(), job_id="r1", attempt=1, expires_s=30)
        with pytest.raises(Unavailable):
            await bus.publish(subjects.prefill_cancel("outage"), prefill_pb2.PrefillCancel())
        await asyncio.sleep(4)  # longer than a member may be silent
        assert fleet.live(fleet_pb2.PREFILL), "a watcher that is cut off knows nothing"
        await nats.start()
        await until(lambda: not process.health.report)
        await queue.publish(a_job(), job_id="r1", attempt=2, expires_s=30)
        delivery = await queue.pull(wait_s=2)
        assert delivery is not None and delivery.number == 1
        await delivery.ack()
        assert fleet.live(fleet_pb2.PREFILL)


@pytest.mark.chaos
async def test_a_process_ends_in_order_while_nats_is_away() -> None:
    async with nats_running() as nats, a_connection(nats.url) as (process, bus):
        fleet = Fleet(process, bus, [fleet_pb2.PREFILL])
        await fleet.start()
        nats.kill()
        await until(lambda: not bus.is_connected)
        await asyncio.sleep(2 * PROVE_EACH_S)
        assert not await bus.prove()


@pytest.mark.chaos
async def test_an_acknowledgement_from_before_a_restart_settles_nothing() -> None:
    async with nats_running() as nats, a_connection(nats.url) as (process, bus):
        queue = await ensure_prefill_queue(bus, "stale", "t0")
        first = await queue.publish(a_job(), job_id="r1", attempt=1, expires_s=30)
        old = await queue.pull(wait_s=1)
        nats.kill()
        await until(lambda: not bus.is_connected)
        await nats.start()
        await until(lambda: not process.health.report)
        assert await queue.publish(a_job(), job_id="r2", attempt=1, expires_s=30) == first
        mine = await queue.pull(wait_s=1)
        assert old is not None and mine is not None
        await old.ack()
        await bus.prove()
        info = await bus.jetstream.stream_info(subjects.prefill_stream("stale", "t0"))
        assert info.state.messages == 1
        await mine.ack()


@pytest.mark.chaos
async def test_a_link_that_hangs_without_breaking_freezes_presence_too(nats: NatsRunning) -> None:
    nats_port = int(nats.url.rsplit(":", 1)[1])
    async with (
        a_gate(nats_port) as gate,
        a_connection(f"nats://127.0.0.1:{gate.port}") as (watcher, bus),
        a_connection(nats.url, "decode") as (process, its_bus),
    ):
        fleet = Fleet(watcher, bus, [fleet_pb2.DECODE])
        await fleet.start()
        await Announcer(process, its_bus, fleet_pb2.DECODE, Presence).start()
        await fleet.wait_for(fleet_pb2.DECODE, timeout_s=5)
        gate.hang()
        await until(lambda: not bus.is_connected)
        await asyncio.sleep(3)
        assert fleet.live(fleet_pb2.DECODE)
        gate.heal()
        await until(lambda: not watcher.health.report)
        assert fleet.live(fleet_pb2.DECODE)


@pytest.mark.chaos
async def test_a_link_that_breaks_comes_back_with_its_subscriptions(nats: NatsRunning) -> None:
    nats_port = int(nats.url.rsplit(":", 1)[1])
    heard: list[str] = []
    async with (
        a_gate(nats_port) as gate,
        a_connection(f"nats://127.0.0.1:{gate.port}") as (process, bus),
        a_connection(nats.url) as (_, other_bus),
    ):
        await bus.subscribe("blip-test", fleet_pb2.Beat, lambda beat: heard.append(beat.instance_id))
        await gate.cut()
        await until(lambda: not bus.is_connected)
        await gate.start()
        await until(lambda: not process.health.report)
        assert await bus.prove()
        await other_bus.publish("blip-test", fleet_pb2.Beat(instance_id="a"))
        await until(lambda: heard == ["a"])
