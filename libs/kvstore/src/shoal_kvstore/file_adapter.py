"""LMCache's shared level in files: what LMCache asks becomes work on threads, what became of it becomes reports.

LMCache calls from its controllers' threads and waits for event descriptors. Stores and deletes have threads of their
own, so that a burst of writes delays no hit. Objects stand for themselves: one that is damaged, missing or cannot be
written fails alone. A damaged file is removed, reported as deleted and stored again by whoever computes the block; a
file that is found where a store was asked is reported as stored once more, which mends a lost report. LMCache's own
eviction stays off: kvindex decides what goes. docs/decisions/0007-the-store-tells-the-truth.md
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.platform import create_event_notifier
from pydantic import BaseModel, ConfigDict, Field

from shoal_kvstore import metrics
from shoal_kvstore.folder import Loaded, ObjectFolder, Read, Removed, Stored
from shoal_kvstore.holes import Holes
from shoal_kvstore.object_file import HEADER_BYTES, Damage
from shoal_kvstore.threads import spread

log = init_logger(__name__)

LOOKUP_SLICE = 64  # keys that one thread looks up at a time


class FileSettings(BaseModel):
    """``adapter_params`` of the plugin."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str = Field(min_length=1, description="The folder that all servers share.")
    server: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names this server among those that share the folder."
    )
    is_synced: bool = Field(
        False, description="Write through to the disk. Blocks survive a power cut; without it they are a miss then."
    )
    capacity_bytes: int = Field(
        0, ge=0, description="Room that kvindex keeps to. 0: what the store has, and what is free, at the start."
    )
    io_threads: int = Field(4, ge=1, le=64, description="For reads, and as many for writes. Raise for a network disk.")


