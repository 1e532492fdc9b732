"""Real processes for tests: start one, wait until it serves, kill it, read what it said.

Built on ``subprocess`` and not on asyncio's processes, so that one server can outlive the loop of one test.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_runtime.servers import LOOPBACK, ServerCommand, ServerUnavailable, free_port, http_answers, wait_ready

STOP_S = 20.0


@dataclass(slots=True)
class RunningProcess:
    """One started process. ``output`` is its stdout and stderr so far."""

    server: ServerCommand
    process: "subprocess.Popen[bytes]"
    output_path: Path

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, as a crash would be; returns when the process is gone."""
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def stop(self, timeout_s: float = STOP_S) -> int:
        """Ask it to end and wait; returns the exit code. Killed (and ServerUnavailable) when it does not."""
        if self.is_running:
            self.process.send_signal(self.server.stop_signal)
        return await self.wait(timeout_s)

    async def wait(self, timeout_s: float = STOP_S) -> int:
        """The exit code once it ended by itself."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while (code := self.process.poll()) is None:
            if loop.time() > deadline_s:
                self.kill()
                raise ServerUnavailable(
                    f"{self.server.name} did not end within {timeout_s:g} s:\n{self.output[-4000:]}"
                )
            await asyncio.sleep(0.02)
        return code


async def start_process(server: ServerCommand, directory: Path, *, timeout_s: float = 60.0) -> RunningProcess:
    """Start ``server`` with its output in ``directory`` and wait until it is ready."""
    directory.mkdir(parents=True, exist_ok=True)
    output_path = directory / f"{server.name.replace(' ', '-')}.log"
    with output_path.open("ab") as output:
        process = subprocess.Popen(
            server.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**os.environ, **server.environ},
        )
    running = RunningProcess(server, process, output_path)
    try:
        await wait_ready(server, timeout_s=timeout_s, is_running=lambda: running.is_running)
    except BaseException as error:
        running.kill()
        if isinstance(error, ServerUnavailable):
            raise ServerUnavailable(f"{error}\n{running.output[-4000:]}") from None
        raise
    return running


@contextlib.asynccontextmanager
async def process_running(
    server: ServerCommand, directory: Path, *, timeout_s: float = 60.0
) -> AsyncIterator[RunningProcess]:
    """``start_process`` as a block; stopped at its end whatever happened inside."""
    running = await start_process(server, directory, timeout_s=timeout_s)
    try:
        yield running
    finally:
        await running.stop()


def service_command(name: str, environ: Mapping[str, str]) -> ServerCommand:
    """``python -m shoal_<name>`` on a free ops port; ready when /readyz says so. ``url`` is that port's."""
    ops_port = free_port()

    async def is_ready() -> bool:
        return await http_answers(ops_port, "/readyz")

    return ServerCommand(
        name=name,
        argv=(sys.executable, "-m", f"shoal_{name}"),
        is_ready=is_ready,
        url=f"http://{LOOPBACK}:{ops_port}",
        environ={**environ, f"SHOAL_{name.upper()}_OPS_PORT": str(ops_port)},
    )
