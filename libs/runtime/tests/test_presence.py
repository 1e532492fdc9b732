"""Presence: silence, freezing, fencing, on virtual time and a bus in memory."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from google.protobuf.message import Message

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import fleet_pb2
from shoal_runtime.metrics import RUNTIME
from shoal_runtime.nats import cut_off
from shoal_runtime.presence import Announcer, Fleet, Load, Presence, Served, ServedGroup
from shoal_runtime.process import Process, new_process
from shoal_runtime.settings import ServiceSettings
from shoal_testkit.clock import VirtualClock, settle


class _Bus:
    """Everyone's NATS, or no one's while ``is_connected`` is False."""

    def __init__(self) -> None:
        self.is_connected = True
        self.handlers: list[Callable[[object], Awaitable[None] | None]] = []
        self.published: list[Message] = []

    async def publish(self, subject: str, message: Message) -> None:
        if not self.is_connected:
            raise cut_off()
        self.published.append(message)
        for handler in self.handlers:
            handler(message)

    async def subscribe(self, subject: str, message_type: object, handler: Callable[..., None]) -> None:
        self.handlers.append(handler)

    async def prove(self) -> bool:
        return self.is_connected


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def bus() -> _Bus:
    return _Bus()


@pytest.fixture
async def process(clock: VirtualClock) -> AsyncIterator[Process]:
    process = new_process("watcher", ServiceSettings(), clock)
    yield process
    await process.tasks.close()


@pytest.fixture
async def fleet(process: Process, bus: _Bus) -> Fleet:
    fleet = Fleet(process, bus, [fleet_pb2.DECODE])  # type: ignore[arg-type]
    await fleet.start()
    return fleet


def _beat(incarnation: int = 1, is_ready: bool = True, instance_id: str = "d1") -> fleet_pb2.Beat:
    return fleet_pb2.Beat(
        instance_id=instance_id, incarnation=incarnation, role=fleet_pb2.DECODE, address="d:1", is_ready=is_ready
    )


def _names(fleet: Fleet) -> list[str]:
    return [member.instance_id for member in fleet.live(fleet_pb2.DECODE)]


async def test_a_member_is_live_until_three_seconds_of_silence(fleet: Fleet, bus: _Bus, clock: VirtualClock) -> None:
    changes: list[int] = []
    fleet.on_change(lambda: changes.append(len(fleet.live(fleet_pb2.DECODE))))
    await bus.publish("", _beat())
    await clock.advance(2.9)
    assert _names(fleet) == ["d1"] and fleet.get("d1") is not None
    await clock.advance(0.6)
    assert _names(fleet) == [] and fleet.get("d1") is None
    assert changes == [1, 0]
    await bus.publish("", _beat())
    assert _names(fleet) == ["d1"] and changes == [1, 0, 1]


async def test_presence_is_frozen_while_the_watcher_is_cut_off(fleet: Fleet, bus: _Bus, clock: VirtualClock) -> None:
    await bus.publish("", _beat())
    await clock.advance(1)
    bus.is_connected = False
    await clock.advance(60)
    assert _names(fleet) == ["d1"]
    bus.is_connected = True
    await clock.advance(1)  # the first proof counts for one second at most
    assert _names(fleet) == ["d1"]
    await clock.advance(3)
    assert _names(fleet) == []


async def test_an_older_incarnation_is_fenced_and_counted(fleet: Fleet, bus: _Bus) -> None:
    fenced = RUNTIME.value("beats_fenced_total")
    await bus.publish("", _beat(incarnation=7))
    await bus.publish("", _beat(incarnation=6, is_ready=False))
    [member] = fleet.live(fleet_pb2.DECODE)
    assert (member.incarnation, member.is_ready) == (7, True)
    assert RUNTIME.value("beats_fenced_total") == fenced + 1


async def test_the_fence_outlives_a_silence(fleet: Fleet, bus: _Bus, clock: VirtualClock) -> None:
    await bus.publish("", _beat(incarnation=7))
    await clock.advance(60)
    await bus.publish("", _beat(incarnation=6))
    assert _names(fleet) == []


async def test_wait_for_returns_the_first_ready_member(fleet: Fleet, bus: _Bus, process: Process) -> None:
    found: list[str] = []

    async def wait() -> None:
        found.append((await fleet.wait_for(fleet_pb2.DECODE, timeout_s=5)).instance_id)

    process.tasks.spawn(wait, name="waits")
    await settle()
    await bus.publish("", _beat(is_ready=False, instance_id="d1"))
    await settle()
    assert found == []
    await bus.publish("", _beat(instance_id="d2"))
    await settle()
    assert found == ["d2"]


async def test_wait_for_names_the_missing_role(fleet: Fleet) -> None:
    with pytest.raises(Unavailable, match="no decode instance is ready"):
        await fleet.wait_for(fleet_pb2.DECODE, timeout_s=0.01)


async def test_what_is_announced_is_what_is_seen(process: Process, bus: _Bus, fleet: Fleet) -> None:
    presence = Presence(
        "d:1",
        Served("m", "pool", 128, 8192, ("t0",), (ServedGroup(0), ServedGroup(1, 256, True))),
        Load(1, 16, 2000, 100_000, 0),
    )
    await Announcer(process, bus, fleet_pb2.DECODE, lambda: presence).start()  # type: ignore[arg-type]
    [member] = fleet.live(fleet_pb2.DECODE)
    assert (member.address, member.model, member.load) == (presence.address, presence.model, presence.load)
    assert (member.instance_id, member.incarnation) == (process.instance_id, process.incarnation)


async def test_unknown_load_stays_unknown(process: Process, bus: _Bus, fleet: Fleet) -> None:
    await Announcer(process, bus, fleet_pb2.DECODE, Presence).start()  # type: ignore[arg-type]
    [member] = fleet.live(fleet_pb2.DECODE)
    assert member.load is None and member.model is None


async def test_a_change_of_readiness_is_told_at_once(process: Process, bus: _Bus, fleet: Fleet) -> None:
    await Announcer(process, bus, fleet_pb2.DECODE, Presence).start()  # type: ignore[arg-type]
    await settle()
    process.health.set("engine", "failed")
    await settle()
    [member] = fleet.live(fleet_pb2.DECODE)
    assert (member.is_ready, member.reason) == (False, "engine: failed")


async def test_the_announcer_is_silent_while_cut_off(process: Process, bus: _Bus) -> None:
    bus.is_connected = False
    announcer = Announcer(process, bus, fleet_pb2.DECODE, Presence)  # type: ignore[arg-type]
    await announcer.beat()
    assert bus.published == []