class FileAdapter(L2AdapterInterface):
    """Loaded by name: ``{"type": "plugin", "module_path": "shoal_kvstore.file_adapter", "shared": true, ...}``."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__(max_capacity_bytes=0)  # anything else lets LMCache evict
        self._settings = FileSettings.model_validate(params)
        self._folder = ObjectFolder(
            Path(self._settings.folder), self._settings.server, is_synced=self._settings.is_synced
        )
        self._readers = ThreadPoolExecutor(self._settings.io_threads, "store-read")
        self._writers = ThreadPoolExecutor(self._settings.io_threads, "store-write")
        self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        self._task_ids = itertools.count()
        self._lock = threading.Lock()
        self._stores: dict[int, L2StoreResult] = {}
        self._lookups: dict[int, Bitmap] = {}
        self._loads: dict[int, Bitmap] = {}
        self._holes = Holes()
        self._write_trouble: Stored | None = None
        metrics.show()
        self._open()
        self._room_bytes = self._measure_room()

    def know_windows(self, is_windowed: Callable[[ObjectKey], bool]) -> None:
        """``is_windowed`` says of a key whether only the last blocks of a run are kept of its group."""
        self._holes.is_windowed = is_windowed

    def _open(self) -> None:
        log.info("store.opened folder=%s server=%s", self._settings.folder, self._settings.server)
        try:
            if left := self._folder.prepare():
                log.info("store.leftovers_removed files=%d", left)
        except OSError as exc:  # still good for reading
            log.warning("store.not_writable folder=%s reason=%s", self._settings.folder, exc.strerror)
        if foreign := self._folder.foreign_names():
            log.warning("store.foreign_files_ignored count=%d first=%s", len(foreign), foreign[0])

    def _measure_room(self) -> int:
        """Of the start: the store's own growth changes nothing in it, and what others keep there is no room."""
        try:
            room = self._folder.room()
        except OSError as exc:
            log.warning("store.room_unknown folder=%s reason=%s", self._settings.folder, exc.strerror)
            return 0  # none is told
        return room.own_bytes + room.free_bytes

    # -- store --------------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._store_event.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task_id = next(self._task_ids)
        payloads = [_bytes_of(item) for item in objects]

        def store(place: int) -> Stored:
            return self._folder.store(keys[place], payloads[place])

        def done(outcomes: Sequence[Stored]) -> None:
            is_whole = all(outcome in (Stored.STORED, Stored.PRESENT) for outcome in outcomes)
            written = sum(
                HEADER_BYTES + len(payloads[i]) for i, outcome in enumerate(outcomes) if outcome is Stored.STORED
            )
            try:
                self._tell_stored(keys, payloads, outcomes)
            finally:  # LMCache holds its buffers until it is answered
                with self._lock:
                    self._stores[task_id] = L2StoreResult(is_whole, written)
                self._store_event.notify()

        spread(self._writers, store, len(keys), Stored.FAILED, done)
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            completed, self._stores = self._stores, {}
        return completed

    def _tell_stored(
        self, keys: Sequence[ObjectKey], payloads: Sequence[memoryview], outcomes: Sequence[Stored]
    ) -> None:
        """Report and count."""
        kinds: dict[Stored, list[int]] = {outcome: [] for outcome in Stored}
        for place, outcome in enumerate(outcomes):
            kinds[outcome].append(place)
            metrics.STORED.labels(outcome.value).inc()
            self._note_trouble(outcome)
        sizes = [HEADER_BYTES + len(payload) for payload in payloads]
        stored, present = kinds[Stored.STORED], kinds[Stored.PRESENT]
        metrics.STORED_BYTES.inc(sum(sizes[place] for place in stored))
        self._holes.filled(keys[place] for place in (*stored, *present))
        if stored:
            self._notify_keys_stored([keys[place] for place in stored], [sizes[place] for place in stored])
        if present:
            self._tell_once_more([keys[place] for place in present], [sizes[place] for place in present])

    def _tell_once_more(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        # Only the report, which the base class offers with its accounting alone.
        tags = {"backend": self._backend_name, "shared": self._shared}
        self._event_bus.publish(Event(EventType.L2_KEYS_STORED, metadata={"keys": keys, "sizes": sizes, **tags}))

    def _note_trouble(self, outcome: Stored) -> None:
        """Log the start and the end of a time in which nothing can be written."""
        if outcome is Stored.PRESENT:
            return
        trouble = None if outcome is Stored.STORED else outcome
        with self._lock:
            before, self._write_trouble = self._write_trouble, trouble
        if trouble is not None and before is not trouble:
            log.warning("store.write_failed outcome=%s folder=%s", trouble.value, self._settings.folder)
        elif trouble is None and before is not None:
            log.warning("store.write_recovered folder=%s", self._settings.folder)

    # -- lookup -------------------------------------------------------------------------------------------------

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_event.fileno())

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        task_id = next(self._task_ids)
        starts = range(0, len(keys), LOOKUP_SLICE)

        def look(number: int) -> list[float | None]:
            start = starts[number]
            return [self._folder.written_at(key) for key in keys[start : start + LOOKUP_SLICE]]

        def done(slices: Sequence[list[float | None]]) -> None:
            written_at = [written for part in slices for written in part][: len(keys)]
            with self._lock:
                self._lookups[task_id] = _bitmap(written is not None for written in written_at)
            self._lookup_event.notify()
            self._tell_holes(keys, written_at)

        unseen: list[float | None] = [None] * LOOKUP_SLICE
        spread(self._readers, look, len(starts), unseen, done)
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked: a file that is removed between lookup and load is a miss."""

    def _tell_holes(self, keys: Sequence[ObjectKey], written_at: Sequence[float | None]) -> None:
        lost = self._holes.found(keys, written_at, time.time())
        metrics.LOST.inc(len(lost))
        self._tell_gone(lost)

    # -- load ---------------------------------------------------------------------------------------------------

    def get_load_event_fd(self) -> int:
        return int(self._load_event.fileno())

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task_id = next(self._task_ids)
        buffers = [_bytes_of(item) for item in objects]

        def load(place: int) -> Read:
            return self._load(keys[place], buffers[place])

        def done(reads: Sequence[Read]) -> None:
            try:
                self._tell_loaded(keys, buffers, reads)
            finally:
                with self._lock:
                    self._loads[task_id] = _bitmap(read.outcome is Loaded.LOADED for read in reads)
                self._load_event.notify()

        spread(self._readers, load, len(keys), Read(Loaded.UNREADABLE), done)
        return task_id

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loads.pop(task_id, None)

    def _load(self, key: ObjectKey, buffer: memoryview) -> Read:
        read = self._folder.load(key, buffer)
        if isinstance(read.outcome, Damage):
            removed = self._folder.remove(key, inode=read.inode)
            block = key.chunk_hash.hex()
            log.warning("store.file_damaged damage=%s file=%s block=%s", read.outcome.value, removed.value, block)
            if removed is Removed.GONE:
                metrics.REMOVED.labels("damaged").inc()
            elif removed is Removed.STAYS:
                metrics.REMOVED.labels("failed").inc()
                self._tell_deleted([key])  # of no use to anybody
        return read

    def _tell_loaded(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], reads: Sequence[Read]) -> None:
        loaded: list[ObjectKey] = []
        useless: list[ObjectKey] = []
        for key, buffer, read in zip(keys, buffers, reads, strict=True):
            metrics.LOADED.labels(read.outcome.value).inc()
            if read.outcome is Loaded.LOADED:
                loaded.append(key)
                metrics.LOADED_BYTES.inc(len(buffer))
            elif read.outcome is not Loaded.UNREADABLE:
                useless.append(key)
        if loaded:
            self._notify_keys_accessed(loaded)
        self._tell_gone(useless)

    # -- delete, list, room -------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove the files; what is gone afterwards, whoever removed it, is reported. OSError when some stay."""
        removed = list(self._writers.map(self._folder.remove, keys))
        gone = [key for key, outcome in zip(keys, removed, strict=True) if outcome is Removed.GONE]
        metrics.REMOVED.labels("deleted").inc(len(gone))
        self._tell_gone(gone)
        if stay := len(keys) - len(gone):
            metrics.REMOVED.labels("failed").inc(stay)
            raise OSError(f"{stay} of {len(keys)} files could not be removed")

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """A page of what is stored, in ascending order of block hashes over all pools, ranks, groups and salts."""
        if page_size < 1:
            raise ValueError("page_size must be positive")
        page, next_cursor = self._folder.list_page(page_size, cursor, model_name)
        entries = tuple(KeyEntry(found.key.to_encoded_object_key(), found.file_bytes) for found in page)
        return KeyListPage(entries, next_cursor)

    def get_usage(self) -> AdapterUsage:
        """The room that kvindex plans with; what is used is for LMCache's metrics alone."""
        used_bytes = max(0, self._room_bytes - self._folder.free_bytes())
        return AdapterUsage(used_bytes, self._settings.capacity_bytes or self._room_bytes)

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            trouble = self._write_trouble
        return {
            "is_healthy": True,  # what cannot be written is computed again
            "type": type(self).__name__,
            "folder": self._settings.folder,
            "write_trouble": trouble.value if trouble else None,
        }

    def close(self) -> None:
        """Ends what runs and drops what waits; LMCache asks for nothing any more."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    def _tell_gone(self, keys: Sequence[ObjectKey]) -> None:
        """Report what is gone, but not what has been stored since: that report must be the last one."""
        self._tell_deleted([key for key in keys if self._folder.is_gone(key)])

    def _tell_deleted(self, keys: list[ObjectKey]) -> None:
        # Sizes are for LMCache's own accounting, which knows only what this process stored; get_usage has the truth.
        if keys:
            self._notify_keys_deleted(keys, [0] * len(keys))


def _bytes_of(item: MemoryObj) -> memoryview:
    return memoryview(item.byte_array).cast("B")


def _bitmap(flags: Iterable[bool]) -> Bitmap:
    values = list(flags)
    bitmap = Bitmap(len(values))
    for place, is_set in enumerate(values):
        if is_set:
            bitmap.set(place)
    return bitmap
