"""Files appear whole or not at all, and what the file system refuses is an outcome."""

import errno
import os
import time
from itertools import chain
from pathlib import Path

import pytest
from lmcache.v1.distributed.api import ObjectKey

from shoal_kvstore.folder import ABANDONED_S, Loaded, ObjectFolder, Read, Removed, Stored
from shoal_kvstore.object_file import HEADER_BYTES, Damage

PAYLOAD = b"the bytes of one block" * 50


def a_key(number: int = 1, *, model: str = "pool", salt: str = "", group: int = 0) -> ObjectKey:
    return ObjectKey(number.to_bytes(2, "big") + bytes(30), model, 16777472, group, salt)


@pytest.fixture
def folder(tmp_path: Path) -> ObjectFolder:
    folder = ObjectFolder(tmp_path / "shared", "one")
    folder.prepare()
    return folder


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "shared").rglob("*") if path.is_file())


def load(folder: ObjectFolder, key: ObjectKey, length: int = len(PAYLOAD)) -> tuple[Read, bytes]:
    buffer = bytearray(length)
    return folder.load(key, memoryview(buffer)), bytes(buffer)


def test_what_is_stored_is_loaded(folder, tmp_path):
    assert folder.store(a_key(), memoryview(PAYLOAD)) is Stored.STORED
    read, content = load(folder, a_key())
    assert (read.outcome, content) == (Loaded.LOADED, PAYLOAD)
    [path] = files(tmp_path)
    assert path.parent.name == "00"
    assert path.stat().st_size == HEADER_BYTES + len(PAYLOAD)
    assert read.inode == path.stat().st_ino


def test_a_synced_folder_stores_the_same(tmp_path):
    folder = ObjectFolder(tmp_path / "shared", "one", is_synced=True)
    folder.prepare()
    assert folder.store(a_key(), memoryview(PAYLOAD)) is Stored.STORED
    assert load(folder, a_key())[0].outcome is Loaded.LOADED


def test_a_synced_store_writes_through_the_file_its_folder_and_once_the_folder_above(tmp_path, monkeypatch):
    folder = ObjectFolder(tmp_path / "shared", "one", is_synced=True)
    folder.prepare()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    for number in (1, 2):
        folder.store(a_key(number), memoryview(PAYLOAD))
    assert [name for name in synced if len(name) == 2 or name == "shared"] == ["00", "shared", "00"]
    assert len(synced) == 5  # and both files


def test_a_whole_file_is_not_written_again_and_one_of_another_length_is(folder, tmp_path):
    folder.store(a_key(), memoryview(PAYLOAD))
    [path] = files(tmp_path)
    inode = path.stat().st_ino
    assert folder.store(a_key(), memoryview(PAYLOAD)) is Stored.PRESENT
    assert path.stat().st_ino == inode
    for content in (b"", path.read_bytes()[:-1], path.read_bytes() + b"x"):
        path.write_bytes(content)
        assert folder.store(a_key(), memoryview(PAYLOAD)) is Stored.STORED
        assert load(folder, a_key())[0].outcome is Loaded.LOADED


def test_a_missing_file_is_missing(folder):
    assert load(folder, a_key())[0] == Read(Loaded.MISSING)
    assert folder.written_at(a_key()) is None
    assert folder.remove(a_key()) is Removed.GONE


