"""Makes the directory equal to what a store says it holds, part by part.

A listing is a picture taken while the store works on, and reports trail the store, always: the file is there (or
gone) first, its report comes later. So for an object that a report named since the page that could show it was asked
for, the report is right and the picture is ignored. For the others:

* stored before its page was read, report still on its way: the picture has it, it is taken in; the report then changes
  nothing. Stored after its page was read: neither has it; the report takes it in.
* deleted before its page was read, report on its way: the picture has it not, it is taken out; the report then changes
  nothing. Deleted after: the report takes it out.
* a report that reaches the log between the comparison and the correction: it is seen when the correction comes back,
  and what the correction overruled is corrected again.

What is left are two servers whose reports about the same object overtake each other, and a report that is lost while
its object is being compared: the next listing mends those. A correction never deletes bytes; the worst is an object
that the directory does not know for a day, or knows though it has gone, which costs a recompute.

The shared level is listed in the order of hashes and held and compared some shards at a time, one in a large store;
DRAM of one server is held at once, as it has no order. Both directories are compared, the map and Postgres: what the
map's bound dropped is not taken in again, and what could not be written during an outage is written now.
docs/decisions/0007-the-store-tells-the-truth.md
"""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from shoal_kvindex.directory import PlaceCount
from shoal_kvindex.ingest.changes import Correction
from shoal_kvindex.ingest.recorder import ChangeRecorder, Recording
from shoal_kvindex.names import SHARED, Level, ObjectKey, Place
from shoal_kvindex.ports import Duties, StoreFailed, StoreTrouble

SHARDS = 256
MAX_LISTED = 4_000_000  # objects held at once; a shard of a billion
TOGETHER_OBJECTS = 20_000
SLICE_OBJECTS = 2_000  # of one correction: 100 kB in the log, milliseconds for those who apply it
ROUNDS = 3

Listed = dict[ObjectKey, int]
Item = TypeVar("Item")


class ListingFailed(Exception):
    """Nothing is wrong with the store; the listing must be made again."""


class Known(Protocol):
    """What a listing asks the map."""

    def is_complete(self, pool: str) -> bool: ...

    def count(self, place: Place) -> PlaceCount: ...

    def objects_at(self, place: Place, shard: int) -> Iterable[ObjectKey]: ...


@dataclass(frozen=True, slots=True)
class Corrected:
    """What a listing changed: objects taken in and taken out."""

    found_objects: int = 0
    gone_objects: int = 0

    def __add__(self, other: "Corrected") -> "Corrected":
        return Corrected(self.found_objects + other.found_objects, self.gone_objects + other.gone_objects)


@dataclass(slots=True)
class _Walk:
    """Through the pages of one listing."""

    instance_id: str
    level: Level
    recording: Recording
    token: str | None = None
    is_over: bool = False
    held_count: int = 0  # objects not yet reconciled


