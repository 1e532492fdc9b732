"""Who is there, and channels for unary calls: kept while their peer is, closed when its last call must have ended."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from google.protobuf.message import Message

from shoal_contracts.v1 import fleet_pb2
from shoal_gateway.links.peers import Channels, meet
from shoal_runtime.presence import Fleet, Member
from shoal_runtime.process import Process, new_process
from shoal_runtime.settings import ServiceSettings
from shoal_testkit import VirtualClock, settle

GRACE_S = 20.0


class Bus:
    """Beats in memory."""

    def __init__(self) -> None:
        self.tell: list[Callable[[object], None]] = []

    async def publish(self, subject: str, message: Message) -> None: ...

    async def subscribe(self, subject: str, message_type: object, handler: Callable[[object], None]) -> None:
        self.tell.append(handler)

    async def prove(self) -> bool:
        return True


class Case:
    """One role of a fleet and the channels to it."""

    def __init__(self, process: Process, clock: VirtualClock) -> None:
        self.bus, self.clock = Bus(), clock
        self.fleet = Fleet(process, self.bus, [fleet_pb2.TOKENIZER])  # type: ignore[arg-type]
        self.channels = Channels(process, self.fleet, fleet_pb2.TOKENIZER, GRACE_S)

    def beat(self, address: str = "127.0.0.1:1", incarnation: int = 1) -> Member:
        beat = fleet_pb2.Beat(
            instance_id="t1", incarnation=incarnation, role=fleet_pb2.TOKENIZER, address=address, is_ready=True
        )
        for tell in self.bus.tell:
            tell(beat)
        member = self.fleet.get("t1")
        assert member is not None
        return member


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    clock = VirtualClock()
    process = new_process("gateway", ServiceSettings(), clock)
    case = Case(process, clock)
    await case.fleet.start()
    yield case
    await process.tasks.close()
    await case.channels.close()


def is_closed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_channel_is_kept_while_its_peer_is_there(case: Case) -> None:
    channel = case.channels.get(case.beat())
    assert case.channels.get(case.beat(incarnation=2)) is channel
    await settle()
    assert not is_closed(channel)


async def test_channel_of_a_peer_that_moved_is_closed_after_its_last_call(case: Case) -> None:
    old = case.channels.get(case.beat())
    new = case.channels.get(case.beat("127.0.0.1:2", incarnation=2))
    assert new is not old
    for _ in range(int(GRACE_S) - 1):
        await case.clock.advance(1.0)
        case.beat("127.0.0.1:2", incarnation=2)
    assert not is_closed(old)
    await case.clock.advance(1.0)
    assert is_closed(old)
    assert not is_closed(new)


async def test_peer_that_fell_silent_and_came_back_gets_another_channel(case: Case) -> None:
    old = case.channels.get(case.beat())
    for _ in range(5):
        await case.clock.advance(1.0)
    new = case.channels.get(case.beat())
    assert new is not old
    await case.clock.advance(GRACE_S)
    assert is_closed(old)


async def test_end_of_the_gateway_closes_channels_that_are_leaving_too(case: Case) -> None:
    old = case.channels.get(case.beat())
    new = case.channels.get(case.beat("127.0.0.1:2", incarnation=2))
    await case.channels.close()
    assert is_closed(old) and is_closed(new)


async def test_a_gateway_waits_until_it_has_heard_who_is_there(case: Case) -> None:
    meeting = asyncio.create_task(meet(case.fleet, [fleet_pb2.TOKENIZER], 30))
    await settle()
    assert not meeting.done()
    case.beat()
    await asyncio.wait_for(meeting, 1)


async def test_who_is_not_there_is_not_waited_for_for_ever(case: Case) -> None:
    await asyncio.wait_for(meet(case.fleet, [fleet_pb2.TOKENIZER, fleet_pb2.DECODE], 0.01), 1)