@pytest.mark.parametrize(
    ("spoil", "damage"),
    [
        (lambda content: content[:HEADER_BYTES] + b"X" + content[HEADER_BYTES + 1 :], Damage.ALTERED),
        (lambda content: content[:-1], Damage.SHORT),
        (lambda content: content[:20], Damage.SHORT),
        (lambda content: b"", Damage.EMPTY),
        (lambda content: content + b"x", Damage.LONGER),
        (lambda content: b"not ours" * 100, Damage.FOREIGN),
    ],
)
def test_a_damaged_file_is_told_and_only_that_file_is_removed(folder, tmp_path, spoil, damage):
    folder.store(a_key(), memoryview(PAYLOAD))
    [path] = files(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    read, _ = load(folder, a_key())
    assert read.outcome is damage

    path.unlink()
    folder.store(a_key(2), memoryview(PAYLOAD))  # takes the freed inode, perhaps
    folder.store(a_key(), memoryview(PAYLOAD))
    if path.stat().st_ino != read.inode:
        assert folder.remove(a_key(), inode=read.inode) is Removed.REPLACED
        assert load(folder, a_key())[0].outcome is Loaded.LOADED
    assert folder.remove(a_key(), inode=path.stat().st_ino) is Removed.GONE
    assert folder.is_gone(a_key())


def test_a_file_copied_over_another_is_told(folder, tmp_path):
    folder.store(a_key(1), memoryview(PAYLOAD))
    folder.store(a_key(2), memoryview(PAYLOAD[::-1]))
    one, other = files(tmp_path)
    other.write_bytes(one.read_bytes())
    assert load(folder, a_key(2))[0].outcome is Damage.OTHER_KEY
    assert load(folder, a_key(1))[0].outcome is Loaded.LOADED


def test_an_object_of_another_length_is_told(folder):
    folder.store(a_key(), memoryview(PAYLOAD))
    assert load(folder, a_key(), len(PAYLOAD) - 8)[0].outcome is Damage.OTHER_LENGTH


def test_what_cannot_be_read_is_unreadable(folder, tmp_path):
    folder.store(a_key(), memoryview(PAYLOAD))
    [path] = files(tmp_path)
    path.unlink()
    path.mkdir()
    assert load(folder, a_key())[0] == Read(Loaded.UNREADABLE)


def test_a_file_that_could_not_be_read_is_replaced_by_the_next_store(folder, tmp_path, monkeypatch):
    folder.store(a_key(), memoryview(PAYLOAD))
    [path] = files(tmp_path)
    inode = path.stat().st_ino

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "lost sector")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refuse)
        assert load(folder, a_key())[0] == Read(Loaded.UNREADABLE)
    assert path.stat().st_ino == inode, "it may be well again in a moment"
    assert folder.store(a_key(), memoryview(PAYLOAD)) is Stored.STORED
    assert path.stat().st_ino != inode
    assert load(folder, a_key())[0].outcome is Loaded.LOADED
    assert folder.store(a_key(), memoryview(PAYLOAD)) is Stored.PRESENT


def test_a_file_that_cannot_be_looked_at_is_no_hit_and_not_known_to_be_gone(folder, tmp_path, monkeypatch):
    folder.store(a_key(), memoryview(PAYLOAD))
    assert not folder.is_gone(a_key())

    def refuse(self: Path) -> os.stat_result:
        raise OSError(errno.ESTALE, "the mount has trouble")

    monkeypatch.setattr(Path, "stat", refuse)
    assert folder.written_at(a_key()) is None
    assert not folder.is_gone(a_key())


def test_a_store_that_fails_leaves_nothing(folder, tmp_path):
    (tmp_path / "shared" / "00").write_text("in the way of the folder")
    assert folder.store(a_key(), memoryview(PAYLOAD)) is Stored.FAILED
    assert [path.name for path in files(tmp_path)] == ["00"]


def test_a_folder_that_was_emptied_is_made_again(folder, tmp_path):
    folder.store(a_key(), memoryview(PAYLOAD))
    for path in files(tmp_path):
        path.unlink()
    for path in ("00", ".tmp/one", ".tmp"):
        (tmp_path / "shared" / path).rmdir()
    assert folder.store(a_key(), memoryview(PAYLOAD)) is Stored.STORED


def test_only_the_own_leftovers_are_removed_and_those_of_servers_that_never_came_back(folder, tmp_path):
    for server in ("one", "two", "three"):
        ObjectFolder(tmp_path / "shared", server).prepare()
        (tmp_path / "shared" / ".tmp" / server / "123-0").write_bytes(b"half")
    os.utime(tmp_path / "shared" / ".tmp" / "three" / "123-0", (0, time.time() - ABANDONED_S - 60))
    assert ObjectFolder(tmp_path / "shared", "one").prepare() == 2
    assert [path.parent.name for path in files(tmp_path)] == ["two"]


