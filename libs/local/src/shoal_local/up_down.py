"""`shoal up` and `shoal down`: the life of the embedded system of a home.

Exit codes: 0 done, 1 it could not be done (a sentence says why), 130 ended by force.
"""

import asyncio
import os
import signal
import time

from shoal_local.console import Console
from shoal_local.home import AlreadyRunning, Home, Record
from shoal_local.processes import is_alive
from shoal_local.servers import Ports, is_port_free, plan
from shoal_local.settings import LocalSettings
from shoal_local.supervisor import Supervisor
from shoal_model import ModelUnavailable, prepare
from shoal_runtime.servers import LOOPBACK, ServerUnavailable

DOWN_MARGIN_S = 10.0


class CannotStart(Exception):
    """The message tells what to change."""


def up(settings: LocalSettings, home: Home, *, is_verbose: bool) -> int:
    """Start everything and stay until a signal."""
    try:
        with home.hold():
            console = Console(home.logs, is_verbose=is_verbose)
            try:
                return _supervise(settings, home, console)
            except (CannotStart, ModelUnavailable, ServerUnavailable) as exc:
                console.say(str(exc), "ERROR")
                return 1
            except KeyboardInterrupt:
                return 130
            finally:
                console.close()
    except AlreadyRunning:
        record = home.read()
        where = f" at {record.gateway_url} (pid {record.supervisor.pid})" if record else ""
        print(f"A system already runs{where}, from {home.folder}.")
        print("Stop it with `make down` or `shoal down`; for a second one set SHOAL_HOME and SHOAL_GATEWAY_PORT.")
        return 1


def _supervise(settings: LocalSettings, home: Home, console: Console) -> int:
    if leftovers := home.end_leftovers():
        console.say(f"ended {leftovers} processes of a run that did not end in order", "WARNING")
    _check_gateway_address(settings)
    model = prepare(settings.model, settings.models_dir, console.say)
    console.say(f"model {model.served_name} is in {model.folder}")
    ports = Ports.pick()
    specs = plan(settings, home, model, ports)
    nats_url = f"nats://{LOOPBACK}:{ports.nats}"
    supervisor = Supervisor(
        home, console, gateway_url=settings.gateway_url, nats_url=nats_url, served_name=model.served_name
    )
    return asyncio.run(
        supervisor.run(specs, start_timeout_s=settings.start_timeout_s, drain_timeout_s=settings.drain_timeout_s)
    )


def _check_gateway_address(settings: LocalSettings) -> None:
    host, port = settings.gateway_host, settings.gateway_port
    try:
        if is_port_free(host, port):
            return
    except OSError as exc:
        raise CannotStart(f"SHOAL_GATEWAY_HOST={host}: {exc.strerror or exc}") from exc
    raise CannotStart(
        f"port {port} on {host} is taken, or needs more rights: set SHOAL_GATEWAY_PORT to another one, "
        f"for example SHOAL_GATEWAY_PORT={port + 1 if port < 65535 else 8001}"
    )


def down(settings: LocalSettings, home: Home) -> int:
    """Stop it in order, by force when that takes too long; also what a dead supervisor left."""
    record = home.read()
    if record is None or not home.is_running(record):
        with home.hold():
            leftovers = home.end_leftovers()
        print(f"Nothing runs; ended {leftovers} processes that were left over." if leftovers else "Nothing runs.")
        return 0
    os.kill(record.supervisor.pid, signal.SIGTERM)
    print(f"Stopping pid {record.supervisor.pid} …", flush=True)
    if not _wait_gone(record, settings.drain_timeout_s + DOWN_MARGIN_S):
        print("It did not stop in time; ending it by force.")
        os.kill(record.supervisor.pid, signal.SIGKILL)
        _wait_gone(record, DOWN_MARGIN_S)
        with home.hold():
            home.end_leftovers()
    print("Stopped.")
    return 0


def _wait_gone(record: Record, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_alive(record.supervisor):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
