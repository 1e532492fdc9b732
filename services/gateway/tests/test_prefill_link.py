"""Prefill jobs against a queue in memory: what is published again, and what a publish that nobody waits for leaves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import nats.js.errors
import pytest

from shoal_contracts.errors import Refused
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import fleet_pb2, prefill_pb2
from shoal_gateway.links.prefill import PrefillLink
from shoal_gateway.request import PrefillWork, Prompt
from shoal_policy import TrafficClass
from shoal_runtime.presence import Fleet
from shoal_runtime.process import new_process
from shoal_runtime.settings import ServiceSettings
from shoal_testkit import settle

STREAM_FULL = 10077


class Nats:
    """A connection and its JetStream. ``acks`` is cleared: acknowledgements wait."""

    is_connected = True

    def __init__(self) -> None:
        self.hooks: list[Callable[[], Awaitable[None]]] = []
        self.jobs: dict[int, str] = {}
        self.refused: set[str] = set()
        self.acks = asyncio.Event()
        self.acks.set()
        self.cancels: list[str] = []
        self.on_answer: Callable[[prefill_pb2.PrefillAnswer], None] | None = None

    @property
    def jetstream(self) -> "Nats":
        return self

    def on_reconnect(self, hook: Callable[[], Awaitable[None]]) -> None:
        self.hooks.append(hook)

    async def subscribe(self, subject: str, message_type: object, handler: Any) -> None:
        self.on_answer = handler

    def encode(self, message: Any) -> bytes:
        return bytes(message.SerializeToString())

    def headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        return headers

    async def add_stream(self, config: object) -> Any:
        return SimpleNamespace(created=datetime.now(UTC))

    async def add_consumer(self, stream: str, config: object) -> None: ...

    async def publish(self, subject: str, payload: Any, **options: Any) -> Any:
        if isinstance(payload, prefill_pb2.PrefillCancel):
            self.cancels.append(payload.request_id)
            return None
        request_id = prefill_pb2.PrefillJob.FromString(payload).request_id
        if request_id in self.refused:
            raise nats.js.errors.ServiceUnavailableError(code=503, err_code=STREAM_FULL, description="full")
        sequence = len(self.jobs) + 1
        self.jobs[sequence] = request_id
        await self.acks.wait()
        return SimpleNamespace(seq=sequence, duplicate=False)

    async def delete_msg(self, stream: str, sequence: int) -> bool:
        return self.jobs.pop(sequence, None) is not None

    async def reconnect(self) -> None:
        for hook in self.hooks:
            await hook()

    def answer(self, request_id: str) -> None:
        assert self.on_answer is not None
        done = prefill_pb2.PrefillDone(hit_tokens=0, miss_tokens=4, stored=prefill_pb2.STORED_YES)
        self.on_answer(prefill_pb2.PrefillAnswer(request_id=request_id, instance_id="p", delivery=1, done=done))


Case = tuple[PrefillLink, Nats]


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    process = new_process("gateway", ServiceSettings())
    bus: Any = Nats()
    link = PrefillLink(process, bus, Fleet(process, bus, [fleet_pb2.PREFILL]))
    await link.start()
    yield link, bus
    await process.tasks.close()


def work(request_id: str) -> PrefillWork:
    prompt = Prompt("model", pack_u32(range(4)), b"", b"", is_streaming=False)
    return PrefillWork(request_id, 1, "pool", "all", "", prompt, None, TrafficClass.CHAT, budget_s=60.0)


async def test_job_that_is_refused_after_a_reconnect_fails_alone(case: Case) -> None:
    link, bus = case
    first, second = (asyncio.create_task(link.compute(work(name), 60.0)) for name in ("r1", "r2"))
    await settle()
    bus.jobs.clear()
    bus.refused = {"r1"}
    await bus.reconnect()
    with pytest.raises(Refused):
        await first
    assert list(bus.jobs.values()) == ["r2"]
    bus.answer("r2")
    assert (await second).stored == "yes"


async def test_job_that_nobody_waits_for_when_it_is_queued_is_taken_out(case: Case) -> None:
    link, bus = case
    bus.acks.clear()
    computing = asyncio.create_task(link.compute(work("r1"), 60.0))
    await settle()
    computing.cancel()
    await settle()
    assert computing.cancelled()
    link.cancel("r1", "pool")
    await settle()
    assert (list(bus.jobs.values()), bus.cancels) == (["r1"], ["r1"])
    bus.acks.set()
    await settle()
    assert (bus.jobs, bus.cancels) == ({}, ["r1", "r1"])


async def test_job_of_an_earlier_attempt_is_taken_out_with_its_request(case: Case) -> None:
    link, bus = case
    bus.acks.clear()
    computing = asyncio.create_task(link.compute(work("r1"), 60.0))
    await settle()
    computing.cancel()
    bus.acks.set()
    await settle()
    assert list(bus.jobs.values()) == ["r1"]  # its request may still be answered by it
    link.cancel("r1", "pool")
    await settle()
    assert bus.jobs == {}
