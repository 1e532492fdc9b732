"""The folder of one embedded system: what it keeps, that only one runs in it, and what a dead one left behind.

A file lock says whether a supervisor lives: the kernel gives it back when the process dies, however it dies. The
*record* names the supervisor and every process it started, so that the keeper, ``shoal down`` and the next
``shoal up`` can end what is left over. It is replaced atomically and removed after an orderly stop.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from shoal_local.processes import PROC, ProcessName, boot_id, end_families, is_alive
from shoal_runtime.file_lock import try_lock

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIX = "lmcache"
LEFTOVER_GRACE_S = 5.0
CLEANING_S = 15.0


class AlreadyRunning(Exception):
    """Another supervisor holds this home."""


class HomeUnusable(Exception):
    """The folder cannot be used; the message tells the person at the terminal why."""


@dataclass(frozen=True, slots=True)
class ChildRecord:
    """One supervised process as it was when the record was written. ``name`` is None while it does not run."""

    service: str
    name: ProcessName | None
    state: str
    restarts: int
    ready_after_s: float | None


@dataclass(frozen=True, slots=True)
class Record:
    """A running system, for other processes to read."""

    boot: str
    supervisor: ProcessName
    gateway_url: str
    nats_url: str
    started_at_s: float  # Unix time
    children: list[ChildRecord] = field(default_factory=list)


class Home:
    """Owns the folder's layout. The lock belongs to whoever entered ``hold``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.nats = folder / "nats"
        self.postgres = folder / "postgres"
        self.blocks = folder / "blocks"
        self._record = folder / "run.json"
        self._lock = folder / "up.lock"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the one that may start or end processes of this home. Raises AlreadyRunning, HomeUnusable.

        When the holder is the keeper of a supervisor that died, this waits until it has cleaned up.
        """
        deadline = time.monotonic() + CLEANING_S
        with self._open_lock() as file:
            while not try_lock(file):
                record = self.read()
                if record is None or self.is_running(record) or time.monotonic() > deadline:
                    raise AlreadyRunning
                time.sleep(0.1)
            yield

    def _open_lock(self) -> IO[str]:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            return self._lock.open("w")
        except OSError as exc:
            raise HomeUnusable(f"SHOAL_HOME={self.folder} cannot be written to ({exc.strerror})") from exc

    @staticmethod
    def is_running(record: "Record | None") -> bool:
        """Whether the supervisor that wrote ``record`` lives."""
        return record is not None and record.boot == boot_id() and is_alive(record.supervisor)

    def write(self, record: Record) -> None:
        """Replace the record."""
        draft = self._record.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
        draft.replace(self._record)

    def read(self) -> Record | None:
        """The record of the last supervisor that did not end in order, or of the living one; None if unreadable."""
        try:
            raw = json.loads(self._record.read_text(encoding="utf-8"))
            children = [
                ChildRecord(**{**child, "name": ProcessName(**child["name"]) if child["name"] else None})
                for child in raw["children"]
            ]
            return Record(**{**raw, "supervisor": ProcessName(**raw["supervisor"]), "children": children})
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None
        except OSError as exc:
            raise HomeUnusable(f"{self._record} cannot be read ({exc.strerror})") from exc

    def forget(self) -> None:
        """Remove the record: nothing of that system runs any more."""
        self._record.unlink(missing_ok=True)

    def end_leftovers(self) -> int:
        """End processes of a supervisor that is gone, and free their shared memory. Returns how many there were.

        Call it only inside ``hold``.
        """
        record = self.read()
        found = 0
        if record is not None and record.boot == boot_id():
            leaders = [child.name for child in record.children if child.name is not None]
            found = end_families(leaders, grace_s=LEFTOVER_GRACE_S)
        remove_unused_segments()
        self.forget()
        return found


def remove_unused_segments(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove LMCache's shared memory that no living process maps: a killed engine or server leaves it behind."""
    unused = unused_segments(folder)
    for path in unused:
        with suppress(FileNotFoundError, PermissionError):
            path.unlink()
    return sorted(path.name for path in unused)


def unused_segments(folder: Path = SHARED_MEMORY) -> set[Path]:
    """Of LMCache and of this user. Looked at twice: one that starts makes a segment a moment before it maps it."""
    unused = _unmapped_segments(folder)
    if unused:
        time.sleep(0.2)
        unused &= _unmapped_segments(folder)
    return unused


def _unmapped_segments(folder: Path) -> set[Path]:
    segments = {path for path in folder.glob(f"{SEGMENT_PREFIX}*") if path.stat().st_uid == os.geteuid()}
    if not segments:
        return segments
    for maps in PROC.glob("[0-9]*/maps"):
        with suppress(OSError):
            text = maps.read_text()
            segments = {path for path in segments if str(path) not in text}
    return segments
