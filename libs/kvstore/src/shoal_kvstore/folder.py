"""The shared folder: writing, reading, removing and listing the files of objects. Blocking; any thread may call.

Several servers share one folder and no lock. A file appears whole, by a rename from the server's own temporary
folder on the same file system, and is never changed afterwards; what a crash left in that folder is removed when the
server starts again. A read checks all it returns. What the file system refuses is an outcome, never an exception:
the caller goes on without that object. A file that could not be read is not trusted by the next store of its object,
which replaces it. Files that we did not make are left alone.
"""

import errno
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lmcache.v1.distributed.api import ObjectKey

from shoal_kvstore.object_file import (
    FOLDER,
    HEADER_BYTES,
    SUFFIX,
    Damage,
    damage_of_header,
    damage_of_payload,
    file_name,
    folder_name,
    header_of,
    key_digest,
    key_of,
)

TEMPORARY = ".tmp"
ABANDONED_S = 24 * 3600.0  # no file is written for so long, and no two clocks differ as much
MAX_UNREAD = 10_000
PARTS = 256  # folders, by the first byte of the hash
SAMPLED = ("1f", "5f", "9f", "df")
SAMPLED_FILES = 256  # of each


class Stored(Enum):
    """What became of an object that was to be written."""

    STORED = "stored"
    PRESENT = "present"  # whole and of the right length; its bytes are checked when they are read
    FULL = "full"
    READ_ONLY = "read_only"
    REFUSED = "refused"  # rights
    FAILED = "failed"


class Loaded(Enum):
    """What became of an object that was to be read, when it was not damaged."""

    LOADED = "loaded"
    MISSING = "missing"
    UNREADABLE = "unreadable"


class Removed(Enum):
    """Where a removal left a file."""

    GONE = "gone"  # whoever took it away
    STAYS = "stays"  # the folder does not allow it
    REPLACED = "replaced"  # another file is there


@dataclass(frozen=True, slots=True)
class Read:
    """One read. ``inode`` is of the file that was read, so that only that one is removed."""

    outcome: Loaded | Damage
    inode: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """One file of a listing."""

    key: ObjectKey
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """``free_bytes`` may still be taken; what others keep on the same file system is in neither."""

    own_bytes: int
    free_bytes: int


_REFUSALS = {
    errno.ENOSPC: Stored.FULL,
    errno.EDQUOT: Stored.FULL,
    errno.EROFS: Stored.READ_ONLY,
    errno.EACCES: Stored.REFUSED,
    errno.EPERM: Stored.REFUSED,
}


