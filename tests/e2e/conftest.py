"""A running `shoal up`, used as a person uses it: by its command and over HTTP."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

SHOAL = (sys.executable, "-m", "shoal_local")
READY_SIGN = "Try it:"
# Of a machine behind a proxy, which knows nothing of this machine's loopback: nothing of ours may ask it.
DEAD_PROXY = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until(condition, *, timeout_s=60.0):
    """Return when ``condition()`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@dataclass
class Running:
    """One system and what it printed."""

    process: subprocess.Popen[str]
    environ: dict[str, str]
    url: str
    home: Path
    lines: list[str] = field(default_factory=list)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    @property
    def openai(self) -> openai.OpenAI:
        # trust_env off: a proxy of this machine does not know its loopback.
        http = httpx.Client(trust_env=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=60, max_retries=0, http_client=http)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another `shoal` command for the same home."""
        argv = (*SHOAL, *arguments)
        return subprocess.run(argv, env=self.environ, capture_output=True, text=True, timeout=120, check=False)

    def wait_for(self, sign: str, *, timeout_s: float) -> None:
        """Until it has printed ``sign``; fails with all it printed when it does not, or when it ends before."""
        deadline = time.monotonic() + timeout_s
        while sign not in self.output:
            is_over = self.process.poll() is not None or time.monotonic() > deadline
            if is_over and sign not in self.output:
                pytest.fail(f"no {sign!r} (exit code {self.process.poll()}) in:\n{self.output}")
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """Everything that any service logged as an error."""
        logs = [path.read_text() for path in (self.home / "logs").glob("*.log*")]
        return [line for log in logs for line in log.splitlines() if '"level":"ERROR"' in line]


@contextmanager
def shoal_up(home: Path, *arguments: str, **changes: str) -> Iterator[Running]:
    """`shoal up` in a home of its own; whatever happens, it is down afterwards."""
    port = free_port()
    environ = {**os.environ, **DEAD_PROXY, "SHOAL_HOME": str(home), "SHOAL_GATEWAY_PORT": str(port), **changes}
    process = subprocess.Popen(
        (*SHOAL, "up", *arguments), env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    running = Running(process, environ, f"http://127.0.0.1:{port}", home)
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: running.lines.extend(process.stdout or ()))
    reader.start()
    try:
        yield running
    finally:
        running.command("down")
        process.wait(timeout=60)
        reader.join(timeout=10)
        process.stdout.close()


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One system for all tests that leave it as they found it. A step takes 5 ms, so that streams are streams."""
    home = tmp_path_factory.mktemp("home")
    with shoal_up(home, "--engine", "scripted", SHOAL_SCRIPTED_STEP_MS="5") as running:
        running.wait_for(READY_SIGN, timeout_s=240)
        yield running
