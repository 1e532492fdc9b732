"""Reports are lost on purpose; after the listing every instance of kvindex knows exactly what the stores have."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import text

from shoal_engine.scripted import SharedMemory
from shoal_kvindex.store.engine import create_engine
from shoal_testkit.scripted_store import Fate, ReportLine, ScriptedStore, scripted_store

POOL = "pool-of-the-test"
ASKED_AT_ONCE = 50


@dataclass
class Fleet:
    """Instances of kvindex, and stores on one shared level."""

    database_url: str
    indexes: list[Any]
    shared: SharedMemory = field(default_factory=SharedMemory)
    stores: dict[str, ScriptedStore] = field(default_factory=dict)
    known: list[bytes] = field(default_factory=list)  # every block that ever was
    own: dict[str, list[bytes]] = field(default_factory=dict)

    @asynccontextmanager
    async def store(self, instance_id: str) -> AsyncIterator[ScriptedStore]:
        line = ReportLine([index.url for index in self.indexes])
        async with scripted_store(instance_id, POOL, self.shared, line) as store:
            self.stores[instance_id] = store
            yield store
            del self.stores[instance_id]

    def some(self, count: int = 10) -> list[bytes]:
        hashes = [os.urandom(32) for _ in range(count)]
        self.known += hashes
        return hashes

    def live(self, rounds: int = 3) -> None:
        """What engines and sweeps do: blocks come, and some of those that are there go. On the shared level each store
        touches its own blocks, because two stores' reports about one block may overtake each other."""
        for _ in range(rounds):
            for name, store in self.stores.items():
                mine = self.some()
                self.own.setdefault(name, []).extend(mine)
                store.keep(mine)
                store.keep(random.sample(self.own[name], 5))
                store.lose(random.sample(self.own[name], 2), "l2")
                store.lose(random.sample(sorted(store.held("l1")), 2), "l1")

    def truth(self) -> dict[bytes, set[str]]:
        """Where each block is: "" on the shared level."""
        places: dict[bytes, set[str]] = {block_hash: set() for block_hash in self.known}
        for name, store in self.stores.items():
            for block_hash in store.held("l1"):
                places[block_hash].add(name)
            for block_hash in store.held("l2"):
                places[block_hash].add("")
        return places

    async def differing(self) -> list[bytes]:
        """Blocks on which some instance and the stores do not agree."""
        wrong, truth = [], self.truth()
        for index in self.indexes:
            for start in range(0, len(self.known), ASKED_AT_ONCE):
                some = self.known[start : start + ASKED_AT_ONCE]
                told = await asyncio.gather(*(index.places(block_hash) for block_hash in some))
                wrong += [
                    block_hash for block_hash, places in zip(some, told, strict=True) if places != truth[block_hash]
                ]
        return wrong

    async def agrees(self) -> bool:
        return all([await index.is_complete() for index in self.indexes]) and not await self.differing()

    async def durable(self) -> set[bytes]:
        engine = create_engine(self.database_url)
        statement = "SELECT block_hash FROM kvindex.objects JOIN kvindex.places USING (place_id) WHERE level = 2"
        async with engine.connect() as connection:
            found = {bytes(row.block_hash) for row in await connection.execute(text(statement))}
        await engine.dispose()
        return found


@pytest.fixture
async def fleet(start_kvindex: Any, eventually: Any, database_url: str) -> AsyncIterator[Fleet]:
    """Two instances, two stores, in agreement."""
    async with AsyncExitStack() as stack:
        indexes = [
            await stack.enter_async_context(start_kvindex(f"kvindex-{number}", store_silence_s=4)) for number in (1, 2)
        ]
        fleet = Fleet(database_url, indexes)
        for name in ("node-a", "node-b"):
            await stack.enter_async_context(fleet.store(name))
        fleet.live()
        await eventually(fleet.agrees)
        yield fleet


