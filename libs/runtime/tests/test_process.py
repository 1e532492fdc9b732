"""Start, drain, close and exit codes, in their order."""

import asyncio
import os
import signal

import pytest

from shoal_runtime.process import Process, running, serve
from shoal_runtime.settings import ServiceSettings
from shoal_testkit.clock import settle


class _Service:
    name = "probe"

    def __init__(self, *, fails: bool = False, drain_waits: bool = False) -> None:
        self.events: list[str] = []
        self._fails = fails
        self._drain_waits = drain_waits
        self.process: Process | None = None

    async def start(self, process: Process) -> None:
        self.process = process
        for name in ("store", "server"):
            process.stack.callback(self.events.append, f"closed {name}")
        process.tasks.spawn(self._loop, name="loop")
        if self._fails:
            raise RuntimeError("cannot start")
        self.events.append("started")

    async def _loop(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("loop cancelled")

    async def drain(self) -> None:
        assert self.process is not None and self.process.is_draining
        self.events.append("draining")
        if self._drain_waits:
            await asyncio.Event().wait()


async def test_a_block_starts_drains_and_closes_in_order() -> None:
    service = _Service()
    async with running(service, ServiceSettings()) as process:
        await settle()
        assert process.instance_id.startswith("probe-")
    assert service.events == ["started", "draining", "loop cancelled", "closed server", "closed store"]


async def test_a_signal_ends_with_code_0() -> None:
    service = _Service()
    serving = asyncio.ensure_future(serve(service, ServiceSettings()))
    await settle()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert service.events[1] == "draining"


async def test_a_process_is_not_ready_while_it_starts_and_while_it_drains() -> None:
    class _Watching(_Service):
        async def start(self, process: Process) -> None:
            await super().start(process)
            self.events.append(process.health.reason)

        async def drain(self) -> None:
            assert self.process is not None
            self.events.append(self.process.health.reason)

    service = _Watching()
    async with running(service, ServiceSettings()) as process:
        assert process.health.is_ready
        await settle()
    assert service.events[1:3] == ["process: starting", "process: draining"]


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_signal_during_the_start_ends_it_even_where_a_cancellation_is_swallowed(swallows: bool) -> None:
    class _Slow(_Service):
        async def start(self, process: Process) -> None:
            await super().start(process)
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                if not swallows:
                    raise

    service = _Slow()
    serving = asyncio.ensure_future(serve(service, ServiceSettings()))
    await settle()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert service.events[-1] == "closed store" and ("draining" in service.events) is swallows


async def test_a_second_signal_skips_the_rest_of_the_drain() -> None:
    service = _Service(drain_waits=True)
    serving = asyncio.ensure_future(serve(service, ServiceSettings()))
    await settle()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert service.events[-1] == "closed store"


async def test_a_drain_that_does_not_end_is_cut_off() -> None:
    service = _Service(drain_waits=True)
    async with running(service, ServiceSettings(drain_s=0.01)):
        pass
    assert service.events[-1] == "closed store"


@pytest.mark.logs_error("process.start_failed")
async def test_a_failed_start_closes_what_was_built_and_ends_with_code_1() -> None:
    service = _Service(fails=True)
    assert await serve(service, ServiceSettings()) == 1
    assert service.events[-2:] == ["closed server", "closed store"]


@pytest.mark.logs_error("process.failed", "task.crashed")
async def test_a_critical_crash_ends_with_code_1() -> None:
    class _Crashing(_Service):
        async def start(self, process: Process) -> None:
            await super().start(process)

            async def crash() -> None:
                raise RuntimeError("boom")

            process.tasks.spawn(crash, name="heart", critical=True)

    assert await serve(_Crashing(), ServiceSettings()) == 1
