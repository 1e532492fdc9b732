"""A whole system as real processes on the scripted engine: each can be killed and started again by its name.

Names: nats, postgres, kvindex (further ones kvindex-2, ...), gateway, and tokenizer-1, prefill-1, decode-1, ... They
are the instances' ids too, so receipts and logs name them. The store of prefill-1 is store-prefill-1; the stores of the
workers report to the instances of kvindex in turn. Ports stay over restarts, and lie below the range from which the
kernel takes those of outgoing connections. Nothing here is bound to an event loop, so a cluster may outlive the loop of
one test. Decode makes a token each ``STEP_MS`` and prefill computes slowly, so that there is something to interrupt.
"""

import asyncio
import contextlib
import json
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import httpx
from nats.aio.client import Client
from prometheus_client.parser import text_string_to_metric_families

from shoal_contracts.subjects import INDEX_STREAM
from shoal_runtime.servers import (
    LOOPBACK,
    ServerCommand,
    ServerUnavailable,
    http_answers,
    nats_server,
    postgres_server,
    prepare_postgres,
)
from shoal_testkit.processes import RunningProcess, start_process
from shoal_testkit.servers import temporary_directory
from shoal_testkit.tiny_tokenizer import VOCABULARY_TOKENS, write_tiny_tokenizer

MODEL = "tiny"
BLOCK_TOKENS = 128
STEP_MS = 20
PREFILL_TOKENS_PER_S = 400
MAX_DECODING = 6
PLACE_WAIT_S = 8
DRAIN_S = 3
HANDOFF_WAIT_MS = 5000  # a disk that stands still for a second is not what these tests are about
START_S = 90.0
SERVED_S = 60.0
PORTS = range(20000, 32000)
SERVERS = ("nats", "postgres")
WORKERS = ("prefill", "decode")
RUNNING = {
    "decode": "shoal_decode_running_requests",
    "prefill": "shoal_prefill_running_jobs",
    "tokenizer": "shoal_tokenizer_answers_open",
    "gateway": "shoal_gateway_running_requests",
}


Settings: TypeAlias = Mapping[str, Mapping[str, str]]  # variables by role; "" are everybody's


@dataclass(frozen=True, slots=True)
class Shape:
    """How many of each."""

    tokenizers: int = 2
    prefill: int = 2
    decode: int = 2
    kvindexes: int = 1

    def names(self) -> list[str]:
        """Every process but the servers."""
        counts = {"tokenizer": self.tokenizers, "prefill": self.prefill, "decode": self.decode}
        numbered = [f"{role}-{number}" for role, count in counts.items() for number in range(1, count + 1)]
        return [*self.indexes(), *numbered, "gateway"]

    def indexes(self) -> list[str]:
        return ["kvindex", *(f"kvindex-{number}" for number in range(2, self.kvindexes + 1))]


@dataclass(frozen=True, slots=True)
class IndexAddress:
    """Where an instance of kvindex answers: requests, and the reports of stores."""

    grpc: str
    coordinator_url: str


