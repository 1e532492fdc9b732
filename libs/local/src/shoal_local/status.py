"""`shoal status`: what runs, once or again and again in the same place.

Exit codes: 0 shown, 1 the system that was named cannot be reached, 3 nothing runs here.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from shoal_local.fleet_table import fleet_tables
from shoal_local.fleet_view import LISTEN_S, FleetView, look, watching
from shoal_local.home import Home, Record
from shoal_local.index_client import plain
from shoal_local.nats_client import NatsAway, shown_address
from shoal_local.process_table import child_memory_bytes, process_table
from shoal_local.terminal import output, remarks
from shoal_local.wording import shown_path, span

NOTHING_RUNS = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at: a home on this machine, or a system elsewhere by its NATS."""

    home: Home
    nats_url: str  # "" for the home's own

    def record(self) -> Record | None:
        """Of the home, while it runs and is what is looked at."""
        if self.nats_url:
            return None
        record = self.home.read()
        return record if self.home.is_running(record) else None

    def current_nats_url(self) -> str:
        """Empty when nothing runs."""
        record = self.record()
        return self.nats_url or (record.nats_url if record else "")


def show_status(subject: Subject, *, is_json: bool, every_s: float | None) -> int:
    """``every_s`` None: once."""
    if not subject.current_nats_url():
        print(f"Nothing runs from {subject.home.folder}. Start it with `shoal up`, or name a system with --nats URL.")
        return NOTHING_RUNS
    if every_s is None or is_json:
        return asyncio.run(_show_once(subject, is_json=is_json))
    try:
        return asyncio.run(_show_often(subject, every_s))
    except KeyboardInterrupt:
        return 0


async def _show_once(subject: Subject, *, is_json: bool) -> int:
    record = subject.record()
    view: FleetView | None = None
    reason = ""
    try:
        view = await look(subject.current_nats_url())
    except NatsAway as error:
        reason = str(error)
    if is_json:
        print(json.dumps(as_json(record, view, reason), indent=1))
    elif view is not None or record is not None:
        output().print(_page(subject, record, view, reason))
    if view is None and record is None:
        remarks().print(Text(reason, "bad"))
    return 1 if view is None and record is None else 0


async def _show_often(subject: Subject, every_s: float) -> int:
    """The connection is made again when it broke, so that a system which starts again shows up by itself."""
    with Live(console=output(), auto_refresh=False) as live:

        def draw(view: FleetView | None, reason: str = "") -> None:
            live.update(_page(subject, subject.record(), view, reason), refresh=True)

        draw(None, "listening …")
        while subject.current_nats_url():
            try:
                await _follow(subject, every_s, draw)
            except NatsAway as error:
                draw(None, str(error))
                await asyncio.sleep(every_s)
    print("It runs no more.")
    return NOTHING_RUNS


async def _follow(subject: Subject, every_s: float, draw: Callable[[FleetView], None]) -> None:
    """Over one connection, until nothing runs. Raises NatsAway."""
    async with watching(subject.current_nats_url()) as watch:
        await asyncio.sleep(LISTEN_S)
        while subject.current_nats_url():
            draw(await watch.view())
            _leave_if_asked()
            await asyncio.sleep(every_s)


def _leave_if_asked() -> None:
    """Ctrl-C cancels this task; a wait of a library that ended in the same moment may have swallowed that."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _page(subject: Subject, record: Record | None, view: FleetView | None, reason: str) -> RenderableType:
    if record is None:
        head = f"Shoal by {shown_address(subject.nats_url)}"
    else:
        up_s, folder = time.time() - record.started_at_s, shown_path(subject.home.folder)
        head = f"Shoal at {record.gateway_url}, up {span(up_s)}, from {folder}"
    parts: list[RenderableType] = [Text(head, "heading"), ""]
    parts.append(fleet_tables(view, time.time()) if view is not None else Text(reason, "odd"))
    if record is not None:
        parts += ["", process_table(record)]
    return Group(*parts)


def as_json(record: Record | None, view: FleetView | None, reason: str = "") -> dict[str, object]:
    """For programs; what is not known is null, and ``reason`` says why."""
    return {
        "reason": reason or None,
        "home": None if record is None else _home_json(record),
        "instances": None if view is None else [dataclasses.asdict(instance) for instance in view.instances],
        "queues": None if view is None or view.queues is None else [dataclasses.asdict(one) for one in view.queues],
        "overviews": None
        if view is None
        else [
            {
                "instance_id": answer.instance.instance_id,
                "overview": None if answer.reply is None else plain(answer.reply),
                "reason": answer.failure.message if answer.failure is not None else None,
            }
            for answer in view.overviews
        ],
    }


def _home_json(record: Record) -> dict[str, object]:
    return {
        "gateway_url": record.gateway_url,
        "nats_url": record.nats_url,
        "started_at_s": record.started_at_s,
        "processes": [
            {**dataclasses.asdict(child), "memory_bytes": child_memory_bytes(child)} for child in record.children
        ],
    }