class ObjectFolder:
    """``server`` names the one server whose temporary files these are; no two that run may share it."""

    def __init__(self, path: Path, server: str, *, is_synced: bool = False) -> None:
        self._path = path
        self._temporary = path / TEMPORARY / server
        self._is_synced = is_synced
        self._serial = itertools.count()
        self._unread: set[str] = set()  # files that their next store replaces; past the bound they are tried again
        self._synced: set[str] = set()  # folders that a power cut leaves where they are

    def prepare(self) -> int:
        """Remove what an earlier life left unfinished, and what servers left that did not come back for a day; the
        number of files. OSError when the folder takes no writes."""
        self._temporary.mkdir(parents=True, exist_ok=True)
        left = [*self._temporary.iterdir(), *self._abandoned()]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    def _abandoned(self) -> Iterator[Path]:
        oldest_s = time.time() - ABANDONED_S
        for path in self._temporary.parent.glob("*/*"):
            with suppress(FileNotFoundError):  # its server finished it, or another one removed it
                if path.parent != self._temporary and path.stat().st_mtime < oldest_s:
                    yield path

    def foreign_names(self) -> list[str]:
        """What lies beside our folders and is not ours."""
        return sorted(name for name in _names(self._path) if name != TEMPORARY and not FOLDER.fullmatch(name))

    def store(self, key: ObjectKey, payload: memoryview) -> Stored:
        """Write the object unless a file of its length is there. Nothing is left behind when that fails."""
        final = self._file(key)
        try:
            if final.stat().st_size == HEADER_BYTES + len(payload) and final.name not in self._unread:
                return Stored.PRESENT
        except FileNotFoundError:
            pass
        except OSError as exc:
            return _REFUSALS.get(exc.errno or 0, Stored.FAILED)
        unfinished = self._temporary / f"{os.getpid()}-{next(self._serial)}"
        try:
            self._write(unfinished, header_of(key_digest(key), payload), payload)
            self._publish(unfinished, final)
        except OSError as exc:
            with suppress(OSError):
                unfinished.unlink()
            return _REFUSALS.get(exc.errno or 0, Stored.FAILED)
        self._unread.discard(final.name)
        return Stored.STORED

    def load(self, key: ObjectKey, buffer: memoryview) -> Read:
        """Fill ``buffer``; only after LOADED is what is in it to be used."""
        path = self._file(key)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Read(Loaded.MISSING)
        except OSError:
            return self._unreadable(path)
        try:
            return _read(file, key_digest(key), buffer)
        except OSError:
            return self._unreadable(path)
        finally:
            os.close(file)

    def _unreadable(self, path: Path) -> Read:
        # It may be read again in a moment, so it is not removed; a sector that is lost must not end a prefix for ever.
        if len(self._unread) >= MAX_UNREAD:
            self._unread.clear()
        self._unread.add(path.name)
        return Read(Loaded.UNREADABLE)

    def written_at(self, key: ObjectKey) -> float | None:
        """When the file was written, by the file system's clock; None when there is none that can be seen."""
        try:
            return self._file(key).stat().st_mtime
        except OSError:
            return None

    def is_gone(self, key: ObjectKey) -> bool:
        """False also for a file that cannot be looked at: trouble of this node says nothing to the others."""
        try:
            self._file(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return False

    def remove(self, key: ObjectKey, *, inode: int | None = None) -> Removed:
        """Remove the file; with ``inode`` only that one, not another that replaced it.

        A file that takes the place between the look and the removal is lost with it: a miss, never a wrong byte.
        """
        path = self._file(key)
        try:
            if inode is not None and path.stat().st_ino != inode:
                return Removed.REPLACED
            path.unlink()
        except FileNotFoundError:
            return Removed.GONE
        except OSError:
            return Removed.STAYS
        return Removed.GONE

    def list_page(self, page_size: int, cursor: str | None, model_name: str | None) -> tuple[list[Found], str | None]:
        """Up to ``page_size`` files in the order of their names, and the cursor of the next page (None: the end).

        The cursor is the last name of the page: files that come and go meanwhile shift nothing. ValueError when it
        is none of ours. OSError when the folder cannot be read or is not there: that is no empty store.
        """
        if cursor is not None and key_of(cursor) is None:
            raise ValueError("not a cursor of this listing")
        page: list[Found] = []
        for name, key in self._names_after(cursor or ""):
            if model_name is not None and key.model_name != model_name:
                continue
            if len(page) == page_size:
                return page, file_name(page[-1].key)
            with suppress(OSError):  # removed meanwhile
                page.append(Found(key, os.stat(f"{self._path}/{name[:2]}/{name}").st_size))
        return page, None

    def room(self) -> Room:
        """What all servers have in the folder is estimated: hashes fill its parts alike, and looking at every file of
        a large store takes a minute. OSError when the file system does not say."""
        own_bytes = sum(self._bytes_of(name) for name in SAMPLED) * PARTS / len(SAMPLED)
        return Room(int(own_bytes), self.free_bytes())

    def free_bytes(self) -> int:
        """OSError when the file system does not say."""
        stat = os.statvfs(self._path)
        return stat.f_frsize * stat.f_bavail

    def _bytes_of(self, folder: str) -> float:
        names = [name for name in _names(self._path / folder) if name.endswith(SUFFIX)]
        sizes: list[int] = []
        for name in names[:SAMPLED_FILES]:
            with suppress(OSError):  # removed meanwhile
                sizes.append(os.stat(f"{self._path}/{folder}/{name}").st_size)
        return len(names) * sum(sizes) / len(sizes) if sizes else 0.0

    def _names_after(self, last: str) -> Iterator[tuple[str, ObjectKey]]:
        """Our files behind the name ``last``, folder by folder."""
        folders = sorted(name for name in os.listdir(self._path) if FOLDER.fullmatch(name) and name >= last[:2])
        for folder in folders:
            for name in sorted(name for name in _names(self._path / folder) if name > last):
                key = key_of(name)
                if key is not None and name.startswith(folder):
                    yield name, key

    def _file(self, key: ObjectKey) -> Path:
        return self._path / folder_name(key) / file_name(key)

    def _write(self, path: Path, header: bytes, payload: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o644)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, flags, 0o644)
        try:
            rest = [memoryview(header), payload]
            while rest:
                rest = _behind(rest, os.writev(file, rest))
            if self._is_synced:
                os.fsync(file)
        finally:
            os.close(file)

    def _publish(self, unfinished: Path, final: Path) -> None:
        try:
            os.replace(unfinished, final)
        except FileNotFoundError:
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(unfinished, final)
        if self._is_synced:
            _sync(final.parent)
            if final.parent.name not in self._synced:  # it may be new itself
                _sync(self._path)
                self._synced.add(final.parent.name)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(file: int, digest: bytes, buffer: memoryview) -> Read:
    """Header and object in one go, straight into ``buffer``; then everything is checked."""
    stat = os.fstat(file)
    header = bytearray(HEADER_BYTES)
    rest = [memoryview(header), buffer]
    count = 0
    while rest and (step := os.preadv(file, rest, count)):
        count += step
        rest = _behind(rest, step)
    damage = damage_of_header(bytes(header[:count]), digest, file_bytes=stat.st_size, payload_bytes=len(buffer))
    if damage is None and rest:
        damage = Damage.SHORT  # it was cut while we read
    if damage is None:
        damage = damage_of_payload(bytes(header), digest, buffer)
    return Read(damage or Loaded.LOADED, stat.st_ino)


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``count`` bytes."""
    left = []
    for view in views:
        if count >= len(view):
            count -= len(view)
            continue
        left.append(view[count:])
        count = 0
    return left
