"""What LMCache is answered, and what is reported and counted, for each fate of an object."""

import logging
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.mp_observability.event_bus import EventBus

from shoal_kvstore import file_adapter
from shoal_kvstore.file_adapter import FileAdapter
from shoal_kvstore.holes import SETTLED_S
from shoal_kvstore.metrics import CATALOGUE
from shoal_kvstore.object_file import HEADER_BYTES

WAIT_MS = 10_000
OBJECT_BYTES = 4096


class Item:
    """LMCache's buffer of one object, as far as an adapter looks at it."""

    def __init__(self, content: bytes = bytes(OBJECT_BYTES)) -> None:
        self._buffer = bytearray(content)

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self._buffer)

    @property
    def content(self) -> bytes:
        return bytes(self._buffer)


@dataclass
class Heard(L2AdapterListener):
    """Everything that the adapter reported."""

    stored: list[tuple[ObjectKey, int]] = field(default_factory=list)
    accessed: list[ObjectKey] = field(default_factory=list)
    deleted: list[ObjectKey] = field(default_factory=list)

    def on_l2_keys_stored(self, keys, sizes):
        self.stored.extend(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys):
        self.accessed.extend(keys)

    def on_l2_keys_deleted(self, keys):
        self.deleted.extend(keys)


class Store:
    """An adapter as LMCache's controllers use it: submit, wait for the event, ask."""

    def __init__(self, folder: Path, **params: object) -> None:
        self.folder = folder
        self.adapter = FileAdapter({"folder": str(folder), "server": "one", **params})
        self.adapter.set_backend_identity("plugin", shared=True)
        self.heard = Heard()
        self.adapter.register_listener(self.heard)

    def store(self, keys: list[ObjectKey], items: list[Item]) -> int:
        task_id = self.adapter.submit_store_task(keys, items)
        wait(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[task_id]

    def lookup(self, keys: list[ObjectKey]) -> list[int]:
        task_id = self.adapter.submit_lookup_and_lock_task(keys, {})
        wait(self.adapter.get_lookup_and_lock_event_fd())
        return places(self.adapter.query_lookup_and_lock_result(task_id))

    def load(self, keys: list[ObjectKey], items: list[Item] | None = None) -> list[int]:
        task_id = self.adapter.submit_load_task(keys, items or [Item() for _ in keys])
        wait(self.adapter.get_load_event_fd())
        found = places(self.adapter.query_load_result(task_id))
        assert self.adapter.query_load_result(task_id) is None
        return found

    def path(self, key: ObjectKey) -> Path:
        [path] = self.folder.glob(f"??/{key.chunk_hash.hex()}*")
        return path


def wait(event: int) -> None:
    poller = select.poll()
    poller.register(event, select.POLLIN)
    assert poller.poll(WAIT_MS)
    os.eventfd_read(event)


def places(bitmap: Bitmap) -> list[int]:
    return list(bitmap.get_indices_list())


def until(is_so: Callable[[], bool]) -> None:
    """Reports of a lookup follow its answer."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def a_key(number: int) -> ObjectKey:
    return ObjectKey(bytes([number]) * 32, "pool", 16777472)


def items(count: int) -> list[Item]:
    return [Item(bytes([number]) * OBJECT_BYTES) for number in range(count)]


KEYS = [a_key(number) for number in range(5)]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "shared")
    yield store
    store.adapter.close()


@pytest.fixture
def counted():
    """How far the counters moved since the test began."""
    before = CATALOGUE.value

    def value(name: str, **labels: str) -> float:
        return before(name, **labels) - start.get((name, *labels.values()), 0.0)

    start = {
        (sample.name.removeprefix("shoal_store_"), *sample.labels.values()): sample.value
        for metric in CATALOGUE.registry.collect()
        for sample in metric.samples
    }
    return value


@pytest.fixture
def told():
    """What the adapter logged; LMCache's loggers pass nothing on to the root."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    file_adapter.log.addHandler(handler)
    yield lines
    file_adapter.log.removeHandler(handler)


def test_what_is_stored_is_found_and_loaded(store, counted):
    written = store.store(KEYS, items(5))
    assert written.is_successful()
    assert written.bytes_transferred() == 5 * (OBJECT_BYTES + HEADER_BYTES)
    assert sorted(store.heard.stored, key=repr) == sorted(
        [(key, OBJECT_BYTES + HEADER_BYTES) for key in KEYS], key=repr
    )
    assert store.lookup([*KEYS, a_key(9)]) == [0, 1, 2, 3, 4]
    loaded = [Item() for _ in KEYS]
    assert store.load(KEYS, loaded) == [0, 1, 2, 3, 4]
    assert [item.content for item in loaded] == [item.content for item in items(5)]
    assert store.heard.accessed == KEYS
    assert counted("stored_objects_total", outcome="stored") == 5
    assert counted("loaded_objects_total", outcome="loaded") == 5
    assert counted("loaded_bytes_total") == 5 * OBJECT_BYTES
    assert store.heard.deleted == []


def test_a_store_of_what_is_there_is_reported_once_more(store, counted, monkeypatch):
    published = []
    monkeypatch.setattr(store.adapter, "_event_bus", EventBus())
    monkeypatch.setattr(store.adapter._event_bus, "publish", published.append)
    store.store(KEYS[:2], items(2))
    again = store.store(KEYS[:3], items(3))
    assert again.is_successful()
    assert again.bytes_transferred() == OBJECT_BYTES + HEADER_BYTES
    assert counted("stored_objects_total", outcome="present") == 2
    reported = [event.metadata for event in published if event.event_type.name == "L2_KEYS_STORED"]
    size = OBJECT_BYTES + HEADER_BYTES
    assert {"keys": KEYS[:2], "sizes": [size] * 2, "backend": "plugin", "shared": True} in reported
    assert [report.keys() for report in reported] == [reported[0].keys()] * 3
    assert len(store.heard.stored) == 3, "accounting counts an object once"


@pytest.mark.parametrize(
    ("spoil", "damage"),
    [
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "altered"),
        (lambda content: content[:1000], "short"),
        (lambda content: b"", "empty"),
        (lambda content: content + b"more", "longer"),
        (lambda content: os.urandom(len(content)), "foreign"),
    ],
)
def test_a_damaged_object_is_a_miss_for_itself_and_the_next_store_mends_it(store, counted, spoil, damage):
    store.store(KEYS, items(5))
    path = store.path(KEYS[2])
    path.write_bytes(spoil(path.read_bytes()))
    assert store.load(KEYS) == [0, 1, 3, 4]
    assert store.heard.deleted == [KEYS[2]]
    assert counted("loaded_objects_total", outcome=damage) == 1
    assert counted("removed_objects_total", reason="damaged") == 1
    assert store.lookup(KEYS) == [0, 1, 3, 4]

    assert store.store(KEYS, items(5)).is_successful()
    assert store.load(KEYS) == [0, 1, 2, 3, 4]