def test_the_files_of_others_are_seen_and_left_alone(folder, tmp_path):
    folder.store(a_key(), memoryview(PAYLOAD))
    shared = tmp_path / "shared"
    (shared / "pool@0x01000100@0@ab.data").write_bytes(b"LMCache's own")
    (shared / "00" / "readme.txt").write_text("hello")
    assert folder.foreign_names() == ["pool@0x01000100@0@ab.data"]
    assert [found.key for found in folder.list_page(10, None, None)[0]] == [a_key()]


def listed(folder: ObjectFolder, page_size: int, model: str | None = None) -> list[list[ObjectKey]]:
    pages, cursor = [], None
    while True:
        page, cursor = folder.list_page(page_size, cursor, model)
        pages.append([found.key for found in page])
        if cursor is None:
            return pages


def test_a_listing_is_in_the_order_of_hashes_over_everything(folder):
    keys = [
        a_key(number, model=model, group=group) for number in (3, 700, 40000) for model, group in (("b", 0), ("a", 1))
    ]
    for key in reversed(keys):
        folder.store(key, memoryview(PAYLOAD))
    for page_size in (1, 2, 4, 6, 7):
        pages = listed(folder, page_size)
        seen = list(chain.from_iterable(pages))
        assert sorted(map(repr, seen)) == sorted(map(repr, keys))
        first_bytes = [key.chunk_hash[0] for key in seen]
        assert first_bytes == sorted(first_bytes)
        assert all(len(page) == page_size for page in pages[:-1])
    assert [key.model_name for key in chain.from_iterable(listed(folder, 2, "a"))] == ["a"] * 3
    [found] = folder.list_page(1, None, None)[0]
    assert found.file_bytes == HEADER_BYTES + len(PAYLOAD)


def test_a_listing_survives_what_comes_and_goes(folder):
    for number in range(10):
        folder.store(a_key(number), memoryview(PAYLOAD))
    page, cursor = folder.list_page(4, None, None)
    for number in (3, 5):  # the one that the cursor names, and one ahead
        folder.remove(a_key(number))
    folder.store(a_key(20), memoryview(PAYLOAD))
    rest, end = folder.list_page(100, cursor, None)
    assert [found.key for found in [*page, *rest]] == [a_key(number) for number in (0, 1, 2, 3, 4, 6, 7, 8, 9, 20)]
    assert end is None


def test_a_cursor_of_somebody_else_is_refused(folder):
    with pytest.raises(ValueError, match="cursor"):
        folder.list_page(4, "../../etc", None)


def test_an_empty_folder_lists_nothing_and_one_that_is_not_there_does_not_pass_for_it(folder, tmp_path):
    assert folder.list_page(4, None, None) == ([], None)
    with pytest.raises(FileNotFoundError):
        ObjectFolder(tmp_path / "not-mounted", "one").list_page(4, None, None)


def test_the_room_is_what_the_store_has_and_what_is_free_and_not_what_others_keep(folder, tmp_path):
    for number in range(2 * 256):
        for low in range(3):
            folder.store(ObjectKey(bytes([number % 256, number // 256, low]) + bytes(29), "pool", 0), memoryview(b"x"))
    (tmp_path / "shared" / "1f" / "readme.txt").write_bytes(bytes(1000))
    room = folder.room()
    assert room.own_bytes == 6 * 256 * (HEADER_BYTES + 1)
    stat = os.statvfs(tmp_path)
    assert room.free_bytes == pytest.approx(stat.f_frsize * stat.f_bavail, rel=0.1)


def test_sizes_are_looked_at_within_a_bound(folder, monkeypatch):
    monkeypatch.setattr("shoal_kvstore.folder.SAMPLED_FILES", 1)
    for number in range(5):
        folder.store(ObjectKey(bytes([0x5F, number]) + bytes(30), "pool", 0), memoryview(PAYLOAD))
    assert folder.room().own_bytes == 5 * 64 * (HEADER_BYTES + len(PAYLOAD))
