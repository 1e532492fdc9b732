"""What runs after a reconnect, without a server. The rest is in tests/integration/test_runtime_nats.py."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from shoal_contracts.errors import Refused, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_runtime.nats import HOOK_PAUSE_S, NatsConnection
from shoal_runtime.process import Process, new_process
from shoal_runtime.settings import ServiceSettings
from shoal_runtime.tasks import LONGEST_PAUSE_S
from shoal_testkit.clock import VirtualClock, settle


class _Connected(NatsConnection):
    """Says that it is connected, and reconnects when told."""

    @property
    def is_connected(self) -> bool:
        return True

    async def blink(self) -> None:
        await self._on_disconnected()
        await self._on_reconnected()
        await settle()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def process(clock: VirtualClock) -> AsyncIterator[Process]:
    process = new_process("probe", ServiceSettings(), clock)
    yield process
    await process.tasks.close()


@pytest.fixture
async def bus(process: Process) -> _Connected:
    bus = _Connected(process, "nats://127.0.0.1:1")
    process.tasks.spawn(bus._run_hooks, name="nats_hooks", restart=True)
    await settle()
    return bus


def _failing(times: int, error: Exception, calls: list[int]) -> Callable[[], Awaitable[None]]:
    """A hook that works after ``times`` failures."""

    async def hook() -> None:
        calls.append(len(calls))
        if len(calls) <= times:
            raise error

    return hook


@pytest.mark.parametrize("error", [Refused(pb.OVERLOADED, "no room"), Unavailable(pb.UNAVAILABLE, "away")])
async def test_a_hook_that_fails_is_tried_until_it_works(
    bus: _Connected, process: Process, clock: VirtualClock, error: Exception
) -> None:
    calls: list[int] = []
    bus.on_reconnect(_failing(2, error, calls))
    await bus.blink()
    assert "nats" in process.health.report
    await clock.advance(2 * HOOK_PAUSE_S)
    assert len(calls) == 3 and not process.health.report
    await bus.blink()
    assert len(calls) == 4 and not process.health.report


@pytest.mark.logs_error("task.crashed")
async def test_a_hook_that_crashes_is_tried_again_too(bus: _Connected, process: Process, clock: VirtualClock) -> None:
    calls: list[int] = []
    bus.on_reconnect(_failing(1, RuntimeError("boom"), calls))
    await bus.blink()
    await clock.advance(LONGEST_PAUSE_S)
    assert len(calls) == 2 and not process.health.report


async def test_a_reconnect_while_the_hooks_run_runs_them_again(bus: _Connected, process: Process) -> None:
    calls: list[int] = []
    has_room = asyncio.Event()

    async def hook() -> None:
        calls.append(len(calls))
        await has_room.wait()

    bus.on_reconnect(hook)
    await bus.blink()
    await bus.blink()
    assert len(calls) == 1
    has_room.set()
    await settle()
    assert len(calls) == 2 and not process.health.report
