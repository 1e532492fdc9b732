"""The table of a running system: its processes, how long each took to be ready, its memory and restarts."""

from shoal_local.home import Record
from shoal_local.processes import family, memory_bytes

MIB = 1024 * 1024


def render(record: Record) -> str:
    """One row a service and their sum. Memory is each family's share (PSS), so the rows add up."""
    rows = [f"{'service':<10} {'state':<9} {'pid':>8} {'ready after':>12} {'restarts':>8} {'memory':>10}"]
    total = 0
    for child in record.children:
        memory = memory_bytes(family(child.name)) if child.name else 0
        total += memory
        after = "" if child.ready_after_s is None else f"{child.ready_after_s:.1f} s"
        pid = child.name.pid if child.name else ""
        rows.append(
            f"{child.service:<10} {child.state:<9} {pid:>8} {after:>12} {child.restarts:>8} {memory // MIB:>6} MiB"
        )
    own = memory_bytes([record.supervisor])
    rows.append(f"{'supervisor':<10} {'':<9} {record.supervisor.pid:>8} {'':>12} {'':>8} {own // MIB:>6} MiB")
    rows.append(f"{'all':<10} {'':<9} {'':>8} {'':>12} {'':>8} {(total + own) // MIB:>6} MiB")
    return "\n".join(rows)
