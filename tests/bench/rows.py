"""What a topic brings: rows of values, one a round; how they are shown and kept; the CPU clock of a process."""

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. Rows of one topic and case are compared with the one that is their baseline."""

    topic: str
    case: str
    what: str
    unit: str
    values: tuple[float, ...]
    is_baseline: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def cpu_s(pid: int) -> float:
    """CPU that a process has used until now: all its threads, user and system, in nanoseconds of resolution."""
    # What clock_getcpuclockid(3) returns on Linux, for which Python has no call. /proc counts in ticks of 10 ms.
    return time.clock_gettime(~pid << 3 | 2)


def machine() -> dict[str, object]:
    """Where and when it was measured."""
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": os.cpu_count(),
        "cpu": next((line.split(": ", 1)[1] for line in cpus if line.startswith("model name")), platform.machine()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg(),
    }


def table(rows: Sequence[Row]) -> str:
    """Rows as lines, topics apart."""
    baselines = {(row.topic, row.case): row for row in rows if row.is_baseline}
    lines = []
    topic = ""
    for row in rows:
        if row.topic != topic:
            topic = row.topic
            lines += ["", f"{topic:<64}{'median':>10}{'min':>10}{'max':>10}{'rounds':>8}{'x base':>8}"]
        name = f"{row.what} (baseline)" if row.is_baseline else row.what
        numbers = "".join(f"{value:>10.{_digits(value)}f}" for value in (row.median, min(row.values), max(row.values)))
        ratio = _ratio(row, baselines.get((row.topic, row.case)))
        lines.append(f"  {row.case:<15}{name:<34}{row.unit:<13}{numbers}{len(row.values):>8}{ratio:>8}")
    return "\n".join(lines)


def write(path: Path, described: dict[str, object], rows: Sequence[Row]) -> None:
    """The same for programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [{**asdict(row), "median": row.median} for row in rows]
    path.write_text(json.dumps({"machine": described, "rows": found}, indent=1) + "\n", encoding="utf-8")


def _digits(value: float) -> int:
    return 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 3


def _ratio(row: Row, baseline: Row | None) -> str:
    if baseline is None or baseline is row or baseline.unit != row.unit or not baseline.median:
        return ""
    return f"{row.median / baseline.median:.2f}"
