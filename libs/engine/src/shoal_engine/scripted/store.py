"""A simulated block store: which blocks exist, level L1 in memory and level L2 shared. It holds no KV.

It behaves as an ``lmcache server`` was seen to: a store writes both levels, a block that L2 already has is not
written (or reported) again, an L1 hit never repairs L2, a load from L2 passes through a temporary L1 copy (a
prefetched block stays in L1), a block that is gone when it is to be loaded is reported as deleted, L1 evicts by least
recent use. Everything that happens is told to ``listener`` in order. One event loop.
"""

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

KV_RANK = 0x01000100  # world 1, rank 0, twice: one card
OBJECT_GROUP = 0

Level = Literal["l1", "l2"]


@dataclass(frozen=True, slots=True)
class BlockKey:
    """The name of one stored block. Nothing is shared between pools or salts."""

    pool: str
    block_hash: bytes
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """What the store did to some blocks of one level."""

    kind: Literal["store", "access", "delete"]
    level: Level
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One line of a listing."""

    key: BlockKey
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load read; ``moved_bytes`` came from L2."""

    blocks: int
    moved_bytes: int


class SharedLevel(Protocol):
    """Level L2: every store that is given the same one sees the same blocks."""

    def has(self, key: BlockKey) -> bool:
        """Whether the block can be loaded."""

    def add(self, key: BlockKey, size_bytes: int) -> bool:
        """Store a block; False when it was there."""

    def remove(self, key: BlockKey) -> bool:
        """Whether it was there."""

    def objects(self) -> list[StoredObject]:
        """Everything that is stored now, in no order."""


class SharedMemory:
    """L2 for stores of one process."""

    def __init__(self) -> None:
        self._sizes: dict[BlockKey, int] = {}

    def has(self, key: BlockKey) -> bool:
        return key in self._sizes

    def add(self, key: BlockKey, size_bytes: int) -> bool:
        is_new = key not in self._sizes
        self._sizes.setdefault(key, size_bytes)
        return is_new

    def remove(self, key: BlockKey) -> bool:
        return self._sizes.pop(key, None) is not None

    def objects(self) -> list[StoredObject]:
        return [StoredObject(key, size_bytes) for key, size_bytes in self._sizes.items()]


