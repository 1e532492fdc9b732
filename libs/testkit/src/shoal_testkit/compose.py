"""The containers of docker-compose.yml under a project name of their own, driven by the command that people use.

Nothing is left: whoever starts a project takes it ``down`` with its volumes. Everything blocks, and everything is
bounded in time; a failure shows the containers and the last lines of those that are not well.
"""

import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

READ_METRICS = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1]).read().decode())"
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
LAST_LINES = 60
POLL_S = 0.25


class ComposeFailed(AssertionError):
    """A command failed or something did not come to be in time; the message has what is known."""


@dataclass(frozen=True, slots=True)
class Container:
    """As Docker saw it when it was asked."""

    id: str
    service: str
    pid: int
    status: str
    health: str  # empty: it has no health check
    exit_code: int
    restarts: int
    details: Mapping[str, Any]

    @property
    def is_well(self) -> bool:
        """It runs and is ready, or it was to run once and did."""
        if self.status == "exited":
            return self.exit_code == 0
        return self.status == "running" and self.health in ("", "healthy")


def docker(*arguments: str, timeout_s: float = 60.0) -> str:
    """What the command said; ComposeFailed when it failed."""
    argv = ("docker", *arguments)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise ComposeFailed(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(slots=True)
class ComposeProject:
    """One system; made by ``compose_project``."""

    root: Path
    name: str
    files: Sequence[Path] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings['SHOAL_GATEWAY_PORT']}"

    def compose(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """`docker compose` with the settings of this project and none of the shell's, whatever comes of it."""
        files = [argument for file in self.files for argument in ("-f", str(file))]
        kept = {name: os.environ[name] for name in ("SHOAL_VERSION",) if name in os.environ}
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")} | kept
        return subprocess.run(
            ("docker", "compose", "-p", self.name, "--env-file", os.devnull, *files, *arguments),
            cwd=self.root,
            env={**environ, **self.settings},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """The same, which must succeed."""
        done = self.compose(*arguments, timeout_s=timeout_s)
        if done.returncode:
            raise ComposeFailed(f"docker compose {' '.join(arguments)} failed:\n{done.stderr}\n{self.describe()}")
        return done.stdout

    def up(self, *arguments: str, timeout_s: float = 420.0) -> None:
        """Start what does not run; returns when all of it is ready, or has done what it does once."""
        self.run("up", "-d", "--wait", *arguments, timeout_s=timeout_s)

    def down(self, *arguments: str) -> None:
        self.run("--profile", "*", "down", "--remove-orphans", *arguments, timeout_s=180.0)

    def containers(self, service: str = "") -> list[Container]:
        """All of the project or of one service, stopped ones included, oldest first."""
        filters = ["--filter", f"label={PROJECT_LABEL}={self.name}"]
        if service:
            filters += ["--filter", f"label={SERVICE_LABEL}={service}"]
        ids = docker("ps", "-aq", "--no-trunc", *filters).split()
        if not ids:
            return []
        found = [_container(details) for details in json.loads(docker("inspect", *ids))]
        return sorted(found, key=lambda container: str(container.details["Created"]))

    def container(self, container_id: str) -> Container:
        return _container(json.loads(docker("inspect", container_id))[0])

    def restart(self, container: Container, timeout_s: float = 120.0) -> None:
        """Stop it in order, start it, and wait until it is ready again."""
        docker("restart", container.id, timeout_s=timeout_s)
        self.wait(lambda: self.container(container.id).is_well, timeout_s)

    def kill(self, container: Container) -> None:
        """SIGKILL to its process from outside: `docker kill` would count as a wish that it stays away."""
        image = str(container.details["Config"]["Image"])
        kill = ("--entrypoint", "sh", image, "-c", f"kill -9 {container.pid}")
        docker("run", "--rm", "--pid", "host", "--user", "0", "--network", "none", *kill)

    def metric(self, container: Container, name: str) -> float:
        """The sum over all labels of what this container counts under ``name``."""
        port = 8000 if container.service == "gateway" else 9100
        page = docker("exec", container.id, "python", "-c", READ_METRICS, f"http://127.0.0.1:{port}/metrics")
        families = text_string_to_metric_families(page)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def wait(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Until ``holds``; ComposeFailed with everything that is known when it does not in time."""
        until_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > until_s:
                raise ComposeFailed(f"not within {timeout_s:g} s:\n{self.describe()}")
            time.sleep(POLL_S)

    def logs(self, service: str) -> str:
        return self.run("logs", "--no-color", "--no-log-prefix", service)

    def describe(self) -> str:
        """Every container, and the last lines of those that are not well."""
        lines = []
        for container in self.containers():
            lines.append(f"{container.service} {container.id[:12]}: {container.status} {container.health}")
            if not container.is_well:
                said = subprocess.run(
                    ("docker", "logs", "--tail", str(LAST_LINES), container.id),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=False,
                    timeout=30,
                )
                lines.append(said.stdout)
                checks = (container.details["State"].get("Health") or {}).get("Log") or []
                lines += [str(check["Output"]) for check in checks[-2:]]
        return "\n".join(lines)

    def left(self) -> dict[str, list[str]]:
        """What Docker still has of this project."""
        mine = ("--filter", f"label={PROJECT_LABEL}={self.name}")
        return {
            "containers": docker("ps", "-aq", *mine).split(),
            "volumes": docker("volume", "ls", "-q", *mine).split(),
            "networks": docker("network", "ls", "-q", *mine).split(),
        }


def _container(details: Mapping[str, Any]) -> Container:
    state = details["State"]
    return Container(
        id=details["Id"],
        service=details["Config"]["Labels"][SERVICE_LABEL],
        pid=state["Pid"],
        status=state["Status"],
        health=(state.get("Health") or {}).get("Status", ""),
        exit_code=state["ExitCode"],
        restarts=details["RestartCount"],
        details=details,
    )


@contextmanager
def compose_project(root: Path, *files: Path, **settings: str) -> Iterator[ComposeProject]:
    """A project that is not started yet, on a free port; at the end nothing of it is left."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    name = f"shoal-test-{uuid.uuid4().hex[:8]}"
    every_file = (root / "docker-compose.yml", *files)
    project = ComposeProject(root, name, every_file, {"SHOAL_GATEWAY_PORT": port, **settings})
    try:
        yield project
    finally:
        project.down("--volumes", "--timeout", "10")
