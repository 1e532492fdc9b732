"""Real NATS, Postgres and ``lmcache server`` for tests: started once a session, separated by names.

Each test takes its own database (``PostgresRunning.create_database``) or its own pool name on the shared NATS. A test
that kills a server starts one of its own. All in temporary directories, on free loopback ports.
"""

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shoal_kvstore.command import LmcacheSpec, lmcache_server
from shoal_runtime.servers import create_database, free_port, nats_server, postgres_server, prepare_postgres
from shoal_testkit.processes import RunningProcess, process_running, start_process

LMCACHE_START_S = 180.0


@contextlib.contextmanager
def temporary_directory(name: str) -> Iterator[Path]:
    """A directory of our own directly under the temporary root: Postgres may have to be let in as another user."""
    path = Path(tempfile.mkdtemp(prefix=f"shoal-{name}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(slots=True)
class NatsRunning:
    """One NATS with JetStream; ``kill`` and ``start`` make an outage on the same port."""

    directory: Path
    process: RunningProcess

    @property
    def url(self) -> str:
        return self.process.server.url

    def kill(self) -> None:
        """A crash: everything in memory is forgotten."""
        self.process.kill()

    async def start(self) -> None:
        """Start again after ``kill``, on the same port."""
        self.process = await start_process(self.process.server, self.directory)


@contextlib.asynccontextmanager
async def nats_running() -> AsyncIterator[NatsRunning]:
    """A NATS of one's own: ready in 0.1 s."""
    with temporary_directory("nats") as directory:
        running = NatsRunning(directory, await start_process(nats_server(directory, free_port()), directory))
        try:
            yield running
        finally:
            await running.process.stop()


@dataclass(slots=True)
class PostgresRunning:
    """One Postgres; ``kill`` and ``start`` make an outage on the same port, data kept."""

    directory: Path
    port: int
    process: RunningProcess
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def create_database(self, name: str = "") -> str:
        """A database (fresh when no name is given); returns its SQLAlchemy URL for asyncpg."""
        return await asyncio.to_thread(create_database, self.port, name or f"test_{next(self._numbers)}")

    def kill(self) -> None:
        self.process.kill()

    async def start(self) -> None:
        self.process = await start_process(self.process.server, self.directory)


@contextlib.asynccontextmanager
async def postgres_running() -> AsyncIterator[PostgresRunning]:
    """A Postgres of one's own: ready in about 3 s."""
    with temporary_directory("postgres") as directory:
        await asyncio.to_thread(prepare_postgres, directory)
        port = free_port()
        process = await start_process(postgres_server(directory, port), directory)
        running = PostgresRunning(directory, port, process)
        try:
            yield running
        finally:
            await running.process.stop()


@dataclass(slots=True)
class LmcacheRunning:
    """One ``lmcache server``: engines connect to ``spec.mq_port``, ``url`` is its HTTP side."""

    spec: LmcacheSpec
    process: RunningProcess

    @property
    def url(self) -> str:
        return self.process.server.url


@contextlib.asynccontextmanager
async def lmcache_running(
    shared_directory: Path,
    *,
    instance_id: str = "lmcache-test",
    coordinator_url: str = "",
    block_tokens: int = 128,
    l1_gib: float = 0.25,
    window_age_s: float = 180.0,
) -> AsyncIterator[LmcacheRunning]:
    """An LMCache server of one's own; importing it takes 10 s and more, so share it within a test file."""
    spec = LmcacheSpec(
        instance_id=instance_id,
        shared_directory=shared_directory,
        mq_port=free_port(),
        http_port=free_port(),
        metrics_port=free_port(),
        coordinator_url=coordinator_url,
        block_tokens=block_tokens,
        l1_gib=l1_gib,
        window_age_s=window_age_s,
    )
    with temporary_directory("lmcache") as directory:
        async with process_running(lmcache_server(spec), directory, timeout_s=LMCACHE_START_S) as process:
            yield LmcacheRunning(spec, process)
