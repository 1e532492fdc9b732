"""Which checks are made of what, side by side where they do not need each other; each ends by its deadline.

Of a machine: what a start needs, and the embedded system of a home. Of a system, wherever it runs: what its NATS, its
instances and its index say, and what becomes of a request through its gateway. What is not looked at is told as such.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import chain

import httpx

from shoal_local.doctor import bus, embedded, fleet, index, journey, machine, model_files
from shoal_local.doctor.findings import Finding, Findings, Verdict, aside, unknown, within
from shoal_local.doctor.packages import check_packages
from shoal_local.fleet_view import FleetView, look
from shoal_local.home import Home, Record
from shoal_local.nats_client import NatsAway, shown_address
from shoal_local.settings import LocalSettings
from shoal_runtime.version import version

CHECK_S = 10.0
MODEL_S = 20.0  # a prepared model is read from the disk as a whole
LOOK_S = 14.0
JUDGE_S = 6.0
JOURNEY_S = 2 * journey.REQUEST_S
ENGINE_KV_BYTES = 2**29

LISTEN_S = 3.5  # a busy machine beats late
OF_VIEW = ("instances", "addresses", "versions", "clocks", "pools", "queues", "index", "postgres", "stores")


@dataclass(frozen=True, slots=True)
class Section:
    """Findings about one thing."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """What is looked at. ``nats_url`` and ``gateway_url``: "" for those of the home, while it runs."""

    settings: LocalSettings
    home: Home
    nats_url: str = ""
    gateway_url: str = ""

    @property
    def is_elsewhere(self) -> bool:
        """A system was named: this machine need not be able to run one."""
        return bool(self.nats_url or self.gateway_url)


@dataclass(frozen=True, slots=True)
class Checkup:
    """All that was found, and what was not looked at."""

    sections: tuple[Section, ...]
    not_looked_at: tuple[str, ...]

    @property
    def findings(self) -> list[Finding]:
        return list(chain.from_iterable(section.findings for section in self.sections))

    @property
    def is_well(self) -> bool:
        """Everything was looked at, and nothing is wrong."""
        return all(finding.verdict in (Verdict.OK, Verdict.WARNING) for finding in self.findings)


async def check_up(target: Target) -> Checkup:
    """Takes some seconds; never more than two minutes."""
    record = None if target.is_elsewhere else target.home.read()
    running = record if record is not None and target.home.is_running(record) else None
    nats_url = target.nats_url or (running.nats_url if running else "")
    gateway_url = target.gateway_url or (running.gateway_url if running else "")
    machine_part, (system_part, view), gateway = await asyncio.gather(
        _no_section() if target.is_elsewhere else _check_machine(target, record, running),
        _check_system(nats_url),
        _ask_gateway(gateway_url),
    )
    # After the others: it gives the system work.
    request_part = await _check_requests(gateway_url, gateway, view)
    return Checkup(
        tuple(part for part in (machine_part, system_part, request_part) if part is not None),
        tuple(_not_looked_at(target, nats_url, gateway_url)),
    )


def _not_looked_at(target: Target, nats_url: str, gateway_url: str) -> list[str]:
    told = []
    if target.is_elsewhere:
        told.append("this machine: run it there, without --nats and --url, for what a start needs")
    if not nats_url and not gateway_url:
        told.append(f"a running system: nothing runs from {target.home.folder}; `shoal up`, or give --nats URL")
    elif not nats_url:
        told.append("instances, queues and the index: give --nats URL")
    elif not gateway_url:
        told.append("the gateway, and that a stored block is loaded: give --url URL")
    return told


async def _no_section() -> None:
    return None


async def _check_machine(target: Target, record: Record | None, running: Record | None) -> Section:
    settings, home = target.settings, target.home
    folder = model_files.folder_of(settings.model, settings.models_dir)

    def look_at_machine() -> Findings:
        return _machine_findings(settings, machine.read_machine(), is_running=running is not None)

    def look_at_home() -> Findings:
        return [embedded.check_home(home, record), embedded.check_other_homes(home)]

    def look_at_processes() -> Findings:
        return [] if running is None else embedded.check_processes(home, running)

    folders = {"SHOAL_HOME": home.folder, "SHOAL_MODELS_DIR": folder.parent}
    has_engine = settings.engine_kind == "vllm"
    found = await asyncio.gather(
        _blocking("machine", look_at_machine),
        _blocking("packages", lambda: [check_packages(has_engine=has_engine)]),
        _blocking("home", look_at_home),
        _blocking("processes", look_at_processes),
        _blocking("gateway port", lambda: [embedded.check_gateway_port(settings, running)]),
        _blocking("disk", lambda: embedded.check_disk(folders, machine.room_of)),
        _blocking("model", lambda: [model_files.check_model(settings.model, settings.models_dir)], MODEL_S),
    )
    return Section("this machine", tuple(chain.from_iterable(found)))


async def _blocking(name: str, look: Callable[[], Findings], deadline_s: float = CHECK_S) -> list[Finding]:
    return await within(name, deadline_s, aside(lambda: list(look())))


def _machine_findings(settings: LocalSettings, seen: machine.Machine, *, is_running: bool) -> Findings:
    folder = model_files.folder_of(settings.model, settings.models_dir)
    needs = embedded.needs_of(
        settings,
        weights_bytes=model_files.weights_bytes(folder),
        kv_bytes=int(os.environ.get("SHOAL_ENGINE_KV_MEMORY_BYTES", ENGINE_KV_BYTES)),
        has_windows=model_files.has_windows(folder),
    )
    yield machine.check_python(seen)
    if settings.engine_kind == "vllm":
        yield machine.check_processor(seen)
    yield machine.check_memory(seen, needs.memory_bytes, is_running=is_running)
    yield machine.check_shared_memory(seen, 0 if is_running else needs.shared_memory_bytes)
    yield machine.check_open_files(seen)


async def _check_system(nats_url: str) -> tuple[Section | None, FleetView | None]:
    """Everything that is asked by way of NATS; and the view, for the checks that come after."""
    if not nats_url:
        return None, None
    found, view = await asyncio.gather(within("nats", LOOK_S, bus.check_bus(nats_url)), _look(nats_url))
    if view is None:
        found += [unknown(name, "NATS could not be asked") for name in OF_VIEW]
    else:
        found += await within("system", JUDGE_S, _judge_view(view))
    return Section(f"the system at {shown_address(nats_url)}", tuple(found)), view


async def _look(nats_url: str) -> FleetView | None:
    try:
        async with asyncio.timeout(LOOK_S):
            return await look(nats_url, wait_s=LISTEN_S)
    except (NatsAway, TimeoutError):
        return None


async def _judge_view(view: FleetView) -> list[Finding]:
    addresses, stores = await asyncio.gather(index.check_addresses(view), index.check_stores(view.overviews))
    return [
        *fleet.check_instances(view),
        addresses,
        fleet.check_versions(view, version()),
        fleet.check_clocks(view),
        *fleet.check_pools(view),
        *fleet.check_queues(view),
        *index.check_index(view.overviews),
        *stores,
    ]


async def _ask_gateway(gateway_url: str) -> journey.Gateway:
    if not gateway_url:
        return journey.Gateway(unknown("gateway", "no address is known"))
    async with httpx.AsyncClient(base_url=gateway_url, trust_env=False) as http:
        return await journey.check_gateway(http)


async def _check_requests(gateway_url: str, gateway: journey.Gateway, view: FleetView | None) -> Section | None:
    if not gateway_url:
        return None
    title, found = f"requests through {gateway_url}", [gateway.finding]
    if not gateway.is_usable:
        skipped = ("request", *journey.STEPS)
        found += [unknown(name, "no request was sent: the gateway cannot answer one now") for name in skipped]
        return Section(title, tuple(found))
    async with httpx.AsyncClient(base_url=gateway_url, trust_env=False) as http:
        looks: list[Awaitable[list[Finding]]] = [
            within("request", JOURNEY_S, journey.check_journey(http, model, _block_tokens(view, model)))
            for model in gateway.models
        ]
        return Section(title, (*found, *chain.from_iterable(await asyncio.gather(*looks))))


def _block_tokens(view: FleetView | None, model: str) -> int | None:
    told = [one.model for one in view.of("decode")] if view is not None else []
    return next((served.block_tokens for served in told if served is not None and served.name == model), None)
