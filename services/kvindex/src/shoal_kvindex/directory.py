"""The map of stored blocks: which copies exist at which place, and until when the block is wanted.

Answers from memory only and is told of every change by reports, claims, the sweep and the load at start. It tells
each change to a Journal, which makes it durable; what the bound drops from the map is not told, so it stays durable,
and from then on the map is not complete for that pool. Runs on one event loop; no method waits, and none works longer
than its arguments are long but ``objects_at``, which looks at one shard.

Memory: 100 to 130 bytes a block (``block_map.py``). An object is a number in a packed value; dropping a server kills
its numbers and touches no block.
docs/decisions/0007-the-store-tells-the-truth.md, docs/decisions/0009-sql-is-off-the-hot-path.md
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from types import MappingProxyType
from typing import NamedTuple, Protocol

from shoal_kvindex.block_map import INTERNED_VALUES, OBJECTS_AT, SHARDS, Block, BlockMap, SplitBlock
from shoal_kvindex.kinds import PoolLayout
from shoal_kvindex.names import SHARED, Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.readable import Readable, Stretch, is_whole, readable

__all__ = [
    "SHARDS",
    "SHARED",
    "Directory",
    "Journal",
    "Level",
    "Namespace",
    "ObjectKey",
    "Part",
    "Place",
    "PlaceCount",
    "Readable",
    "Run",
    "is_whole",
]

REMEMBERED_DELETES = 65_536  # so many, at most twice: Postgres learns of a delete a little later than the map


class Journal(Protocol):
    """Told of every change, in order; makes them durable. Never blocks and never raises."""

    def object_stored(self, key: ObjectKey, place: Place, size_bytes: int, expires_at_s: int) -> None: ...

    def object_deleted(self, key: ObjectKey, place: Place) -> None: ...

    def block_renewed(self, namespace: Namespace, block_hash: bytes, expires_at_s: int) -> None: ...

    def place_dropped(self, place: Place) -> None: ...

    def cursor_moved(self, instance_id: str, incarnation: int, seq: int) -> None: ...


Rule = Callable[[int], int | None]
OnGone = Callable[[Namespace, bytes, Place], None]


class PlaceCount(NamedTuple):
    """What was reported of one place and not taken back, also when the bound dropped the block."""

    blocks: int  # of the group and rank that has the most
    objects: int
    size_bytes: int  # objects of one pool, rank and group are of one size


class Run(NamedTuple):
    """Leading blocks of a prompt as they are now: how many one after the other are readable alike, and ``values`` for
    ``Directory.renew_run``."""

    namespace: Namespace
    hashes: Sequence[bytes]
    values: list[bytes]
    stretches: list[Stretch]

    @property
    def blocks(self) -> int:
        return len(self.values)


def _nobody_asks(namespace: Namespace, block_hash: bytes, place: Place) -> None: ...


class Directory:
    """At most ``max_blocks`` blocks; among those not used lately the oldest leave first.

    ``on_gone`` is told when a delete takes the last object of a block away: the block, and where it was. The block's
    mark can still be seen then.
    """

    def __init__(self, journal: Journal, max_blocks: int, on_gone: OnGone = _nobody_asks) -> None:
        self._journal = journal
        self._on_gone = on_gone
        self._map = BlockMap(max_blocks)
        self._evicted_count = 0
        self._object_numbers: dict[tuple[Place, Part], int] = {}
        self._objects: list[tuple[Place, Part] | None] = []  # None: its place was dropped
        self._groups: dict[str, set[int]] = {}  # by pool: groups of layers that were ever reported
        self._layouts: dict[str, PoolLayout] = {}
        self._readable: dict[tuple[str, bytes], Readable] = {}
        self._marked: dict[tuple[Namespace, bytes], bool] = {}
        self._object_counts: dict[tuple[str, int], int] = {}  # by pool and number
        self._sizes: dict[tuple[str, Part], int] = {}
        self._arrival = (0, -1)  # expiry and object number of the block that came last, and its value
        self._arrived = b""
        self._incomplete_pools: set[str] = set()
        self._is_cut = False
        self._deleted_lately: tuple[set[tuple[Namespace, bytes]], set[tuple[Namespace, bytes]]] = (set(), set())

    @property
    def max_blocks(self) -> int:
        return self._map.max_blocks

    @property
    def block_count(self) -> int:
        return len(self._map)

    @property
    def evicted_count(self) -> int:
        """Blocks that left because of the bound, since start."""
        return self._evicted_count

    @property
    def marked(self) -> Mapping[tuple[Namespace, bytes], bool]:
        """Blocks that are about to be deleted; the value tells whether for want of room."""
        return MappingProxyType(self._marked)

    def namespaces(self) -> list[Namespace]:
        """Those that have blocks."""
        return self._map.namespaces()

    def layout(self, pool: str) -> PoolLayout | None:
        """What the engines said of the groups of this pool; None when they said nothing."""
        return self._layouts.get(pool)

    def set_layout(self, pool: str, layout: PoolLayout) -> None:
        """Engines say what the groups of this pool are."""
        if self._layouts.get(pool) != layout:
            self._layouts[pool] = layout
            self._readable.clear()

    def is_complete(self, pool: str) -> bool:
        """Whether a block of this pool that is not in the map is not in the durable directory either."""
        return not self._is_cut and pool not in self._incomplete_pools

    def cut(self) -> None:
        """The load left blocks out, because they are more than the bound."""
        self._is_cut = True

    def store(self, key: ObjectKey, place: Place, size_bytes: int, expires_at_s: int) -> None:
        """An object is there. ``expires_at_s`` holds for a block that was not known; others keep their expiry."""
        expires_at_s = self._add(key, place, size_bytes, expires_at_s)
        self._journal.object_stored(key, place, size_bytes, expires_at_s)

    def restore(
        self, namespace: Namespace, place: Place, part: Part, size_bytes: int, blocks: Iterable[SplitBlock]
    ) -> None:
        """As ``store`` for many, from the durable directory itself: the journal is not told. Makes room afterwards, so
        it goes over the bound by as many as it is given."""
        number = self._number(namespace.pool, place, part)
        added, known = self._map.put_unknown(namespace, blocks, (number,))
        if added:
            self._count(namespace.pool, number, added)
            self._sizes[namespace.pool, part] = size_bytes
        for first_byte, rest, expires_at_s in known:
            key = ObjectKey(namespace, bytes([first_byte]) + rest, part)
            self._add(key, place, size_bytes, expires_at_s)
        while self._map.is_over:
            self._evict()

    def recall(self, key: ObjectKey, place: Place, expires_at_s: int) -> None:
        """As ``store``, of a block that the bound dropped, from the durable directory; not while its delete is on the
        way there."""
        name = (key.namespace, key.block_hash)
        if not any(name in names for names in self._deleted_lately):
            self._add(key, place, None, expires_at_s)

    def delete(self, key: ObjectKey, place: Place) -> None:
        """An object is gone. Told to the journal also when the map does not know it: the bound may have dropped it."""
        self._journal.object_deleted(key, place)
        if not self.is_complete(key.namespace.pool):
            self._remember_deleted(key.namespace, key.block_hash)
        value = self._map.get(key.namespace, key.block_hash)
        number = self._object_numbers.get((place, key.part))
        if number is None:
            return
        block = None if value is None else Block.unpack(value)
        if block is None or number not in block.objects:
            if block is None and not self.is_complete(key.namespace.pool):
                self._count(key.namespace.pool, number, -1)
            return
        self._count(key.namespace.pool, number, -1)
        rest = tuple(n for n in block.objects if n != number and self._objects[n] is not None)
        if rest:
            self._map.put(key.namespace, key.block_hash, block._replace(objects=rest))
            return
        self._map.remove(key.namespace, key.block_hash)
        self._on_gone(key.namespace, key.block_hash, place)
        self._marked.pop((key.namespace, key.block_hash), None)  # only now: the mark tells why it is gone

    def drop_l1(self, instance_id: str) -> None:
        """What this lmcache server had in DRAM is not believed any more. No block is looked at: its object numbers
        die, and a block left without objects is no hit and leaves with the bound."""
        place = Place(Level.L1, instance_id)
        for dead in [known for known in self._object_numbers if known[0] == place]:
            number = self._object_numbers.pop(dead)
            self._objects[number] = None
            for counted in [counted for counted in self._object_counts if counted[1] == number]:
                del self._object_counts[counted]
        self._readable.clear()
        self._journal.place_dropped(place)

    def renew(self, namespace: Namespace, hashes: Sequence[bytes], rule: Rule) -> int:
        """Known blocks are used and get the expiry that ``rule`` makes of their present one (None: as it is); how many
        are known."""
        values = self._map.get_all(namespace, hashes)
        self._renew(namespace, hashes, values, rule)
        return len(values) - values.count(None)

    def renew_run(self, run: Run, blocks: int, rule: Rule) -> None:
        """As ``renew``, for the first blocks of a run of this moment."""
        self._renew(run.namespace, run.hashes, run.values[:blocks], rule)

    def extend(self, namespace: Namespace, hashes: Sequence[bytes], expires_at_s: int) -> list[bytes]:
        """These blocks were used somewhere: they expire then or later. Returns those that are not known."""

        def later(present_s: int) -> int | None:
            return expires_at_s if expires_at_s > present_s else None

        known_blocks = self.renew(namespace, hashes, later)
        return [] if known_blocks == len(hashes) else self.unknown(namespace, hashes)

    def unknown(self, namespace: Namespace, hashes: Sequence[bytes]) -> list[bytes]:
        """Those of these blocks that are not in the map."""
        found = zip(hashes, self._map.get_all(namespace, hashes), strict=True)
        return [block_hash for block_hash, value in found if value is None]

    def mark(self, namespace: Namespace, hashes: Iterable[bytes], *, is_for_room: bool = False) -> int:
        """These blocks are about to be deleted: no match sees them. Returns how many are known; others get no mark."""
        known_blocks = 0
        for block_hash in hashes:
            if (value := self._map.get(namespace, block_hash)) is not None:
                known_blocks += 1
                self._map.put(namespace, block_hash, Block.unpack(value)._replace(is_marked=True))
                self._marked[namespace, block_hash] = is_for_room
        return known_blocks

    def unmark(self, namespace: Namespace, hashes: Iterable[bytes]) -> None:
        """They stay after all."""
        for block_hash in hashes:
            if self._marked.pop((namespace, block_hash), None) is None:
                continue
            if (value := self._map.get(namespace, block_hash)) is not None:
                self._map.put(namespace, block_hash, Block.unpack(value)._replace(is_marked=False))

    def is_marked(self, namespace: Namespace, block_hash: bytes) -> bool:
        return (namespace, block_hash) in self._marked

    def run(self, namespace: Namespace, hashes: Sequence[bytes]) -> Run:
        """The leading blocks up to the first that is not known or is marked."""
        values = self._map.run(namespace, hashes)
        stretches: list[Stretch] = []
        blocks = 0
        for value, alike in groupby(values):  # blocks of one prompt mostly share one value
            if Block.unpack(value).is_marked:
                break
            length = len(list(alike))
            stretches.append((self._readable_as(namespace.pool, value), length))
            blocks += length
        return Run(namespace, hashes, values[:blocks], stretches)

    def readable_run(self, namespace: Namespace, hashes: Sequence[bytes]) -> Iterator[Readable]:
        """Who can read each block of the run."""
        return chain.from_iterable(repeat(*stretch) for stretch in self.run(namespace, hashes).stretches)

    def expires_at_s(self, namespace: Namespace, block_hash: bytes) -> int | None:
        """Unix seconds; None for a block that is not known."""
        value = self._map.get(namespace, block_hash)
        return None if value is None else Block.unpack(value).expires_at_s

    def copies(self, namespace: Namespace, block_hash: bytes) -> Sequence[tuple[Place, Part]]:
        """The objects of a block; none for one that is not known."""
        value = self._map.get(namespace, block_hash)
        return () if value is None else self._live(value)

    def objects_at(self, place: Place, shard: int) -> Iterator[ObjectKey]:
        """Objects there whose hash begins with the byte ``shard``, as they are at the first step of the iterator.
        Take it in pieces: a large map has tens of thousands of them."""
        first = bytes([shard])
        parts: dict[bytes, list[Part]] = {}  # blocks share values
        for namespace, blocks in [(namespace, self._map.shard(namespace, shard)) for namespace in self.namespaces()]:
            for rest, value in blocks:
                if (found := parts.get(value)) is None:
                    found = parts[value] = [part for at, part in self._live(value) if at == place]
                for part in found:
                    yield ObjectKey(namespace, first + rest, part)

    def count(self, place: Place) -> PlaceCount:
        """What is at a place, in numbers."""
        parts = {number: part for (at, part), number in self._object_numbers.items() if at == place}
        blocks: dict[str, int] = {}
        objects = size_bytes = 0
        for (pool, number), count in self._object_counts.items():
            if (part := parts.get(number)) is not None:
                blocks[pool] = max(blocks.get(pool, 0), count)
                objects += count
                size_bytes += count * self._sizes.get((pool, part), 0)
        return PlaceCount(sum(blocks.values()), objects, size_bytes)

    def _renew(self, namespace: Namespace, hashes: Sequence[bytes], values: Sequence[bytes | None], rule: Rule) -> None:
        end = 0
        for value, alike in groupby(values):
            begin, end = end, end + len(list(alike))
            if value is None:
                continue
            block = Block.unpack(value)
            expires_at_s = rule(block.expires_at_s)
            kept_s = block.expires_at_s if expires_at_s is None else expires_at_s
            after = self._map.intern(block._replace(is_used=True, expires_at_s=kept_s))
            if after == value:
                continue
            for block_hash in hashes[begin:end]:
                self._map.put_value(namespace, block_hash, after)
                if expires_at_s is not None:
                    self._journal.block_renewed(namespace, block_hash, expires_at_s)

    def _add(self, key: ObjectKey, place: Place, size_bytes: int | None, expires_at_s: int) -> int:
        """Returns the expiry that the block has. ``size_bytes`` is None for an object that was counted before."""
        pool = key.namespace.pool
        number = self._number(pool, place, key.part)
        value = self._map.get(key.namespace, key.block_hash)
        if value is None:
            if self._arrival != (expires_at_s, number):  # most are of one moment and place
                self._arrival = (expires_at_s, number)
                self._arrived = self._map.intern(Block(expires_at_s, (number,)))
            self._map.put_value(key.namespace, key.block_hash, self._arrived)
            if self._map.is_over:
                self._evict()
        else:
            block = Block.unpack(value)
            expires_at_s = block.expires_at_s
            if number in block.objects:
                return expires_at_s
            live = [n for n in block.objects if self._objects[n] is not None]
            self._map.put(key.namespace, key.block_hash, block._replace(objects=tuple(sorted([*live, number]))))
        if size_bytes is not None:
            self._count(pool, number, 1)
            if size_bytes:
                self._sizes[pool, key.part] = size_bytes
        return expires_at_s

    def _number(self, pool: str, place: Place, part: Part) -> int:
        groups = self._groups.setdefault(pool, set())
        if part.object_group_id not in groups:
            groups.add(part.object_group_id)
            self._readable.clear()
        number = self._object_numbers.setdefault((place, part), len(self._objects))
        if number == len(self._objects):
            self._objects.append((place, part))
        return number

    def _count(self, pool: str, number: int, more: int) -> None:
        self._object_counts[pool, number] = max(0, self._object_counts.get((pool, number), 0) + more)

    def _evict(self) -> None:
        evicted = self._map.evict()
        self._evicted_count += len(evicted)
        for block in evicted:
            self._incomplete_pools.add(block.namespace.pool)
            if self._marked:
                self._marked.pop((block.namespace, block.block_hash), None)

    def _remember_deleted(self, namespace: Namespace, block_hash: bytes) -> None:
        lately, _ = self._deleted_lately
        lately.add((namespace, block_hash))
        if len(lately) >= REMEMBERED_DELETES:
            self._deleted_lately = (set(), lately)

    def _live(self, value: bytes) -> list[tuple[Place, Part]]:
        stored = (self._objects[number] for number in Block.unpack(value).objects)
        return [found for found in stored if found is not None]

    def _readable_as(self, pool: str, value: bytes) -> Readable:
        name = (pool, value[OBJECTS_AT:])
        known = self._readable.get(name)
        if known is not None:
            return known
        if len(self._readable) >= INTERNED_VALUES:
            self._readable.clear()
        layout, seen = self._layouts.get(pool), self._groups[pool]
        everywhere = seen if layout is None else layout.everywhere(seen)
        windowed = () if layout is None else [window.object_group_id for window in layout.windows]
        found = self._readable[name] = readable(self._live(value), everywhere, windowed)
        return found
