"""A store, a log and durable rows in memory, around the real map: what listing and sweep work with."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from shoal_kvindex.directory import Directory
from shoal_kvindex.ingest.changes import Change, Correction, IndexState, Marks
from shoal_kvindex.ingest.completeness import Completeness
from shoal_kvindex.ingest.listing import Lister
from shoal_kvindex.ingest.recorder import ChangeRecorder
from shoal_kvindex.ingest.reports import Summary
from shoal_kvindex.names import SHARED, Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.ports import BlockName, DurableBlock, Duties, ListedPage, Position, StoreFailed, StoreTrouble
from shoal_kvindex.sweep import Known, Sweep, SweepRules
from shoal_testkit.clock import VirtualClock

SPACE = Namespace("pool", "")
PART = Part(0x01000100, 0)
SIZE_BYTES = 10
UNCLAIMED_S = 86_400


@dataclass
class HeldLease:
    is_held: bool = True
    term: int = 1


class Rows:
    """What Postgres would have, written at once: a Journal and a Survey."""

    def __init__(self) -> None:
        self.sizes: dict[tuple[ObjectKey, Place], int] = {}
        self.expiries: dict[BlockName, int] = {}
        self.failure: Exception | None = None

    def object_stored(self, key: ObjectKey, place: Place, size_bytes: int, expires_at_s: int) -> None:
        self.sizes[key, place] = size_bytes
        self.block_renewed(key.namespace, key.block_hash, expires_at_s)

    def object_deleted(self, key: ObjectKey, place: Place) -> None:
        self.sizes.pop((key, place), None)
        name = (key.namespace, key.block_hash)
        if not any((held.namespace, held.block_hash) == name for held, _ in self.sizes):
            self.expiries.pop(name, None)

    def block_renewed(self, namespace: Namespace, block_hash: bytes, expires_at_s: int) -> None:
        self.expiries[namespace, block_hash] = max(expires_at_s, self.expiries.get((namespace, block_hash), 0))

    def place_dropped(self, place: Place) -> None:
        for key, at in [held for held in self.sizes if held[1] == place]:
            self.object_deleted(key, at)

    def cursor_moved(self, instance_id: str, incarnation: int, seq: int) -> None: ...

    def _answer(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def objects_at(self, place: Place, shards: range) -> set[ObjectKey]:
        self._answer()
        return {key for key, at in self.sizes if at == place and key.block_hash[0] in shards}

    async def soonest(
        self, before_s: int | None, after: Position | None, limit: int
    ) -> tuple[Sequence[DurableBlock], Position | None]:
        self._answer()
        rows = sorted(
            (expires_at_s, name)
            for name, expires_at_s in self.expiries.items()
            if before_s is None or expires_at_s < before_s
        )
        rest = [row for row in rows if after is None or (row[0], row[1][1]) > (after.expires_at_s, after.block_hash)]
        last = Position(rest[limit - 1][0], 0, rest[limit - 1][1][1]) if len(rest) >= limit else None
        return [self._block(name) for _, name in rest[:limit]], last

    async def blocks(self, names: Sequence[BlockName]) -> Mapping[BlockName, DurableBlock]:
        self._answer()
        return {name: self._block(name) for name in names if name in self.expiries}

    async def shared_bytes(self) -> int:
        self._answer()
        return sum(size_bytes for (_, place), size_bytes in self.sizes.items() if place == SHARED)

    async def ages(self, now_s: int, within_s: Sequence[int]) -> Sequence[tuple[int, int]]:
        self._answer()
        return [(bound_s, sum(at_s < now_s + bound_s for at_s in self.expiries.values())) for bound_s in within_s]

    def _block(self, name: BlockName) -> DurableBlock:
        held = {
            (key, place): size for (key, place), size in self.sizes.items() if (key.namespace, key.block_hash) == name
        }
        shared_bytes = sum(size for (_, place), size in held.items() if place == SHARED)
        objects = tuple((place, key.part) for key, place in held)
        return DurableBlock(name, self.expiries[name], shared_bytes, objects)


def nothing() -> None: ...


@dataclass
class Stores:
    """The stores' side, a StoreClient. Its deletes are reported unless ``is_mute``."""

    tell: "Lab"
    registered: list[str] = field(default_factory=lambda: ["node-a"])
    shared: dict[ObjectKey, int] = field(default_factory=dict)
    dram: dict[str, dict[ObjectKey, int]] = field(default_factory=dict)
    locked: set[ObjectKey] = field(default_factory=set)
    failures: dict[str, StoreFailed] = field(default_factory=dict)
    deleted: list[tuple[Place, ObjectKey]] = field(default_factory=list)
    page_objects: int = 3
    is_mute: bool = False
    on_page: Callable[[], None] = nothing
    on_delete: Callable[[], None] = nothing

    def stores(self) -> Sequence[str]:
        return self.registered

    def _answer(self, instance_id: str) -> None:
        if instance_id not in self.registered:
            raise StoreFailed(StoreTrouble.AWAY, instance_id, "is not registered any more")
        if (failure := self.failures.get(instance_id)) is not None:
            raise failure

    def at(self, instance_id: str, level: Level) -> dict[ObjectKey, int]:
        return self.shared if level is Level.L2 else self.dram.setdefault(instance_id, {})

    async def list_page(self, instance_id: str, level: Level, token: str | None) -> ListedPage:
        self._answer(instance_id)
        here = self.at(instance_id, level)
        keys = sorted(key for key in here if token is None or key.block_hash.hex() > token)
        page = [(key, here[key]) for key in sorted(keys, key=lambda key: key.block_hash)[: self.page_objects]]
        self.on_page()
        await asyncio.sleep(0)
        return ListedPage(page, page[-1][0].block_hash.hex() if len(keys) > len(page) else None)

    async def delete(self, instance_id: str, level: Level, keys: Sequence[ObjectKey]) -> int:
        self._answer(instance_id)
        place = SHARED if level is Level.L2 else Place(level, instance_id)
        gone = [key for key in keys if level is Level.L2 or key not in self.locked]
        for key in gone:
            self.deleted.append((place, key))
            if self.at(instance_id, level).pop(key, None) is not None and not self.is_mute:
                self.tell.reported_gone(key, place)
        self.on_delete()
        await asyncio.sleep(0)
        return len(keys) - len(gone)


