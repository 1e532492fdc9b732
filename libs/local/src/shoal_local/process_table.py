"""The processes of an embedded home: how long each took to be ready, its memory and restarts."""

from rich.table import Table
from rich.text import Text

from shoal_local.home import ChildRecord, Record
from shoal_local.processes import family, memory_bytes
from shoal_local.terminal import table

MIB = 1024 * 1024
STYLES = {"ready": "good", "failed": "bad", "pausing": "bad"}


def process_table(record: Record, title: str = "") -> Table:
    """One row a process and their sum. Memory is each family's share (PSS), so the rows add up."""
    right = frozenset({"pid", "ready after", "restarts", "memory"})
    shown = table(title, "process", "state", "pid", "ready after", "restarts", "memory", right=right)
    total = 0
    for child in record.children:
        memory = child_memory_bytes(child)
        total += memory
        shown.add_row(
            child.service,
            Text(child.state, STYLES.get(child.state, "odd")),
            str(child.name.pid) if child.name else "",
            "" if child.ready_after_s is None else f"{child.ready_after_s:.1f} s",
            Text(str(child.restarts), "odd" if child.restarts else ""),
            _mib(memory),
        )
    own = memory_bytes([record.supervisor])
    shown.add_row("supervisor", "", str(record.supervisor.pid), "", "", _mib(own))
    shown.add_row("all", "", "", "", "", _mib(total + own))
    return shown


def child_memory_bytes(child: ChildRecord) -> int:
    """Of the process and all that it started."""
    return memory_bytes(family(child.name)) if child.name else 0


def _mib(count_bytes: int) -> str:
    return f"{count_bytes // MIB:,} MiB"