@pytest.fixture
def settle(eventually: Any) -> Callable[[Fleet], Any]:
    """Wait until all agree, map for map and row for row; one more report shows what was lost before it."""

    async def wait(fleet: Fleet) -> None:
        for store in fleet.stores.values():
            store.keep(fleet.some(1))
        await eventually(fleet.agrees)

        async def is_written() -> bool:
            return await fleet.durable() == next(iter(fleet.stores.values())).held("l2")

        await eventually(is_written)

    return wait


@pytest.mark.parametrize("fate", [Fate.FAILS, Fate.ARRIVES_UNANSWERED, Fate.ARRIVES_LATE])
async def test_after_lost_deliveries_the_directory_equals_the_stores(fleet: Fleet, settle: Any, fate: Fate) -> None:
    line = fleet.stores["node-a"].line
    for _ in range(3):
        line.fate, lost_before = fate, line.lost_deliveries
        fleet.live(1)
        while line.lost_deliveries == lost_before:
            await asyncio.sleep(0.02)
        line.fate = Fate.ARRIVES
        fleet.live(1)
        await asyncio.sleep(0.1)
    await settle(fleet)


async def test_reports_go_on_while_the_stores_are_listed(fleet: Fleet, settle: Any) -> None:
    line = fleet.stores["node-a"].line
    for _ in range(10):
        line.fate = Fate.FAILS
        fleet.live(1)
        await asyncio.sleep(0.07)
        line.fate = Fate.ARRIVES
        for _ in range(4):
            fleet.live(1)
            await asyncio.sleep(0.05)
    await settle(fleet)


async def test_a_new_life_of_a_store_starts_with_empty_dram_and_the_same_shared_level(
    fleet: Fleet, settle: Any, eventually: Any
) -> None:
    async with AsyncExitStack() as stack:
        dying = await stack.enter_async_context(fleet.store("node-c"))
        fleet.live()
        await eventually(fleet.agrees)
        dying.line.fate = Fate.DEAD  # what it does from here on nobody hears
        fleet.live(1)
    await asyncio.sleep(1.1)  # the number of a life is the second in which it begins
    async with fleet.store("node-c"):
        fleet.live()
        await settle(fleet)


async def test_a_store_that_fell_silent_and_comes_back_in_the_same_life_is_listed(
    fleet: Fleet, settle: Any, eventually: Any
) -> None:
    store = fleet.stores["node-b"]
    store.line.fate = Fate.DEAD
    fleet.live(1)

    async def is_dropped() -> bool:
        return "node-b" not in {each.store_instance_id for each in (await fleet.indexes[0].overview()).stores}

    await eventually(is_dropped)
    store.line.fate = Fate.ARRIVES
    await settle(fleet)


async def test_what_overtaking_reports_left_wrong_the_next_listing_mends(
    start_kvindex: Any, settle: Any, database_url: str
) -> None:
    async with AsyncExitStack() as stack:
        indexes = [
            await stack.enter_async_context(start_kvindex(f"kvindex-{number}", listing_interval_s=1))
            for number in (1, 2)
        ]
        fleet = Fleet(database_url, indexes)
        one = await stack.enter_async_context(fleet.store("node-a"))
        other = await stack.enter_async_context(fleet.store("node-b"))
        for _ in range(10):
            hashes = fleet.some()
            one.keep(hashes)
            one.lose(hashes, "l2")
            other.keep(hashes)
            other.lose(hashes[:5], "l2")
            one.keep(hashes[:2])
            await asyncio.sleep(0.02)
        await settle(fleet)


async def test_an_empty_directory_is_rebuilt_from_a_listing(start_kvindex: Any, settle: Any, database_url: str) -> None:
    async with start_kvindex("kvindex-1") as index:
        fleet = Fleet(database_url, [index])
        async with fleet.store("node-a") as store:
            store.line.fate = Fate.FAILS
            store.keep(fleet.some(300))
            while not store.line.lost_deliveries:
                await asyncio.sleep(0.02)
            store.line.fate = Fate.ARRIVES
            await settle(fleet)
