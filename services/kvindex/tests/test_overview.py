"""What operators are told is what the parts know, and the unknown stays unknown."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_kvindex.directory import SHARED, Level, Place, PlaceCount
from shoal_kvindex.ingest.changes import IndexState, SweepCounts
from shoal_kvindex.ingest.completeness import NOT_LISTED, Completeness
from shoal_kvindex.ingest.instances import Address, StoreInstances
from shoal_kvindex.overview import Asked, StoreHoldings, StoreView
from shoal_policy import TrafficClass


@dataclass
class Counted:
    """A directory that only counts."""

    block_count: int = 0
    evicted_count: int = 0
    places: dict[Place, PlaceCount] = field(default_factory=dict)

    def count(self, place: Place) -> PlaceCount:
        return self.places.get(place, PlaceCount(0, 0, 0))


@dataclass
class Questions:
    asked: Mapping[TrafficClass, Asked] = field(default_factory=dict)


def test_the_parts_are_joined() -> None:
    stores, listings = StoreInstances(15), Completeness()
    stores.register("node-b", Address("10.0.0.2", 9001))
    stores.register("node-a", Address("fd00::1", 9000))
    stores.tell_capacity("node-b", 10_000)
    state = IndexState(True, "", "kvindex-1", 1_700_000_000, SweepCounts(expired_blocks=3), [(3600, 5)])
    listings.tell(state)
    counted = Counted(7, 2, {Place(Level.L1, "node-a"): PlaceCount(4, 8, 80), SHARED: PlaceCount(6, 6, 999)})
    asked = {TrafficClass.CHAT: Asked(10, 8)}
    told = StoreView(counted, stores, listings, Questions(asked)).overview()
    assert (told.blocks, told.evicted_blocks, told.shared_bytes, told.shared_capacity_bytes) == (7, 2, 999, 10_000)
    assert told.stores == [StoreHoldings("node-a", "[fd00::1]:9000", 4), StoreHoldings("node-b", "10.0.0.2:9001", 0)]
    assert (told.asked, told.state, told.is_complete, told.reason) == (asked, state, True, "")
    assert StoreView(counted, stores, listings, Questions(asked), 5_000).overview().shared_capacity_bytes == 5_000


def test_before_anybody_was_heard_nothing_is_made_up() -> None:
    told = StoreView(Counted(), StoreInstances(15), Completeness(), Questions()).overview()
    assert (told.shared_capacity_bytes, told.state, told.stores) == (None, None, [])
    assert (told.is_complete, told.reason) == (False, NOT_LISTED)
