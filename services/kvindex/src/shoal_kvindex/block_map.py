"""The bounded map under the directory: what is kept of each block, and which block leaves for another.

Three things keep it small and even. A namespace is 256 dicts, by the first byte of the hash, so that the rebuild of
a dict that grew holds the loop up for two milliseconds and not for a second. A key is the rest of the hash: 31 bytes
fill 64 bytes of memory exactly. A value is packed into bytes that blocks of equal state share, and bytes are nothing
that the garbage collector must look at: ten million blocks are no work for it.

What leaves is chosen by the clock algorithm: the oldest block leaves, unless it was used since it came or since it
was last spared; then it goes to the end. A use therefore moves nothing. docs/decisions/0009-sql-is-off-the-hot-path.md
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, cast

from shoal_kvindex.names import Namespace

SHARDS = 256  # by the first byte of a block's hash
INTERNED_VALUES = 65_536  # beyond this the sharing starts anew; it is only an economy
LOOKED_UP = 64  # blocks of a run at a time: faster than one after the other, and little is looked up in vain
EXAMINED_BLOCKS = 256  # by one eviction, at most: a tenth of a millisecond
EVICTED_SHARE = 64  # one part in so many of a namespace leaves at once, within what is examined

_HEAD = struct.Struct("!QB")
_FLAGS_AT = 8
OBJECTS_AT = _HEAD.size
_USED, _MARKED = 1, 2

_NO_BLOCKS: dict[bytes, bytes] = {}
_NO_SHARDS = [_NO_BLOCKS] * SHARDS


SplitBlock = tuple[int, bytes, int]  # first byte and rest of the hash, expiry: what a load of millions can afford


class Block(NamedTuple):
    """Expiry in Unix seconds, and the numbers of its stored objects, ascending."""

    expires_at_s: int
    objects: tuple[int, ...]
    is_used: bool = False  # since it came or was spared
    is_marked: bool = False

    def pack(self) -> bytes:
        flags = _USED * self.is_used | _MARKED * self.is_marked
        return struct.pack(f"!QB{len(self.objects)}I", self.expires_at_s, flags, *self.objects)

    @classmethod
    def unpack(cls, value: bytes) -> "Block":
        expires_at_s, flags, *objects = struct.unpack(f"!QB{(len(value) - _HEAD.size) // 4}I", value)
        return cls(expires_at_s, tuple(objects), bool(flags & _USED), bool(flags & _MARKED))


class Evicted(NamedTuple):
    """A block that had to leave."""

    namespace: Namespace
    block_hash: bytes
    value: bytes


class BlockMap:
    """Packed blocks by namespace and hash; at most ``max_blocks`` of them after ``evict``."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._namespaces: dict[Namespace, _Shards] = {}
        self._block_count = 0
        self._interned: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return self._block_count

    @property
    def is_over(self) -> bool:
        """Whether there are more blocks than may be."""
        return self._block_count > self.max_blocks

    def namespaces(self) -> list[Namespace]:
        return list(self._namespaces)

    def get(self, namespace: Namespace, block_hash: bytes) -> bytes | None:
        shards = self._namespaces.get(namespace)
        return None if shards is None else shards.by_byte[block_hash[0]].get(block_hash[1:])

    def get_all(self, namespace: Namespace, hashes: Iterable[bytes]) -> list[bytes | None]:
        """As ``get``, for many."""
        shards = self._namespaces.get(namespace)
        by_byte = _NO_SHARDS if shards is None else shards.by_byte
        return [by_byte[block_hash[0]].get(block_hash[1:]) for block_hash in hashes]

    def run(self, namespace: Namespace, hashes: Sequence[bytes]) -> list[bytes]:
        """The leading ones, up to the first that is not known."""
        shards = self._namespaces.get(namespace)
        found: list[bytes] = []
        if shards is None:
            return found
        by_byte = shards.by_byte
        for begin in range(0, len(hashes), LOOKED_UP):
            some = [by_byte[block_hash[0]].get(block_hash[1:]) for block_hash in hashes[begin : begin + LOOKED_UP]]
            if None in some:
                del some[some.index(None) :]
                return found + cast("list[bytes]", some)
            found += cast("list[bytes]", some)
        return found

    def put(self, namespace: Namespace, block_hash: bytes, block: Block) -> None:
        """Add a block, or change a known one in its place."""
        self.put_value(namespace, block_hash, self.intern(block))

    def put_value(self, namespace: Namespace, block_hash: bytes, value: bytes) -> None:
        """As ``put``, for a value of ``intern``."""
        shards = self._namespaces.get(namespace)
        if shards is None:
            shards = self._namespaces[namespace] = _Shards()
        shard = shards.by_byte[block_hash[0]]
        if not shard:
            shard = shards.by_byte[block_hash[0]] = {}
        known_count = len(shard)
        shard[block_hash[1:]] = value
        if len(shard) > known_count:
            shards.block_count += 1
            self._block_count += 1

    def put_unknown(
        self, namespace: Namespace, blocks: Iterable[SplitBlock], objects: tuple[int, ...]
    ) -> tuple[int, list[SplitBlock]]:
        """Add the blocks that are not known, all with these objects. Returns how many that were, and those that are
        known: they stay as they are."""
        known: list[SplitBlock] = []
        shards = self._namespaces.setdefault(namespace, _Shards())
        by_byte = shards.by_byte
        values: dict[int, bytes] = {}
        added = 0
        for block in blocks:
            first_byte, rest, expires_at_s = block
            shard = by_byte[first_byte]
            if rest in shard:
                known.append(block)
                continue
            value = values.get(expires_at_s)
            if value is None:
                value = values[expires_at_s] = self.intern(Block(expires_at_s, objects))
            if shard is _NO_BLOCKS:
                shard = by_byte[first_byte] = {}
            shard[rest] = value
            added += 1
        shards.block_count += added
        self._block_count += added
        return added, known

    def remove(self, namespace: Namespace, block_hash: bytes) -> None:
        """Forget a known block."""
        shards = self._namespaces[namespace]
        shard = shards.by_byte[block_hash[0]]
        del shard[block_hash[1:]]
        self._block_count -= 1
        shards.block_count -= 1
        if not shard:
            shards.by_byte[block_hash[0]] = _NO_BLOCKS
        if not shards.block_count:
            del self._namespaces[namespace]

    def shard(self, namespace: Namespace, first_byte: int) -> list[tuple[bytes, bytes]]:
        """Hashes without their first byte, and values, as they are now."""
        shards = self._namespaces.get(namespace)
        return [] if shards is None else list(shards.by_byte[first_byte].items())

    def intern(self, block: Block) -> bytes:
        """Pack; equal blocks share one value."""
        if len(self._interned) >= INTERNED_VALUES:
            self._interned.clear()
        value = block.pack()
        return self._interned.setdefault(value, value)

    def evict(self) -> list[Evicted]:
        """Make room in the largest namespace: at least one block leaves, never more than a few hundred."""
        namespace, shards = max(self._namespaces.items(), key=lambda item: item[1].block_count)
        wanted = max(1, min(EXAMINED_BLOCKS, shards.block_count // EVICTED_SHARE))
        leaving: list[Evicted] = []
        first: Evicted | None = None
        for block_hash, value in shards.oldest(min(EXAMINED_BLOCKS, shards.block_count)):
            block = Evicted(namespace, block_hash, value)
            first = first or block
            self.remove(namespace, block_hash)
            if value[_FLAGS_AT] & _USED:
                self.put(namespace, block_hash, Block.unpack(value)._replace(is_used=False))
                continue
            leaving.append(block)
            if len(leaving) == wanted:
                break
        if not leaving and first is not None:
            self.remove(namespace, first.block_hash)  # all were used: one has to go
            leaving.append(first)
        return leaving


class _Shards:
    """One namespace. A shard that has no blocks is ``_NO_BLOCKS``, which stays empty."""

    def __init__(self) -> None:
        self.by_byte = list(_NO_SHARDS)
        self.block_count = 0
        self._hand = 0  # the shard where eviction goes on

    def oldest(self, limit: int) -> Iterator[tuple[bytes, bytes]]:
        """``limit`` hashes and values: a small share of one shard, from its front, then of the next one. Whoever takes
        them may remove them or add them at the end."""
        while limit > 0:
            first_byte, self._hand = self._hand, (self._hand + 1) % SHARDS
            shard = self.by_byte[first_byte]
            share = min(limit, -(-len(shard) // EVICTED_SHARE))
            for rest, value in list(islice(shard.items(), share)):
                yield bytes([first_byte]) + rest, value
            limit -= share