class SharedFolder:
    """L2 for several processes: a file a block, named as LMCache's `fs` adapter names it.

    A file has the length of its block and no content: it takes no room on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, key: BlockKey) -> str:
        parts = [key.pool.replace("/", "-SEP-"), f"0x{KV_RANK:08x}", f"{OBJECT_GROUP:x}", key.block_hash.hex()]
        if key.cache_salt:
            parts.append(key.cache_salt)
        return os.path.join(self._folder, "@".join(parts) + ".data")

    def has(self, key: BlockKey) -> bool:
        return os.path.exists(self._path(key))

    def add(self, key: BlockKey, size_bytes: int) -> bool:
        try:
            file = os.open(self._path(key), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        try:
            os.ftruncate(file, size_bytes)
        finally:
            os.close(file)
        return True

    def remove(self, key: BlockKey) -> bool:
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def objects(self) -> list[StoredObject]:
        found = []
        for name in os.listdir(self._folder):
            key = _key_of(name)
            with contextlib.suppress(FileNotFoundError):  # deleted while we look
                if key is not None:
                    found.append(StoredObject(key, os.stat(os.path.join(self._folder, name)).st_size))
        return found


def _key_of(name: str) -> BlockKey | None:
    """The block that a file holds; None for a file that is none of ours."""
    parts = name.removesuffix(".data").split("@")
    if not name.endswith(".data") or len(parts) not in (4, 5):
        return None
    pool, rank, group, block_hash, *salt = parts
    if rank != f"0x{KV_RANK:08x}" or group != f"{OBJECT_GROUP:x}":
        return None
    try:
        return BlockKey(pool.replace("-SEP-", "/"), bytes.fromhex(block_hash), "".join(salt))
    except ValueError:
        return None


def _nobody(event: StoreEvent) -> None:
    return None


class BlockStore:
    """The store of one node; its engines share it."""

    def __init__(
        self,
        shared: SharedLevel,
        *,
        block_bytes: int = 1 << 20,
        l1_blocks: int = 4096,
        listener: Callable[[StoreEvent], None] = _nobody,
    ) -> None:
        self.block_bytes = block_bytes
        self.l1_bytes = l1_blocks * block_bytes
        self._shared = shared
        self._l1: OrderedDict[BlockKey, None] = OrderedDict()
        self._l1_blocks = l1_blocks
        self._tell = listener

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks can be loaded."""
        for found, key in enumerate(keys):
            if key not in self._l1 and not self._shared.has(key):
                return found
        return len(keys)

    def load(self, keys: Sequence[BlockKey]) -> Loaded:
        """Read leading blocks, up to the first that has gone since ``match`` found it."""
        for blocks, key in enumerate(keys):
            if key not in self._l1 and not self._shared.has(key):
                self._report("delete", "l2", [key])
                keys = keys[:blocks]
                break
        hot = [key for key in keys if key in self._l1]
        cold = [key for key in keys if key not in self._l1]
        for key in hot:
            self._l1.move_to_end(key)
        self._report("access", "l1", hot)
        self._report("access", "l2", cold)
        self._report("store", "l1", cold)
        self._report("delete", "l1", cold)
        return Loaded(len(keys), len(cold) * self.block_bytes)

    def store(self, keys: Sequence[BlockKey]) -> None:
        """Keep computed blocks on both levels."""
        self._keep(keys)
        self._report("store", "l2", [key for key in keys if self._shared.add(key, self.block_bytes)])
        self._evict()

    def cold(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of them that only L2 has."""
        return [key for key in keys if key not in self._l1 and self._shared.has(key)]

    def count_dram(self, keys: Sequence[BlockKey]) -> int:
        """How many of them L1 has."""
        return sum(key in self._l1 for key in keys)

    def bring(self, keys: Sequence[BlockKey]) -> None:
        """Keep in L1 what L2 has of these blocks."""
        gone = {key for key in keys if not self._shared.has(key)}
        self._report("delete", "l2", list(gone))
        fresh = [key for key in keys if key not in gone and key not in self._l1]
        self._report("access", "l2", fresh)
        self._keep(fresh)
        self._evict()

    def objects(self, level: Level) -> list[StoredObject]:
        """Everything that lies on a level now, in ascending order of the blocks' hashes."""
        found = self._shared.objects() if level == "l2" else [StoredObject(k, self.block_bytes) for k in self._l1]
        return sorted(found, key=lambda each: (each.key.block_hash, each.key.pool, each.key.cache_salt))

    def delete(self, keys: Sequence[BlockKey], level: Level) -> int:
        """Remove blocks from a level; how many were there."""
        if level == "l2":
            removed = [key for key in keys if self._shared.remove(key)]
        else:
            removed = [key for key in keys if key in self._l1]
            for key in removed:
                del self._l1[key]
        self._report("delete", level, removed)
        return len(removed)

    def _keep(self, keys: Sequence[BlockKey]) -> None:
        fresh = [key for key in keys if key not in self._l1]
        self._l1.update(dict.fromkeys(fresh))
        self._report("store", "l1", fresh)

    def _evict(self) -> None:
        evicted = [self._l1.popitem(last=False)[0] for _ in range(len(self._l1) - self._l1_blocks)]
        self._report("delete", "l1", evicted)

    def drop_l1(self) -> None:
        """Forget the node's own copies, as a restart or ``/cache/clear`` does; L2 stays."""
        dropped = list(self._l1)
        self._l1.clear()
        self._report("delete", "l1", dropped)

    def _report(self, kind: Literal["store", "access", "delete"], level: Level, keys: Sequence[BlockKey]) -> None:
        if keys:
            self._tell(StoreEvent(kind, level, keys))
