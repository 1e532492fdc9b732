"""The life of a process: start, serve until a signal, drain, close, exit code.

Order is the contract. Start: the service builds its collaborators top to bottom and pushes each on ``stack``.
Stop: ``is_draining`` is set, the service drains within ``drain_s``, background tasks are cancelled, then the stack
unwinds, last built first closed, so nothing is closed before its users. Exit codes: 0 after an orderly stop, 1 when
the start failed or a critical task crashed. A second signal skips the draining, one during the start abandons it.
docs/decisions/0016-deadlines-and-typed-failures.md
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, TypeVar

import uvloop

from shoal_contracts.ids import new_instance_id
from shoal_runtime import logs, tracing
from shoal_runtime.clock import Clock, SystemClock
from shoal_runtime.health import LIFECYCLE, Health
from shoal_runtime.settings import ServiceSettings
from shoal_runtime.tasks import Tasks

log = logs.get_logger(__name__)

CLOSE_S = 15.0

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


@dataclass(slots=True)
class Process:
    """What ``start`` builds upon. Used on the one event loop of the process."""

    name: str
    settings: ServiceSettings
    instance_id: str
    incarnation: int
    clock: Clock
    health: Health
    tasks: Tasks
    stack: AsyncExitStack
    is_draining: bool = False
    failure: str | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, failure: str | None = None) -> None:
        """Ask the process to end: in order, or because of a ``failure`` that makes serving impossible."""
        if failure is not None and self.failure is None:
            self.failure = failure
            log.error("process.failed", reason=failure)
        self.stopping.set()


class Service(Protocol):
    """One service; ``service.py`` of each implements it."""

    name: str

    async def start(self, process: Process) -> None:
        """Build collaborators in start order, each closed by ``process.stack``. Raises when that cannot work."""

    async def drain(self) -> None:
        """Take nothing new and finish what runs. Cancelled after ``drain_s``."""


def new_process(name: str, settings: ServiceSettings, clock: Clock | None = None) -> Process:
    """A process that was not started yet; must be made on a running loop."""
    clock = clock or SystemClock()
    health = Health()
    process = Process(
        name=name,
        settings=settings,
        instance_id=settings.instance_id or new_instance_id(name),
        incarnation=int(clock.now() * 1000),  # grows with each start of the same instance_id
        clock=clock,
        health=health,
        tasks=Tasks(health, clock=clock),
        stack=AsyncExitStack(),
    )
    process.tasks.on_critical = process.stop
    return process


@contextlib.asynccontextmanager
async def running(service: Service, settings: ServiceSettings, clock: Clock | None = None) -> AsyncIterator[Process]:
    """A started service inside this loop, drained and closed at the end of the block. Also for tests."""
    process = new_process(service.name, settings, clock)
    process.health.set(LIFECYCLE, "starting")
    try:
        await service.start(process)
        process.health.set(LIFECYCLE, None)
        log.info("process.started", service=service.name, incarnation=process.incarnation)
        yield process
        await _drain(service, process)
    finally:
        await _close(process)


async def _drain(service: Service, process: Process) -> None:
    process.is_draining = True
    process.health.set(LIFECYCLE, "draining")
    log.info("process.draining", drain_s=process.settings.drain_s)
    try:
        async with asyncio.timeout(process.settings.drain_s):
            await service.drain()
    except TimeoutError:
        log.warning("process.drain_timed_out", drain_s=process.settings.drain_s)


async def _close(process: Process) -> None:
    """Loops first, so that none of them meets a collaborator that is already closed."""
    process.is_draining = True
    try:
        async with asyncio.timeout(CLOSE_S):
            await process.tasks.close()
            await process.stack.aclose()
    except TimeoutError:
        log.error("process.close_timed_out", close_s=CLOSE_S)
    log.info("process.stopped")


async def serve(service: Service, settings: ServiceSettings) -> int:
    """Run a service until SIGTERM, SIGINT or a failure; returns the exit code."""
    loop = asyncio.get_running_loop()
    serving = asyncio.current_task()
    assert serving is not None

    stop_asked = asyncio.Event()

    def on_signal() -> None:
        if started is None or stop_asked.is_set():
            serving.cancel()
        else:
            started.stop()
        stop_asked.set()

    started: Process | None = None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        async with running(service, settings) as process:
            started = process
            if stop_asked.is_set():  # a library swallowed the cancellation of the start
                process.stop()
            await process.stopping.wait()
        return 0 if process.failure is None else 1
    except asyncio.CancelledError:
        log.warning("process.stopped_at_once")
        return 0 if started is None or started.failure is None else 1
    except Exception as error:
        log.error("process.start_failed" if started is None else "process.stop_failed", exc_info=error)
        return 1


def run(service_factory: Callable[[SettingsT], Service], settings: SettingsT) -> NoReturn:
    """The whole of a service's ``__main__``."""
    service = service_factory(settings)
    settings = settings.model_copy(update={"instance_id": settings.instance_id or new_instance_id(service.name)})
    logs.configure(settings.log_level, service.name, settings.instance_id)
    tracing.configure(settings.otlp_endpoint, service.name, settings.instance_id)
    sys.exit(uvloop.run(serve(service, settings)))
