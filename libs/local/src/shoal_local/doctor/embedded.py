"""What the embedded system of one home needs of this machine, and how its processes do.

Nothing here is changed: what died is cleaned up by the next start and by `shoal down`, not by looking.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from shoal_local.doctor.findings import Finding, ok, warning, wrong
from shoal_local.doctor.machine import GIB, MIB, Room
from shoal_local.home import ChildRecord, Home, Record
from shoal_local.processes import family
from shoal_local.servers import is_port_free
from shoal_local.settings import LocalSettings
from shoal_local.wording import size

KEEPER = "shoal_local.keeper"
LEAST_DISK_BYTES = 256 * MIB
LITTLE_DISK_BYTES = 2 * GIB
FIRST_FREE_PORT = 1024  # below it, more rights are needed
HEALTH_S = 2.0

RoomOf = Callable[[Path], Room]


def check_home(home: Home, record: Record | None) -> Finding:
    """The folder and who holds it. ``record`` is that of the living or of the last system."""
    folder = existing(home.folder)
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        advice = "Set SHOAL_HOME to a folder that is yours."
        return wrong("home", f"SHOAL_HOME={home.folder} cannot be written to: {folder} does not let you", advice)
    if record is None:
        return ok("home", f"{home.folder}, where nothing runs")
    if not home.is_running(record):
        return warning(
            "home", f"a system of {home.folder} ended without cleaning up", "Run `shoal down`: it ends what is left."
        )
    return ok("home", f"{home.folder}, which runs as pid {record.supervisor.pid}")


def existing(folder: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)


def check_disk(folders: dict[str, Path], room_of: RoomOf) -> list[Finding]:
    """Room for what is kept. ``folders`` by the setting that names them; those on one file system are told once."""
    by_device: dict[int, list[tuple[str, Path]]] = {}
    for setting, folder in folders.items():
        there = existing(folder)
        by_device.setdefault(there.stat().st_dev, []).append((setting, there))
    return [
        _check_room(" and ".join(setting for setting, _ in places), places[0][1], room_of(places[0][1]))
        for places in by_device.values()
    ]


def _check_room(settings: str, folder: Path, room: Room) -> Finding:
    found = f"{size(room.free_bytes)} of {size(room.total_bytes)} free under {settings} ({folder})"
    advice = f"Free room on that disk, or set {settings} to a larger one."
    if room.free_bytes < LEAST_DISK_BYTES:
        return wrong("disk", f"only {found}", advice)
    if room.free_bytes < LITTLE_DISK_BYTES:
        return warning("disk", f"only {found}: stored blocks will soon go before their time", advice)
    return ok("disk", found)


def check_gateway_port(settings: LocalSettings, record: Record | None) -> Finding:
    """Free for a start; of a system that runs, held by it. ``record`` is None unless it runs. Blocks."""
    name, host, port = "gateway port", settings.gateway_host, settings.gateway_port
    if record is not None:
        return ok(name, f"{record.gateway_url} is the gateway's of this home")
    try:
        if is_port_free(host, port):
            return ok(name, f"port {port} on {host} is free")
    except OSError as error:
        found = f"{host} is no address of this machine ({error.strerror or error})"
        return wrong(name, found, "Set SHOAL_GATEWAY_HOST to 127.0.0.1, or to 0.0.0.0 for other machines.")
    if port < FIRST_FREE_PORT and os.geteuid() != 0 and not _listeners(port):
        return wrong(name, f"port {port} needs more rights", "Set SHOAL_GATEWAY_PORT=8000, or any above 1023.")
    other = f"Set SHOAL_GATEWAY_PORT to another one, for example {port + 1 if port < 65535 else 8001}"
    if _is_shoal(settings.gateway_url):
        found = f"port {port} on {host} is taken by another Shoal: it listens{_named(port)}"
        return wrong(
            name, found, f"{other}, or stop that system: `shoal down` with its SHOAL_HOME, or `docker compose down`."
        )
    return wrong(name, f"port {port} on {host} is taken{_named(port)}", f"{other}, or end that program.")


def _named(port: int) -> str:
    return f" by {holders}" if (holders := ", ".join(_listeners(port))) else ""


def _listeners(port: int) -> list[str]:
    """Who listens there; none when the system does not let us see whose it is."""
    found = []
    for connection in psutil.net_connections("tcp"):
        is_there = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
        if is_there and connection.pid is not None and (told := _described(connection.pid)):
            found.append(told)
    return sorted(set(found))


def _described(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return ""


def _is_shoal(gateway_url: str) -> bool:
    try:
        return "is_alive" in httpx.get(f"{gateway_url}/healthz", timeout=HEALTH_S, trust_env=False).text
    except (httpx.HTTPError, UnicodeError):
        return False


def check_other_homes(home: Home) -> Finding:
    """Other embedded systems on this machine: they take memory and processor time."""
    others = sorted({folder for folder in _kept_homes() if Path(folder).resolve() != home.folder.resolve()})
    if not others:
        return ok("other systems", "no other home runs here")
    advice = f"Stop what you do not need: `SHOAL_HOME={others[0]} shoal down`."
    return warning("other systems", f"a system runs from {', '.join(others)} too", advice)


def _kept_homes() -> list[str]:
    """Each running supervisor has a keeper beside it, which is told the home."""
    found: list[str] = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if KEEPER in arguments:
            found += arguments[arguments.index(KEEPER) + 1 :][:1]
    return found


def check_processes(home: Home, record: Record) -> list[Finding]:
    """One for each process that is not well; one for all when all are."""
    stopped = {process.pid for process in psutil.process_iter(["status"]) if _is_stopped(process)}
    found = [finding for child in record.children if (finding := _check_process(home, child, stopped)) is not None]
    return found or [ok("processes", f"all {len(record.children)} run and are ready")]


def _is_stopped(process: psutil.Process) -> bool:
    return bool(process.info["status"] == psutil.STATUS_STOPPED)


def _check_process(home: Home, child: ChildRecord, stopped: set[int]) -> Finding | None:
    log = f"Read {home.logs / child.service}.log"
    if child.state in ("waiting", "starting"):
        return warning("processes", f"{child.service} is {child.state}", f"Look again in a minute; else: {log}.")
    if child.name is None or child.state != "ready":
        return wrong("processes", f"{child.service} is {child.state}", f"{log}; `shoal up` starts it again.")
    members = {child.name.pid, *(member.pid for member in family(child.name))} if stopped else set()
    still = sorted(members & stopped)
    if still:
        found = f"{child.service} stands still: pid {still[0]} was stopped by a signal"
        return wrong("processes", found, f"Let it go on: `kill -CONT {' '.join(map(str, still))}`.")
    if child.restarts:
        found = f"{child.service} runs, after {child.restarts} restarts"
        return warning("processes", found, f"{log} before its last start.")
    return None


@dataclass(frozen=True, slots=True)
class Needs:
    """Of a start, in bytes."""

    memory_bytes: int
    shared_memory_bytes: int


def needs_of(settings: LocalSettings, *, weights_bytes: int, kv_bytes: int, has_windows: bool) -> Needs:
    """What a start takes, from measured parts: docs/operations.md has the table."""
    light = GIB // 2
    if settings.engine_kind != "vllm":
        return Needs(light + GIB // 2, 0)
    store = int(settings.store_l1_gib * GIB) + 300 * MIB
    # Weights lie on the disk in two bytes and in memory in four, where the processor has no bfloat16.
    engine = 1300 * MIB + 2 * weights_bytes + kv_bytes
    # The store moves the blocks of models with sliding windows: then the engines' KV lies in shared memory.
    return Needs(light + store + 2 * engine, 2 * kv_bytes if has_windows else 0)
