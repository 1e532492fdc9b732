"""What this machine must offer before anything is started: Python, processor, memory, shared memory, open files.

Each check is a function of what was read, so that a test can hand it any machine; ``read_machine`` reads this one.
"""

import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_local.doctor.findings import Finding, ok, unknown, warning, wrong
from shoal_local.home import SHARED_MEMORY, unused_segments
from shoal_local.processes import PROC
from shoal_local.wording import counted, size

LEAST_PYTHON, NEXT_PYTHON = (3, 11), (3, 14)
MIB, GIB = 2**20, 2**30
CGROUP = Path("/sys/fs/cgroup")
LEAST_FREE_BYTES = 256 * MIB  # of memory, while the system runs
LEAST_SHARED_BYTES = 64 * MIB  # queues between the processes of an engine
LEAST_OPEN_FILES = 1024  # a gateway at its bounds: 256 requests run and 256 wait, each with a connection


@dataclass(frozen=True, slots=True)
class Room:
    """Of a file system. Unknown when it cannot be asked."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine as it was read; None is unknown."""

    system: str
    architecture: str
    python: tuple[int, int, int]
    cpu_flags: frozenset[str]
    available_bytes: int | None
    shared_memory: Room | None
    unused_segments: tuple[Path, ...]
    open_files: tuple[int, int]  # soft and hard limit


def read_machine() -> Machine:
    """Blocks for some milliseconds."""
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        cpu_flags=_cpu_flags(),
        available_bytes=available_bytes(),
        shared_memory=room_of(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        unused_segments=tuple(sorted(unused_segments())),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
    )


def room_of(folder: Path) -> Room:
    """Raises OSError."""
    told = os.statvfs(folder)
    return Room(told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize)


def _cpu_flags() -> frozenset[str]:
    for line in (PROC / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Memory that new processes can have: of the machine, or of the container that we are in if that is less."""
    fields = _fields(proc / "meminfo")
    if "MemAvailable:" not in fields:
        return None
    available = fields["MemAvailable:"] * 1024
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no limit: the file is not there, or says "max"
        return available
    reclaimable = _fields(cgroup / "memory.stat").get("inactive_file", 0)
    return max(0, min(available, limit - used + reclaimable))


def _fields(path: Path) -> Mapping[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


def check_python(machine: Machine) -> Finding:
    version = ".".join(map(str, machine.python))
    if machine.system != "Linux":
        return wrong(
            "python", f"this is {machine.system}; Shoal runs on Linux", "Use Linux, WSL 2 or a container: see README."
        )
    if not LEAST_PYTHON <= machine.python[:2] < NEXT_PYTHON:
        advice = "Install Python 3.12 and run `make setup PYTHON=python3.12`."
        return wrong("python", f"Python {version}; the engines need 3.11, 3.12 or 3.13", advice)
    return ok("python", f"Python {version} on Linux, {machine.architecture}")


def check_processor(machine: Machine) -> Finding:
    """What the kernels of vLLM's CPU build are compiled for."""
    if machine.architecture not in ("x86_64", "AMD64"):
        return ok("processor", f"{machine.architecture}: vLLM's CPU build has one set of kernels for it")
    if "avx512f" in machine.cpu_flags:
        return ok("processor", f"AVX-512{', bfloat16' if 'avx512_bf16' in machine.cpu_flags else ''}")
    if "avx2" in machine.cpu_flags:
        return ok("processor", "AVX2: models compute in float32")
    advice = "Run the engines on a processor with AVX2 (most since 2015); in a virtual machine, let its CPU be 'host'."
    if not machine.cpu_flags:
        return unknown("processor", "/proc/cpuinfo does not tell what it can do", advice)
    return wrong("processor", "no AVX2: vLLM's kernels for x86 cannot run here", advice)


def check_memory(machine: Machine, needed_bytes: int, *, is_running: bool) -> Finding:
    """Whether a start fits; of a system that runs already, whether it is about to run out."""
    if machine.available_bytes is None:
        return unknown("memory", "/proc/meminfo does not tell how much is available")
    available = size(machine.available_bytes)
    advice = (
        "End other programs, or need less: SHOAL_STORE_L1_GIB, SHOAL_ENGINE_KV_MEMORY_BYTES, a smaller SHOAL_MODEL."
    )
    if is_running:
        if machine.available_bytes < LEAST_FREE_BYTES:
            return wrong("memory", f"only {available} left while the system runs", advice)
        return ok("memory", f"{available} left while the system runs")
    if machine.available_bytes < needed_bytes:
        return wrong("memory", f"{available} available, a start needs about {size(needed_bytes)}", advice)
    return ok("memory", f"{available} available, a start needs about {size(needed_bytes)}")


def check_shared_memory(machine: Machine, needed_bytes: int) -> Finding:
    """``needed_bytes`` beyond the least: the KV of engines whose blocks the store moves."""
    name, room = "shared memory", machine.shared_memory
    if room is None:
        return wrong(name, "/dev/shm is not there", "Mount it: `mount -t tmpfs tmpfs /dev/shm`.")
    needed = needed_bytes + LEAST_SHARED_BYTES
    if room.total_bytes < needed:
        found = f"/dev/shm holds {size(room.total_bytes)}; {size(needed)} are needed"
        advice = f"Make it larger: `mount -o remount,size={needed // MIB}M /dev/shm`; for a container `--shm-size`."
        return wrong(name, found, advice)
    if machine.unused_segments:
        taken = size(sum(path.stat().st_blocks * 512 for path in machine.unused_segments if path.exists()))
        found = f"{counted(len(machine.unused_segments), 'segment')} of engines that died lie in /dev/shm ({taken})"
        return warning(name, found, "Run `shoal down`, or the next `shoal up`: both remove them.")
    if room.free_bytes < needed:
        return wrong(name, f"/dev/shm has {size(room.free_bytes)} left; {size(needed)} are needed", "See who fills it.")
    return ok(name, f"/dev/shm holds {size(room.total_bytes)}, {size(room.free_bytes)} free")


def check_open_files(machine: Machine) -> Finding:
    soft, hard = machine.open_files
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < LEAST_OPEN_FILES:
        can_raise = hard == unlimited or hard >= LEAST_OPEN_FILES
        advice = "Run `ulimit -n 4096` before." if can_raise else "Raise `nofile` in /etc/security/limits.conf."
        return wrong("open files", f"a process may open {soft} files; {LEAST_OPEN_FILES} are needed", advice)
    return ok("open files", f"a process may open {'any number of' if soft == unlimited else soft} files")