class Lab:
    """One instance of the index, and the store whose reports it hears."""

    def __init__(self, clock: VirtualClock, max_blocks: int = 1000) -> None:
        self.clock = clock
        self.rows = Rows()
        self.directory = Directory(self.rows, max_blocks)
        self.recorder = ChangeRecorder()
        self.completeness = Completeness()
        self.lease = HeldLease()
        self.stores = Stores(self)
        self.changes: list[Change] = []
        self.before_apply: Callable[[Change], None] = lambda _: None
        self.after_apply: Callable[[Change], None] = lambda _: None
        self.hears_all = True
        self.is_loaded = True
        self.pending: set[BlockName] = set()
        self.capacity_bytes: int | None = None
        self.together_objects = 4

    async def publish(self, change: Change) -> Summary | None:
        """The log: everything published comes back a turn later."""
        await asyncio.sleep(0)
        self.before_apply(change)
        self.changes.append(change)
        match change:
            case Marks():
                for namespace, hashes in change.blocks:
                    if change.is_taken_back:
                        self.directory.unmark(namespace, hashes)
                    else:
                        self.directory.mark(namespace, hashes, is_for_room=change.is_for_room)
            case Correction():
                for key in change.gone:
                    self.directory.delete(key, change.place)
                for key, size_bytes in change.found:
                    self.directory.store(key, change.place, size_bytes, int(self.clock.now()) + UNCLAIMED_S)
            case IndexState():
                self.completeness.tell(change)
        self.after_apply(change)
        return Summary()

    def reported(self, key: ObjectKey, place: Place = SHARED, lives_s: int = UNCLAIMED_S) -> None:
        """A report that an object was stored."""
        self.recorder.stored(key, place, SIZE_BYTES)
        self.directory.store(key, place, SIZE_BYTES, int(self.clock.now()) + lives_s)

    def reported_gone(self, key: ObjectKey, place: Place = SHARED) -> None:
        self.recorder.deleted(key, place)
        self.directory.delete(key, place)

    def stored(self, key: ObjectKey, place: Place = SHARED, lives_s: int = UNCLAIMED_S) -> None:
        """An object is stored, and reported."""
        self.stores.at(place.instance_id, place.level)[key] = SIZE_BYTES
        self.reported(key, place, lives_s)

    def known(self, place: Place = SHARED) -> set[ObjectKey]:
        """What the map has there."""
        return {key for shard in range(256) for key in self.directory.objects_at(place, shard)}

    def durable(self, place: Place = SHARED) -> set[ObjectKey]:
        return {key for key, at in self.rows.sizes if at == place}

    def renew(self, key: ObjectKey, lives_s: int) -> None:
        """Somebody used the block."""
        self.directory.extend(key.namespace, [key.block_hash], int(self.clock.now()) + lives_s)

    def duties(self) -> Duties:
        return Duties(self.stores, self.rows, self, self.lease, self.clock, lambda: self.hears_all)

    def lister(self) -> Lister:
        return Lister(self.duties(), self.directory, self.recorder, together_objects=self.together_objects)

    def sweep(self, rules: SweepRules) -> Sweep:
        def is_wanted(namespace: Namespace, block_hash: bytes) -> bool:
            return (namespace, block_hash) in self.pending

        return Sweep(self.duties(), Known(self.directory, is_wanted, lambda: self.capacity_bytes), rules)


def key_of(number: int, shard: int = 0, namespace: Namespace = SPACE, part: Part = PART) -> ObjectKey:
    return ObjectKey(namespace, bytes([shard]) + number.to_bytes(31, "big"), part)


@pytest.fixture
def lab(clock: VirtualClock) -> Lab:
    return Lab(clock)


@pytest.fixture
def make_lab(clock: VirtualClock) -> Callable[[int], Lab]:
    return lambda max_blocks: Lab(clock, max_blocks)


@pytest.fixture
def key() -> Callable[..., ObjectKey]:
    """Names of objects: ``key(number, shard)``."""
    return key_of