@dataclass(slots=True)
class Cluster:
    """Made by ``cluster_running``."""

    directory: Path
    commands: dict[str, ServerCommand]
    stores: dict[str, str] = field(default_factory=dict)  # where the store of a worker answers, for store_http
    indexes: dict[str, "IndexAddress"] = field(default_factory=dict)
    running: dict[str, RunningProcess] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where clients ask."""
        return self.commands["gateway"].url

    def is_running(self, name: str) -> bool:
        return name in self.running and self.running[name].is_running

    def kill(self, *names: str) -> None:
        """SIGKILL to all of them before any is waited for."""
        for name in names:
            self.running[name].process.kill()
        for name in names:
            self.running[name].process.wait()

    def freeze(self, name: str) -> None:
        """It stands still and keeps its connections, as a paused machine does."""
        self.running[name].signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.running[name].signal(signal.SIGCONT)

    def terminate(self, name: str) -> None:
        """Ask it to leave in order; ``left`` waits for it."""
        self.running[name].signal(signal.SIGTERM)

    async def left(self, name: str) -> int:
        """The exit code of a process that ends by itself."""
        return await self.running[name].wait(timeout_s=30.0)

    async def stop(self, *names: str) -> None:
        """In order, at the same time."""
        await asyncio.gather(*(self.running[name].stop() for name in names if self.is_running(name)))

    async def start(self, *names: str) -> None:
        """Start what does not run, all at the same time; return when each says that it is ready."""
        missing = [name for name in names if not self.is_running(name)]
        started = await asyncio.gather(
            *(start_process(self.commands[name], self.directory, timeout_s=START_S) for name in missing)
        )
        self.running |= dict(zip(missing, started, strict=True))

    @contextlib.contextmanager
    def changed(self, name: str, **environ: str) -> Iterator[None]:
        """What starts under this name meanwhile has these variables besides."""
        before = self.commands[name]
        self.commands[name] = replace(before, environ={**before.environ, **environ})
        try:
            yield
        finally:
            self.commands[name] = before

    async def heal(self) -> None:
        """Start what is missing and wait until requests go the whole way and nothing runs."""
        await self.start(*SERVERS)
        await self.start(*(name for name in self.commands if name not in SERVERS))
        await self.serves_well()
        await self.is_idle()

    async def serves_well(self, timeout_s: float = SERVED_S) -> None:
        """Until the gateway knows every worker and its own probe went the whole way, without any fallback."""
        deadline_s = time.monotonic() + timeout_s
        async with httpx.AsyncClient(base_url=self.url, timeout=timeout_s, trust_env=False) as http:
            while (reply := await http.get("/readyz")).status_code != httpx.codes.OK:
                if time.monotonic() > deadline_s:
                    raise ServerUnavailable(f"the gateway is not ready: {reply.text}")
                await asyncio.sleep(0.1)

    async def metric(self, name: str, metric: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 when there are none."""
        async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
            text = (await http.get(f"{self.commands[name].url}/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == metric and labels.items() <= s.labels.items())

    async def what_runs(self) -> dict[str, float]:
        """Requests, jobs and answers that are under way, by process; and jobs in the queues."""
        found: dict[str, float] = {}
        for name in self.commands:
            metric = RUNNING.get(name.split("-")[0])
            if metric is not None and self.is_running(name):
                found[name] = await self.metric(name, metric)
        if self.is_running("nats"):
            found["queues"] = await self._queued_jobs()
        return {name: count for name, count in found.items() if count}

    async def is_idle(self, timeout_s: float = 10.0) -> None:
        """Until nothing runs anywhere; fails with what still does."""
        deadline_s = time.monotonic() + timeout_s
        while what := await self.what_runs():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"still running: {what}")
            await asyncio.sleep(0.05)

    async def is_written(self, timeout_s: float = 15.0) -> None:
        """Until Postgres has everything that kvindex knows."""
        deadline_s = time.monotonic() + timeout_s
        names = [name for name in self.indexes if self.is_running(name)]
        while any([await self.metric(name, "shoal_kvindex_pending_changes") for name in names]):
            if time.monotonic() > deadline_s:
                raise AssertionError("kvindex still has changes that are not in Postgres")
            await asyncio.sleep(0.05)

    async def _queued_jobs(self) -> int:
        client = Client()
        await client.connect(self.commands["nats"].url)
        try:
            streams = await client.jetstream().streams_info()
            return sum(stream.state.messages for stream in streams if stream.config.name != INDEX_STREAM)
        finally:
            await client.close()

    async def whose(self, role: str, *, timeout_s: float = 15.0) -> str:
        """The worker of ``role`` that has something to do, as soon as one has."""
        deadline_s = time.monotonic() + timeout_s
        names = [name for name in self.commands if name.split("-")[0] == role]
        while time.monotonic() < deadline_s:
            for name in names:
                if self.is_running(name) and await self.metric(name, RUNNING[role]):
                    return name
            await asyncio.sleep(0.01)
        raise AssertionError(f"no {role} worker has anything to do")

    def lines(self, *names: str, event: str = "", **keys: object) -> list[dict[str, Any]]:
        """Log lines of these processes, all lives together, in order of time, that have this event and these keys."""
        found = [line for name in names for line in _parse(self.running[name].output)]
        found.sort(key=lambda line: str(line["at"]))
        if event:
            found = [line for line in found if line["event"] == event]
        return [line for line in found if keys.items() <= line.items()]

    def count_errors(self) -> int:
        """A mark for ``errors_since``."""
        return len(self._errors())

    def errors_since(self, mark: int, *, expected: Iterable[str] = ()) -> list[dict[str, Any]]:
        """What services logged as ERROR after the mark."""
        return [line for line in self._errors()[mark:] if line["event"] not in set(expected)]

    def _errors(self) -> list[dict[str, Any]]:
        services = [name for name in self.running if name not in SERVERS]
        return self.lines(*services, level="ERROR")


def _parse(output: str) -> list[dict[str, Any]]:
    found = []
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed process may be torn
                found.append(json.loads(line))
    return found


def _take_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            found.append(port)
        if len(found) == count:
            return found
    raise ServerUnavailable("no free ports")


def _service(name: str, port: int, environ: dict[str, str]) -> ServerCommand:
    role = name.split("-")[0]
    own = f"SHOAL_{role.upper()}"
    # The gateway's own readiness sends a request through everybody: it would wait for who waits for it.
    path = "/healthz" if role == "gateway" else "/readyz"
    setting = f"{own}_PORT" if role == "gateway" else f"{own}_OPS_PORT"

    async def is_ready() -> bool:
        return await http_answers(port, path)

    return ServerCommand(
        name=name,
        argv=(sys.executable, "-m", f"shoal_{role}"),
        is_ready=is_ready,
        url=f"http://{LOOPBACK}:{port}",
        environ={**environ, setting: str(port), f"{own}_INSTANCE_ID": name},
    )


def _environ(directory: Path, nats: int, postgres: int) -> dict[str, dict[str, str]]:
    """Settings by role; "" are everybody's."""
    engine = {
        "SHOAL_ENGINE_KIND": "scripted",
        "SHOAL_ENGINE_MODEL": MODEL,
        "SHOAL_ENGINE_BLOCK_TOKENS": str(BLOCK_TOKENS),
        "SHOAL_SCRIPTED_VOCABULARY_TOKENS": str(VOCABULARY_TOKENS),
        "SHOAL_SCRIPTED_SHARED_FOLDER": str(directory / "blocks"),
        "SHOAL_SCRIPTED_FLUSH_S": "0.05",
    }
    database = f"postgresql://postgres@{LOOPBACK}:{postgres}/postgres"
    return {
        "": {"SHOAL_NATS_URL": f"nats://{LOOPBACK}:{nats}", "SHOAL_DRAIN_S": str(DRAIN_S)},
        "kvindex": {"SHOAL_KVINDEX_POSTGRES_URL": database},
        "tokenizer": {
            "SHOAL_TOKENIZER_MODEL": str(write_tiny_tokenizer(directory / "model")),
            "SHOAL_TOKENIZER_SERVED_NAME": MODEL,
        },
        "prefill": {
            **engine,
            "SHOAL_SCRIPTED_PREFILL_TOKENS_PER_S": str(PREFILL_TOKENS_PER_S),
            "SHOAL_PREFILL_HANDOFF_WAIT_MS": str(HANDOFF_WAIT_MS),
        },
        "decode": {
            **engine,
            "SHOAL_SCRIPTED_STEP_MS": str(STEP_MS),
            "SHOAL_DECODE_MAX_RUNNING_REQUESTS": str(MAX_DECODING),
        },
        "gateway": {
            "SHOAL_GATEWAY_POSTGRES_URL": database,
            "SHOAL_GATEWAY_PROBE_KEEP_S": "0",
            "SHOAL_GATEWAY_PLACE_WAIT_S": str(PLACE_WAIT_S),
        },
    }


@dataclass(frozen=True, slots=True)
class _Ports:
    """What each process listens on beside its ops port."""

    stores: Mapping[str, int]  # by worker
    coordinators: Mapping[str, int]  # by instance of kvindex
    indexes: Mapping[str, int]

    def environs(self) -> dict[str, dict[str, str]]:
        """By name. A worker's simulated store keeps its name and port over restarts, as an ``lmcache server`` does."""
        workers = {
            name: {
                "SHOAL_SCRIPTED_STORE_INSTANCE_ID": f"store-{name}",
                "SHOAL_SCRIPTED_STORE_HTTP_PORT": str(port),
                "SHOAL_SCRIPTED_COORDINATOR_URL": f"http://{LOOPBACK}:{coordinator}",
            }
            for (name, port), coordinator in zip(self.stores.items(), cycle(self.coordinators.values()), strict=False)
        }
        indexes = {
            name: {
                "SHOAL_KVINDEX_COORDINATOR_PORT": str(self.coordinators[name]),
                "SHOAL_KVINDEX_GRPC_PORT": str(port),
            }
            for name, port in self.indexes.items()
        }
        return {**workers, **indexes}

    def addresses(self) -> dict[str, IndexAddress]:
        return {
            name: IndexAddress(f"{LOOPBACK}:{port}", f"http://{LOOPBACK}:{self.coordinators[name]}")
            for name, port in self.indexes.items()
        }


def _cluster(directory: Path, shape: Shape, settings: Settings) -> Cluster:
    """Not started."""
    names, indexes = shape.names(), shape.indexes()
    workers = [name for name in names if name.split("-")[0] in WORKERS]
    free = iter(_take_ports(2 + len(names) + len(workers) + 2 * len(indexes)))
    nats, postgres = next(free), next(free)
    ports = _Ports(*(dict(zip(group, free, strict=False)) for group in (workers, indexes, indexes)))
    by_role, by_name = _environ(directory, nats, postgres), ports.environs()
    commands = {
        "nats": nats_server(directory / "nats", nats),
        "postgres": postgres_server(directory / "postgres", postgres),
    }
    for name in names:
        role = name.split("-")[0]
        environ = by_role[""] | by_role[role] | by_name.get(name, {})
        extra = {**settings.get("", {}), **settings.get(role, {})}
        commands[name] = _service(name, next(free), environ | extra)
    stores = {name: f"http://{LOOPBACK}:{port}" for name, port in ports.stores.items()}
    return Cluster(directory, commands, stores, ports.addresses())


@contextlib.asynccontextmanager
async def cluster_running(shape: Shape | None = None, settings: Settings | None = None) -> AsyncIterator[Cluster]:
    """A system that serves; everything is killed at the end. ``settings`` count more than the usual ones."""
    with temporary_directory("cluster") as directory:
        await asyncio.to_thread(prepare_postgres, directory / "postgres")
        cluster = _cluster(directory, shape or Shape(), settings or {})
        try:
            await cluster.heal()
            yield cluster
        finally:
            # Postgres must end in order, because its own children would outlive it.
            await cluster.stop("postgres")
            cluster.kill(*cluster.running)