class Lister:
    """Used by the lease holder's housekeeping, one listing at a time. Raises StoreFailed, ListingFailed and what
    Postgres raises; what was corrected until then stays and is right."""

    def __init__(
        self, duties: Duties, directory: Known, recorder: ChangeRecorder, together_objects: int = TOGETHER_OBJECTS
    ) -> None:
        """``together_objects`` are compared at a time, or one shard."""
        self._client = duties.client
        self._survey = duties.survey
        self._log = duties.log
        self._lease = duties.lease
        self._clock = duties.clock
        self._hears_all = duties.hears_all
        self._directory = directory
        self._recorder = recorder
        self._together_objects = together_objects

    async def list_shared(self) -> Corrected:
        """The shared level, as any one server lists it."""
        failure = StoreFailed(StoreTrouble.AWAY, "", "no store is registered")
        for instance_id in self._client.stores():
            try:
                return await self._list_shared(instance_id)
            except StoreFailed as failed:
                failure = failed
        raise failure

    async def _list_shared(self, instance_id: str) -> Corrected:
        corrected = Corrected()
        with self._recorder.recording(SHARED) as recording:
            async with aclosing(self._parts(instance_id, recording)) as parts:
                async for shards, listed in parts:
                    corrected += await self._reconcile(shards, listed, recording)
        return corrected

    async def _parts(self, instance_id: str, recording: Recording) -> AsyncGenerator[tuple[range, Listed], None]:
        """The shared level, some shards at a time."""
        width = self._width(SHARED)
        first = shard = 0
        listed = Listed()
        walk = _Walk(instance_id, Level.L2, recording)
        while (objects := await self._next_page(walk)) is not None:
            for key, size_bytes in objects:
                if key.block_hash[0] < shard:
                    reason = "does not list in the order of hashes"
                    raise StoreFailed(StoreTrouble.CANNOT_LIST, instance_id, reason)
                is_next, shard = key.block_hash[0] > shard, key.block_hash[0]
                while shard >= first + width or (is_next and len(listed) >= self._together_objects):
                    last = min(shard, first + width)
                    yield range(first, last), listed
                    first, listed = last, Listed()
                listed[key] = size_bytes
            walk.held_count = len(listed)
            # Later shards begin on a later page: what happened to them until now, that page will show.
            recording.forget_after(shard)
        for rest in range(first, SHARDS, width):
            yield range(rest, min(rest + width, SHARDS)), listed
            listed = Listed()

    def _width(self, place: Place) -> int:
        """How many shards of the map have about as many objects as are compared at a time."""
        objects = self._directory.count(place).objects
        return max(1, min(SHARDS, SHARDS * self._together_objects // max(1, objects)))

    async def list_dram(self, instance_id: str) -> Corrected:
        """What one server has in DRAM."""
        corrected = Corrected()
        place = Place(Level.L1, instance_id)
        shards = [Listed() for _ in range(SHARDS)]
        with self._recorder.recording(place) as recording:
            walk = _Walk(instance_id, Level.L1, recording)
            while (objects := await self._next_page(walk)) is not None:
                for key, size_bytes in objects:
                    shards[key.block_hash[0]][key] = size_bytes
                walk.held_count += len(objects)
            width = max(1, min(self._width(place), SHARDS * self._together_objects // max(1, walk.held_count)))
            for first in range(0, SHARDS, width):
                listed = Listed(item for shard in shards[first : first + width] for item in shard.items())
                corrected += await self._reconcile(range(first, min(first + width, SHARDS)), listed, recording)
        return corrected

    async def _next_page(self, walk: _Walk) -> Sequence[tuple[ObjectKey, int]] | None:
        """None after the last one."""
        if walk.is_over:
            return None
        if walk.held_count > MAX_LISTED:
            reason = f"lists more than {MAX_LISTED} objects where fewer fit"
            raise StoreFailed(StoreTrouble.REFUSED, walk.instance_id, reason)
        self._check(walk.recording)
        page = await self._client.list_page(walk.instance_id, walk.level, walk.token)
        if page.next_token is not None and page.next_token == walk.token:
            raise StoreFailed(StoreTrouble.REFUSED, walk.instance_id, "lists the same page again")
        walk.token, walk.is_over = page.next_token, page.next_token is None
        return page.objects

    def _check(self, recording: Recording) -> None:
        if not self._lease.is_held:
            raise ListingFailed("another instance took over")
        if not self._hears_all():
            raise ListingFailed("the log of the index is away")
        if recording.is_void:
            raise ListingFailed("copies were dropped, or too many changed, while they were listed")

    async def _reconcile(self, shards: range, listed: Listed, recording: Recording) -> Corrected:
        self._check(recording)
        place = recording.place
        durable = await self._survey.objects_at(place, shards)

        def is_kept(key: ObjectKey) -> bool:
            """Whether only the map's bound dropped it. A fence empties DRAM in the map at once and in Postgres soon:
            there its rows prove nothing."""
            return place == SHARED and key in durable and not self._directory.is_complete(key.namespace.pool)

        known: set[ObjectKey] = set()
        for shard in shards:
            async for some in self._in_pieces(self._directory.objects_at(place, shard)):
                known.update(some)
        found: list[tuple[ObjectKey, int]] = []
        unwritten: list[tuple[ObjectKey, int]] = []
        async for some_listed in self._in_pieces(listed.items()):
            unwritten += [item for item in some_listed if item[0] in known and item[0] not in durable]
            found += [item for item in some_listed if item[0] not in known and not is_kept(item[0])]
        gone: list[ObjectKey] = []
        async for some_known in self._in_pieces(known | durable):
            gone += [key for key in some_known if key not in listed]
        corrected = Corrected()
        for some_found in _slices(found):
            corrected += await self._correct(Correction(place, some_found, ()), recording)
        for some_gone in _slices(gone):
            corrected += await self._correct(Correction(place, (), some_gone), recording)
        for some_unwritten in _slices(unwritten):  # taken in once more they are written
            await self._correct(Correction(place, some_unwritten, ()), recording)
        recording.forget_up_to(shards[-1])
        return corrected

    async def _in_pieces(self, items: Iterable[Item]) -> AsyncGenerator[list[Item], None]:
        """A shard has tens of thousands of objects: requests are answered in between."""
        rest = iter(items)
        while some := list(islice(rest, SLICE_OBJECTS)):
            yield some
            await self._clock.sleep(0)

    async def _correct(self, correction: Correction, recording: Recording) -> Corrected:
        self._check(recording)
        found = [item for item in correction.found if not recording.has(item[0])]
        gone = [key for key in correction.gone if not recording.has(key)]
        corrected = Corrected(len(found), len(gone))
        for _ in range(ROUNDS):
            if not found and not gone:
                break
            if await self._log.publish(Correction(correction.place, found, gone)) is None:
                raise ListingFailed("this instance lags behind the log")
            # Applied here, and with it every report that the log has before it.
            found, gone = recording.overruled(found, gone)
        return corrected


def _slices(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), SLICE_OBJECTS):
        yield items[start : start + SLICE_OBJECTS]
