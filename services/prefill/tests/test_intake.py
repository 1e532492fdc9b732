"""The intake: a job is taken only for a free place, and nothing more once the worker leaves."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_prefill.intake import PAUSE_S, Intake
from shoal_testkit.clock import VirtualClock, settle


@dataclass
class FakeDelivery:
    """Runs until ``finish``."""

    is_given_back: bool = False
    finish: asyncio.Event = field(default_factory=asyncio.Event)

    async def give_back(self) -> None:
        self.is_given_back = True


@dataclass
class FakeSource:
    """Hands out what the test puts in; ``None`` is NATS being away."""

    waiting: "asyncio.Queue[FakeDelivery | None]" = field(default_factory=asyncio.Queue)
    pulls: int = 0

    async def take(self) -> FakeDelivery | None:
        self.pulls += 1
        delivery = await self.waiting.get()
        if delivery is None:
            raise Unavailable(pb.UNAVAILABLE, "the message bus is away")
        return delivery


@dataclass
class Running:
    intake: Intake
    source: FakeSource
    clock: VirtualClock
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def put(self) -> FakeDelivery:
        delivery = FakeDelivery()
        self.source.waiting.put_nowait(delivery)
        return delivery


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    tasks: list[asyncio.Task[None]] = []
    source, clock = FakeSource(), VirtualClock()

    async def work(delivery: FakeDelivery) -> None:
        await delivery.finish.wait()

    intake = Intake(source, work, lambda job: tasks.append(asyncio.create_task(job)), 2, clock)  # type: ignore[arg-type]
    loop = asyncio.create_task(intake.run())
    yield Running(intake, source, clock, tasks)
    for task in (*tasks, loop):
        task.cancel()
    await asyncio.wait([*tasks, loop])


async def test_nothing_is_pulled_without_a_free_place(running: Running) -> None:
    deliveries = [running.put() for _ in range(3)]
    await settle()
    assert len(running.tasks) == 2 and running.source.pulls == 2
    deliveries[0].finish.set()
    await settle()
    assert len(running.tasks) == 3


async def test_leaving_waits_for_what_runs_and_gives_back_what_comes(running: Running) -> None:
    first = running.put()
    await settle()
    leaving = asyncio.create_task(running.intake.leave())
    late = running.put()
    await settle()
    assert late.is_given_back and not leaving.done()
    first.finish.set()
    await leaving
    assert len(running.tasks) == 1 and running.source.pulls == 2


async def test_a_full_worker_leaves_without_pulling_again(running: Running) -> None:
    deliveries = [running.put(), running.put()]
    await settle()
    leaving = asyncio.create_task(running.intake.leave())
    await settle()
    for delivery in deliveries:
        delivery.finish.set()
    await leaving
    assert running.source.pulls == 2


async def test_an_outage_of_the_queue_is_waited_out(running: Running) -> None:
    running.source.waiting.put_nowait(None)
    await settle()
    running.put()
    await running.clock.advance(PAUSE_S)
    assert len(running.tasks) == 1