def test_an_object_copied_over_another_is_a_miss_for_itself(store, counted):
    store.store(KEYS, items(5))
    store.path(KEYS[1]).write_bytes(store.path(KEYS[3]).read_bytes())
    assert store.load(KEYS) == [0, 2, 3, 4]
    assert store.heard.deleted == [KEYS[1]]
    assert counted("loaded_objects_total", outcome="other_key") == 1


def test_an_object_that_is_gone_between_lookup_and_load_is_reported(store, counted):
    store.store(KEYS, items(5))
    assert store.lookup(KEYS) == [0, 1, 2, 3, 4]
    store.path(KEYS[2]).unlink()
    assert store.load(KEYS) == [0, 1, 3, 4]
    assert store.heard.deleted == [KEYS[2]]
    assert counted("loaded_objects_total", outcome="missing") == 1


def test_a_lost_object_in_the_middle_is_reported_once(store, counted):
    store.store(KEYS, items(5))
    store.path(KEYS[1]).unlink()
    assert store.lookup(KEYS) == [0, 2, 3, 4]
    assert store.heard.deleted == [], "it may be on its way"
    for key in (KEYS[0], *KEYS[2:]):
        os.utime(store.path(key), (0, time.time() - SETTLED_S - 1))
    for _ in range(2):
        assert store.lookup([*KEYS, a_key(9)]) == [0, 2, 3, 4]
        until(lambda: store.heard.deleted == [KEYS[1]])
    assert counted("lost_objects_total") == 1


def test_holes_of_windowed_groups_are_not_lost(store, counted):
    store.adapter.know_windows(lambda key: key == KEYS[1])
    store.store(KEYS, items(5))
    store.path(KEYS[1]).unlink()
    for key in (KEYS[0], *KEYS[2:]):
        os.utime(store.path(key), (0, 0))
    assert store.lookup(KEYS) == [0, 2, 3, 4]
    store.adapter.close()  # everything that follows the answer has run
    assert store.heard.deleted == []
    assert counted("lost_objects_total") == 0


def test_long_lookups_keep_their_order(store):
    many = [ObjectKey(number.to_bytes(32, "big"), "pool", 0) for number in range(3 * file_adapter.LOOKUP_SLICE + 1)]
    assert store.store(many[::2], [Item() for _ in many[::2]]).is_successful()
    assert store.lookup(many) == list(range(0, len(many), 2))


