"""Facts about processes of this machine, read from /proc, and the end of those that nobody watches any more.

A process is named by its pid and the clock tick it started at, so that a pid which the kernel gave to somebody
else is never signalled. What we start leads a group of its own; its *family* is that group and all descendants,
also after the leader has died. Imports nothing heavy: the keeper lives on it.
"""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One process and no other, until the machine starts anew."""

    pid: int
    started_ticks: int


@dataclass(frozen=True, slots=True)
class _Entry:
    pid: int
    parent: int
    group: int
    started_ticks: int
    is_dead: bool


def boot_id() -> str:
    """Changes with each start of the machine; ticks count from there."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def name_of(pid: int) -> ProcessName | None:
    """The name of a living process; None when there is none."""
    entry = _read(pid)
    return None if entry is None or entry.is_dead else ProcessName(pid, entry.started_ticks)


def is_alive(name: ProcessName) -> bool:
    """Whether exactly that process still runs."""
    return name_of(name.pid) == name


def family(leader: ProcessName) -> list[ProcessName]:
    """The living members of the leader's group and their descendants."""
    entries = _all()
    holder = entries.get(leader.pid)
    if holder is not None and holder.started_ticks != leader.started_ticks:
        return []
    members = {pid for pid, e in entries.items() if e.group == leader.pid and e.started_ticks >= leader.started_ticks}
    while True:
        grown = members | {pid for pid, e in entries.items() if e.parent in members}
        if grown == members:
            break
        members = grown
    return [ProcessName(pid, entries[pid].started_ticks) for pid in sorted(members) if not entries[pid].is_dead]


def memory_bytes(names: Iterable[ProcessName]) -> int:
    """Memory that exists because of these processes: pages shared by several count for each its part (PSS)."""
    return sum(_pss_bytes(name.pid) for name in names)


def _pss_bytes(pid: int) -> int:
    try:
        rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))


def end_families(leaders: Sequence[ProcessName], *, grace_s: float) -> int:
    """Ask all families to end, and end by force what is left after ``grace_s``. Returns how many were alive."""
    members = {name for leader in leaders for name in family(leader)}
    found = len(members)
    _signal(members, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while members and time.monotonic() < deadline:
        time.sleep(POLL_S)
        members = {name for name in members if is_alive(name)}
    members |= {name for leader in leaders for name in family(leader)}
    _signal(members, signal.SIGKILL)
    return found


def _signal(names: Iterable[ProcessName], number: signal.Signals) -> None:
    for name in names:
        if is_alive(name):
            with suppress(ProcessLookupError):
                os.kill(name.pid, number)


def _all() -> dict[int, _Entry]:
    pids = (int(path.name) for path in PROC.iterdir() if path.name.isdigit())
    return {entry.pid: entry for pid in pids if (entry := _read(pid)) is not None}


def _read(pid: int) -> _Entry | None:
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command name stands in parentheses and may itself hold spaces and parentheses.
    fields = stat[stat.rindex(")") + 2 :].split()
    return _Entry(pid, int(fields[1]), int(fields[2]), int(fields[19]), fields[0] in "ZX")
