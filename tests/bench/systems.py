"""What is measured from outside: `shoal up` in a home of its own, and the HTTP edge alone beside it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rows import cpu_s

from shoal_local.home import Home, Record
from shoal_runtime.servers import LOOPBACK, ServerCommand, ServerUnavailable, free_port, http_answers
from shoal_testkit.processes import process_running
from shoal_testkit.servers import temporary_directory

SERVICES = ("gateway", "tokenizer", "decode")
STEP_MS = 10.0
SCRIPTED = {
    "SHOAL_SCRIPTED_STEP_MS": str(STEP_MS),
    "SHOAL_SCRIPTED_PREFILL_TOKENS_PER_S": "20000",
    "SHOAL_ENGINE_MAX_RUNNING_REQUESTS": "256",
    "SHOAL_TOKENIZER_MAX_WAITING_ENCODES": "256",  # all streams begin in the same turn
}
START_S = 600.0
STOP_S = 90.0


@dataclass(frozen=True, slots=True)
class System:
    """Something that answers HTTP, and its processes by name."""

    url: str
    pids: dict[str, int]
    model: str = ""

    def used_s(self) -> dict[str, float]:
        """CPU of each process until now."""
        return {name: cpu_s(pid) for name, pid in self.pids.items()}


@contextlib.asynccontextmanager
async def shoal_up(*arguments: str, **environ: str) -> AsyncIterator[System]:
    """A system that is ready; it is down afterwards, whatever happens."""
    port = free_port()
    with temporary_directory("bench") as home, (home / "up.log").open("wb") as log:
        argv = (sys.executable, "-m", "shoal_local", "up", *arguments)
        own = {"SHOAL_HOME": str(home), "SHOAL_GATEWAY_PORT": str(port), **environ}
        up = subprocess.Popen(argv, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT)
        try:
            record = await _ready(up, home)
            pids = {child.service: child.name.pid for child in record.children if child.name is not None}
            url = f"http://{LOOPBACK}:{port}"
            yield System(url, pids, await _model(url))
        finally:
            up.terminate()
            await asyncio.to_thread(up.wait, STOP_S)


async def _ready(up: subprocess.Popen[bytes], home: Path) -> Record:
    async with asyncio.timeout(START_S):
        while up.poll() is None:
            record = Home(home).read()
            if record is not None and record.children and all(child.state == "ready" for child in record.children):
                return record
            await asyncio.sleep(0.1)
    raise ServerUnavailable((home / "up.log").read_text(errors="replace")[-4000:])


async def _model(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        return str((await http.get("/v1/models")).json()["data"][0]["id"])


@contextlib.asynccontextmanager
async def http_alone() -> AsyncIterator[System]:
    """The baseline of everything that a client sees."""
    port = free_port()

    async def is_ready() -> bool:
        return await http_answers(port, "/?events=0&bytes=2&step_ms=0")

    argv = (sys.executable, str(Path(__file__).with_name("http_alone.py")), str(port))
    server = ServerCommand(name="http", argv=argv, is_ready=is_ready, url=f"http://{LOOPBACK}:{port}")
    with temporary_directory("bench-http") as directory:
        async with process_running(server, directory) as running:
            yield System(server.url, {"http": running.process.pid})