def test_what_cannot_be_written_fails_and_tells_its_start_and_end(tmp_path, counted, told):
    folder = tmp_path / "shared"
    folder.mkdir()
    for key in KEYS[1:3]:
        (folder / key.chunk_hash[:1].hex()).write_text("in the way")
    store = Store(folder)
    result = store.store(KEYS, items(5))
    assert not result.is_successful()
    assert {key for key, _ in store.heard.stored} == {KEYS[0], KEYS[3], KEYS[4]}
    assert counted("stored_objects_total", outcome="failed") == 2
    assert not list(folder.glob(".tmp/one/*"))
    assert [line.split()[0] for line in told[1:]] == ["store.write_failed", "store.write_recovered"]
    assert store.adapter.report_status()["write_trouble"] is None
    store.adapter.close()


def test_deleting_reports_what_is_gone_and_fails_for_what_stays(store, counted):
    store.store(KEYS, items(5))
    store.path(KEYS[1]).unlink()  # somebody else was faster
    store.adapter.delete(KEYS[:3])
    assert sorted(store.heard.deleted, key=repr) == KEYS[:3]
    assert store.lookup(KEYS) == [3, 4]

    path = store.path(KEYS[3])
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="1 of 2"):
        store.adapter.delete(KEYS[3:])
    assert store.heard.deleted[3:] == [KEYS[4]]
    assert counted("removed_objects_total", reason="deleted") == 4
    assert counted("removed_objects_total", reason="failed") == 1


def test_a_damaged_file_that_cannot_be_removed_is_reported_all_the_same(store, counted, monkeypatch):
    store.store(KEYS, items(5))
    path = store.path(KEYS[2])
    path.write_bytes(b"")
    folder = path.parent

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    assert store.load(KEYS) == [0, 1, 3, 4]
    assert store.heard.deleted == [KEYS[2]]
    assert counted("removed_objects_total", reason="failed") == 1
    assert list(folder.iterdir()) == [path]


def test_the_room_is_a_figure_for_kvindex_and_lets_lmcache_evict_nothing(tmp_path):
    store = Store(tmp_path / "one")
    stat = os.statvfs(tmp_path)
    usage = store.adapter.get_usage()
    assert usage.total_capacity_bytes == pytest.approx(stat.f_frsize * stat.f_bavail, rel=0.1)
    store.store(KEYS, items(5))
    assert store.adapter.get_usage().total_capacity_bytes == usage.total_capacity_bytes
    assert not store.adapter.supports_global_eviction
    store.adapter.close()
    store = Store(tmp_path / "two", capacity_bytes=12345)
    assert store.adapter.get_usage().total_capacity_bytes == 12345
    assert not store.adapter.supports_global_eviction
    store.adapter.close()


def test_a_folder_that_cannot_be_made_stops_no_server_and_tells_no_room(tmp_path, told):
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "shared")
    assert not store.store(KEYS, items(5)).is_successful()
    assert store.load(KEYS) == []
    assert [line.split()[0] for line in told[1:3]] == ["store.not_writable", "store.room_unknown"]
    store.adapter.close()


def test_listing_gives_lmcaches_pages(store):
    store.store(KEYS, items(5))
    page = store.adapter.list_l2_keys(page_size=3)
    assert [entry.key.to_object_key() for entry in page.entries] == KEYS[:3]
    assert {entry.size_bytes for entry in page.entries} == {OBJECT_BYTES + HEADER_BYTES}
    last = store.adapter.list_l2_keys(page_size=3, cursor=page.next_page_token)
    assert ([entry.key.to_object_key() for entry in last.entries], last.next_page_token) == (KEYS[3:], None)
    with pytest.raises(ValueError, match="page_size"):
        store.adapter.list_l2_keys(page_size=0)
    with pytest.raises(ValueError, match="cursor"):
        store.adapter.list_l2_keys(cursor="nonsense")


def test_foreign_files_and_leftovers_are_told_once_at_the_start(tmp_path, told):
    folder = tmp_path / "shared"
    (folder / ".tmp" / "one").mkdir(parents=True)
    (folder / ".tmp" / "one" / "1-1").write_bytes(b"half")
    (folder / "pool@0x01000100@0@00.data").write_bytes(b"LMCache's own")
    store = Store(folder)
    store.store(KEYS, items(5))
    store.lookup(KEYS)
    store.adapter.close()
    assert told[1:] == [
        "store.leftovers_removed files=1",
        "store.foreign_files_ignored count=1 first=pool@0x01000100@0@00.data",
    ]
    assert (folder / "pool@0x01000100@0@00.data").exists()


@pytest.mark.parametrize(
    "wrong", [{"server": "a/b"}, {"io_threads": 0}, {"folder": ""}, {"capacity_bytes": -1}, {"x": 1}]
)
def test_wrong_settings_stop_the_start(tmp_path, wrong):
    with pytest.raises(ValueError, match="FileSettings"):
        FileAdapter({"folder": str(tmp_path), "server": "one", **wrong})
