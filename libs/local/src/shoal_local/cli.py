"""`shoal up | down | status | store | explain`: Shoal from the command line.

The first three are about the embedded system of a home; the last two ask any system whose NATS can be reached.
Exit codes: 0 done, 1 it could not be done (a sentence says why), 3 nothing runs that could be shown, 130 ended by
force.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Sequence

from shoal_local.console import Console
from shoal_local.home import AlreadyRunning, Home, HomeUnusable, Record
from shoal_local.index_commands import show_explanation, show_store
from shoal_local.model import ModelUnavailable, prepare
from shoal_local.processes import is_alive
from shoal_local.servers import Ports, is_port_free, plan
from shoal_local.settings import LocalSettings
from shoal_local.status import render
from shoal_local.supervisor import Supervisor
from shoal_runtime.servers import LOOPBACK, ServerUnavailable

DOWN_MARGIN_S = 10.0
NOTHING_RUNS = 3


class CannotStart(Exception):
    """The message tells what to change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the console program."""
    parser = argparse.ArgumentParser(prog="shoal", description="Shoal on this machine, without containers.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start everything and stay until Ctrl-C")
    up.add_argument("--engine", choices=("vllm", "scripted"), help="scripted computes nothing: for tests")
    up.add_argument("-v", "--verbose", action="store_true", help="show every line of every process")
    commands.add_parser("down", help="stop what `shoal up` started")
    commands.add_parser("status", help="show what runs")
    store = commands.add_parser("store", help="show what is stored and what became of it")
    explain = commands.add_parser("explain", help="say why a request did not hit more")
    explain.add_argument("request_id", help="the answer's header x-request-id, or its id chatcmpl-…")
    for asking in (store, explain):
        asking.add_argument("--nats", metavar="URL", help="of another system; also SHOAL_NATS_URL")
        asking.add_argument("--json", action="store_true", help="for programs")
    chosen = parser.parse_args(arguments)
    if chosen.command == "up" and chosen.engine is not None:
        os.environ["SHOAL_ENGINE_KIND"] = chosen.engine
    settings = LocalSettings.load("local")
    home = Home(settings.home)
    try:
        match chosen.command:
            case "up":
                return _up(settings, home, is_verbose=chosen.verbose)
            case "down":
                return _down(settings, home)
            case "store" | "explain":
                return _ask_index(settings, home, chosen)
            case _:
                return _status(home)
    except HomeUnusable as exc:
        print(exc)
        return 1


def _up(settings: LocalSettings, home: Home, *, is_verbose: bool) -> int:
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


def _down(settings: LocalSettings, home: Home) -> int:
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


def _status(home: Home) -> int:
    record = home.read()
    if record is None or not home.is_running(record):
        print("Nothing runs.")
        return NOTHING_RUNS
    print(f"{record.gateway_url}, for {time.time() - record.started_at_s:.0f} s, from {home.folder}")
    print(render(record))
    return 0


def _ask_index(settings: LocalSettings, home: Home, chosen: argparse.Namespace) -> int:
    nats_url = chosen.nats or settings.nats_url
    if not nats_url:
        record = home.read()
        if record is None or not home.is_running(record):
            print(f"Nothing runs from {home.folder}. For a system elsewhere give --nats URL, or set SHOAL_NATS_URL.")
            return NOTHING_RUNS
        nats_url = record.nats_url
    if chosen.command == "explain":
        return show_explanation(nats_url, chosen.request_id, is_json=chosen.json)
    return show_store(nats_url, is_json=chosen.json)
