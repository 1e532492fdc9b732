"""Deletes what nobody wants any more, and what is wanted least when the shared level is full.

mark → grace → look again → delete → wait for the reports. Marks go to all instances: Match does not see marked blocks
and asks no more for them. During the grace whatever was answered before the mark can still arrive: a block that was
used (its expiry grew) or that a request computes again is taken back, the others are deleted: the shared objects at
any server, then those in DRAM at each server that has some, because a hot copy in DRAM is never written to the
shared level again and would hide that the block is gone. The reports of the deletes change the maps, as all reports do.

Soonest expiry first, for room too. A deleted object that no report takes out of the directory (the file was not
there, the report was lost) is deleted once more and then corrected.

Nothing here is durable, and need not be. A holder that dies leaves marks, which the next one finds in its map, gives
their grace again, and finishes or takes back; what it had deleted is reported by the servers meanwhile; deleting twice
is the same as once. Every step asks first whether the lease is still held. While the log is away nothing is deleted,
because uses elsewhere cannot be heard, and the grace begins anew.
docs/decisions/0010-expiry-follows-the-traffic-class.md
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from shoal_kvindex.directory import PlaceCount
from shoal_kvindex.ingest.changes import Correction, Marks, SweepCounts
from shoal_kvindex.names import SHARED, Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.ports import BlockName, DurableBlock, Duties, Position, StoreFailed, StoreTrouble
from shoal_policy import RoomPolicy

MARKED_BLOCKS = 5_000  # in one change of the log: 160 kB
DELETED_OBJECTS = 10_000
NO_PART = Part(0, 0)
MAX_PAGES = 50  # of the durable directory, read in one step

Item = TypeVar("Item")


class Kept(Protocol):
    """What the sweep asks the map."""

    @property
    def marked(self) -> Mapping[BlockName, bool]: ...

    def count(self, place: Place) -> PlaceCount: ...

    def namespaces(self) -> Sequence[Namespace]: ...

    def is_complete(self, pool: str) -> bool: ...

    def expires_at_s(self, namespace: Namespace, block_hash: bytes) -> int | None: ...

    def copies(self, namespace: Namespace, block_hash: bytes) -> Sequence[tuple[Place, Part]]: ...


@dataclass(frozen=True, slots=True)
class Known:
    """What this instance knows. ``is_wanted``: a request computes this block just now. ``capacity_bytes``: of the
    shared level, None when nobody told."""

    directory: Kept
    is_wanted: Callable[[Namespace, bytes], bool]
    capacity_bytes: Callable[[], int | None]


@dataclass(frozen=True, slots=True)
class SweepRules:
    """``max_marked_blocks`` bounds what is hidden and remembered at a time."""

    room: RoomPolicy = field(default_factory=RoomPolicy)
    grace_s: float = 60.0
    reports_s: float = 10.0  # reports of a delete are here after this
    page_blocks: int = 2_000
    batch_blocks: int = 1_000  # looked at and deleted together
    max_marked_blocks: int = 50_000


@dataclass(slots=True)
class _Leaving:
    """A marked block."""

    expires_at_s: int  # when it was marked
    is_for_room: bool
    shared_bytes: int | None  # None: not looked up yet
    due_at_s: float  # monotonic: when the next thing happens to it
    attempts: int = 0  # deletes sent


class LeaseLost(Exception):
    """Another instance goes on."""


class Sweep:
    """``step`` is called by the lease holder's housekeeping every few seconds, one at a time. Raises LeaseLost,
    StoreFailed when no server deletes, and what Postgres raises; the next step goes on where this one stopped."""

    def __init__(self, duties: Duties, known: Known, rules: SweepRules) -> None:
        self._duties = duties
        self._known = known
        self._rules = rules
        self._leaving: dict[BlockName, _Leaving] = {}
        self._gone_at_s: dict[BlockName, float] = {}  # their rows may still be in Postgres
        self._term = 0
        self.counts = SweepCounts()  # since this instance became the lease holder

    async def step(self) -> None:
        """Finish what is due, then mark what has to go."""
        if self._term != self._duties.lease.term:
            self._term = self._duties.lease.term
            self._leaving.clear()
            self._gone_at_s.clear()
            self.counts = SweepCounts()
        now_s = self._duties.clock.monotonic()
        self._adopt(now_s)
        if not self._duties.hears_all():
            for leaving in self._leaving.values():
                leaving.due_at_s = max(leaving.due_at_s, now_s + self._rules.grace_s)
            return
        due = [name for name, leaving in self._leaving.items() if leaving.due_at_s <= now_s]
        for names in _slices(due, self._rules.batch_blocks):
            await self._finish(names)
        keep_s = self._rules.grace_s + self._rules.reports_s
        self._gone_at_s = {name: at_s for name, at_s in self._gone_at_s.items() if at_s + keep_s > now_s}
        await self._mark(await self._expired(), is_for_room=False)
        await self._mark(await self._coldest(), is_for_room=True)

    def _adopt(self, now_s: float) -> None:
        """Marks of an earlier holder."""
        for name, is_for_room in self._known.directory.marked.items():
            if name not in self._leaving:
                expires_at_s = self._known.directory.expires_at_s(*name) or 0
                self._leaving[name] = _Leaving(expires_at_s, is_for_room, None, now_s + self._rules.grace_s)

    async def _expired(self) -> list[DurableBlock]:
        blocks = await self._walk(int(self._duties.clock.now()), lambda _: False)
        empty = [block.name for block in blocks if not block.objects and not self._known.directory.copies(*block.name)]
        for names in _slices(empty, MARKED_BLOCKS):  # rows without any object: a delete of nothing takes them away
            await self._duties.log.publish(Correction(SHARED, (), [ObjectKey(*name, NO_PART) for name in names]))
        left = set(empty)
        return [block for block in blocks if block.name not in left]

    async def _coldest(self) -> list[DurableBlock]:
        """Enough of the blocks that expire soonest to make room."""
        capacity_bytes = self._known.capacity_bytes()
        if capacity_bytes is None:
            return []
        used_bytes = await self._used_bytes()
        leaving_bytes = self._leaving_bytes()
        if leaving_bytes is None:
            return []  # within a grace it is known
        wanted_bytes = self._rules.room.bytes_to_evict(used_bytes, leaving_bytes, capacity_bytes)
        if not wanted_bytes:
            return []
        chosen_bytes = 0

        def is_enough(block: DurableBlock) -> bool:
            nonlocal chosen_bytes
            chosen_bytes += block.shared_bytes
            return chosen_bytes >= wanted_bytes

        return await self._walk(None, is_enough)

    def _leaving_bytes(self) -> int | None:
        """Of what is in use, how much leaves already; None while that is not known."""
        sizes = [
            leaving.shared_bytes
            for name, leaving in self._leaving.items()
            # What was reported to be deleted is not in use any more.
            if not leaving.attempts or any(place == SHARED for place, _ in self._known.directory.copies(*name))
        ]
        known_sizes = [size_bytes for size_bytes in sizes if size_bytes is not None]
        return sum(known_sizes) if len(known_sizes) == len(sizes) else None

    async def _used_bytes(self) -> int:
        directory = self._known.directory
        counted_bytes = directory.count(SHARED).size_bytes
        if all(directory.is_complete(namespace.pool) for namespace in directory.namespaces()):
            return counted_bytes
        return max(counted_bytes, await self._duties.survey.shared_bytes())  # a load may have left blocks out

    async def _walk(self, before_s: int | None, is_enough: Callable[[DurableBlock], bool]) -> list[DurableBlock]:
        """Blocks that may be marked, soonest expiry first; the last one is that of which ``is_enough`` holds."""
        chosen: list[DurableBlock] = []
        position: Position | None = None
        room = self._rules.max_marked_blocks - len(self._leaving)
        for _ in range(MAX_PAGES):
            self._check_lease()
            blocks, position = await self._duties.survey.soonest(before_s, position, self._rules.page_blocks)
            for block in blocks:
                if len(chosen) >= room:
                    return chosen
                if not self._may_go(block, before_s):
                    continue
                chosen.append(block)
                if is_enough(block):
                    return chosen
            if position is None:
                break
        return chosen

    def _may_go(self, block: DurableBlock, before_s: int | None) -> bool:
        """``before_s``: blocks that expired before; None: any that nobody used since the row was written."""
        present_s = self._known.directory.expires_at_s(*block.name)
        if block.name in self._leaving or self._known.is_wanted(*block.name):
            return False
        if before_s is None and not block.shared_bytes:
            return False
        if present_s is None:
            return block.name not in self._gone_at_s
        return present_s <= block.expires_at_s if before_s is None else present_s < before_s

    async def _mark(self, blocks: Sequence[DurableBlock], *, is_for_room: bool) -> None:
        for some in _slices(blocks, MARKED_BLOCKS):
            self._check_lease()
            await self._duties.log.publish(Marks(_by_namespace(block.name for block in some), is_for_room=is_for_room))
            due_at_s = self._duties.clock.monotonic() + self._rules.grace_s
            for block in some:
                expires_at_s = max(block.expires_at_s, self._known.directory.expires_at_s(*block.name) or 0)
                self._leaving[block.name] = _Leaving(expires_at_s, is_for_room, block.shared_bytes, due_at_s)
            self.counts = replace(self.counts, marked_blocks=self.counts.marked_blocks + len(some))

    async def _finish(self, names: Sequence[BlockName]) -> None:
        """The grace of these is over, or the reports of their delete should be here."""
        self._check_lease()
        rows = await self._duties.survey.blocks(names)
        used: list[BlockName] = []
        gone: list[BlockName] = []
        going: dict[BlockName, Sequence[tuple[Place, Part]]] = {}
        for name in names:
            row = rows.get(name)
            objects = self._objects(name, row)
            if not objects:
                gone.append(name)
            elif self._is_used(name, row.expires_at_s if row else 0):
                used.append(name)
            else:
                going[name] = objects
                self._leaving[name].shared_bytes = row.shared_bytes if row else 0
        if used:
            await self._take_back(used)
        if gone:
            await self._let_go(gone)
        await self._delete(going)

    def _objects(self, name: BlockName, row: DurableBlock | None) -> Sequence[tuple[Place, Part]]:
        """Where there is something to delete: as the map says, of a block that it dropped as Postgres says."""
        if self._known.directory.expires_at_s(*name) is not None:
            return self._known.directory.copies(*name)
        return row.objects if row else ()

    def _is_used(self, name: BlockName, durable_expires_at_s: int) -> bool:
        """Whether anybody asked for it since it was marked."""
        leaving = self._leaving[name]
        expires_at_s = max(self._known.directory.expires_at_s(*name) or 0, durable_expires_at_s)
        limit_s = leaving.expires_at_s if leaving.is_for_room else int(self._duties.clock.now())
        return expires_at_s > limit_s or self._known.is_wanted(*name)

    async def _take_back(self, names: Sequence[BlockName]) -> None:
        await self._duties.log.publish(Marks(_by_namespace(names), is_taken_back=True))
        for name in names:
            self._leaving.pop(name, None)
        self.counts = replace(self.counts, renewed_blocks=self.counts.renewed_blocks + len(names))

    async def _let_go(self, names: Sequence[BlockName]) -> None:
        """No object of these is left."""
        now_s = self._duties.clock.monotonic()
        for name in names:
            leaving = self._leaving.pop(name)
            self._gone_at_s[name] = now_s
            if leaving.attempts and leaving.is_for_room:
                self.counts = replace(self.counts, evicted_blocks=self.counts.evicted_blocks + 1)
            elif leaving.attempts:
                self.counts = replace(self.counts, expired_blocks=self.counts.expired_blocks + 1)
        # A block that lost its last copies by a fence is still in the map, without copies, and marked.
        still_marked = [name for name in names if name in self._known.directory.marked]
        if still_marked:
            await self._duties.log.publish(Marks(_by_namespace(still_marked), is_taken_back=True))

    async def _delete(self, going: Mapping[BlockName, Sequence[tuple[Place, Part]]]) -> None:
        keys: defaultdict[Place, list[ObjectKey]] = defaultdict(list)
        names = [name for name in going if not self._is_used(name, 0)]
        for name in names:
            for place, part in going[name]:
                keys[place].append(ObjectKey(*name, part))
        deleted: list[Place] = []
        for place in sorted(keys, key=lambda place: -place.level):  # the shared level first
            is_whole = True
            for some in _slices(keys[place], DELETED_OBJECTS):
                self._check_lease()
                is_whole &= await self._delete_at(place, some)
            if is_whole:
                deleted.append(place)
        now_s = self._duties.clock.monotonic()
        repeated: set[BlockName] = set()
        for name in names:
            leaving = self._leaving[name]
            leaving.attempts += 1
            leaving.due_at_s = now_s + self._rules.reports_s
            if leaving.attempts > 1:
                repeated.add(name)
        for place in deleted:
            unreported = [key for key in keys[place] if (key.namespace, key.block_hash) in repeated]
            if unreported:
                await self._duties.log.publish(Correction(place, (), unreported))

    async def _delete_at(self, place: Place, keys: Sequence[ObjectKey]) -> bool:
        """Whether all of them are deleted. In DRAM some may be being read, or the server may be away: later."""
        client = self._duties.client
        if place != SHARED:
            if place.instance_id not in client.stores():
                return False
            try:
                return not await client.delete(place.instance_id, Level.L1, keys)
            except StoreFailed:
                return False
        failure = StoreFailed(StoreTrouble.AWAY, "", "no store is registered")
        for instance_id in client.stores():
            try:
                await client.delete(instance_id, Level.L2, keys)
            except StoreFailed as failed:
                failure = failed
            else:
                return True
        raise failure

    def _check_lease(self) -> None:
        if not self._duties.lease.is_held or self._duties.lease.term != self._term:
            raise LeaseLost


def _by_namespace(names: Iterable[BlockName]) -> list[tuple[Namespace, list[bytes]]]:
    hashes: dict[Namespace, list[bytes]] = {}
    for namespace, block_hash in names:
        hashes.setdefault(namespace, []).append(block_hash)
    return list(hashes.items())


def _slices(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
