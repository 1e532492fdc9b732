"""How a block went."""

import pytest

from shoal_kvindex.departures import Departure, Departures, Way
from shoal_kvindex.names import SHARED, Level, Namespace, Place
from shoal_testkit.clock import VirtualClock

SPACE = Namespace("pool", "")
BLOCKS = [number.to_bytes(32, "big") for number in range(8)]
DRAM = Place(Level.L1, "node-a")


@pytest.mark.parametrize(
    ("last", "is_for_room", "way"),
    [
        (DRAM, None, Way.DROPPED),
        (SHARED, None, Way.DAMAGED),
        (DRAM, False, Way.EXPIRED),
        (SHARED, False, Way.EXPIRED),
        (DRAM, True, Way.EVICTED),
        (SHARED, True, Way.EVICTED),
    ],
)
def test_place_and_mark_tell_how_a_block_went(
    clock: VirtualClock, last: Place, is_for_room: bool | None, way: Way
) -> None:
    departures = Departures(10, clock)
    departures.gone(SPACE, BLOCKS[0], last, is_for_room=is_for_room)
    assert departures.of(SPACE, BLOCKS[0]) == Departure(way, int(clock.now()))
    assert departures.of(Namespace("pool", "tenant"), BLOCKS[0]) is None


async def test_the_last_time_counts(clock: VirtualClock) -> None:
    departures = Departures(10, clock)
    departures.gone(SPACE, BLOCKS[0], SHARED, is_for_room=None)
    await clock.advance(60)
    departures.gone(SPACE, BLOCKS[0], DRAM, is_for_room=None)
    assert departures.of(SPACE, BLOCKS[0]) == Departure(Way.DROPPED, int(clock.now()))
    assert len(departures) == 1


def test_memory_is_bounded_and_keeps_the_latest(clock: VirtualClock) -> None:
    departures = Departures(3, clock)
    for block_hash in BLOCKS:
        departures.gone(SPACE, block_hash, SHARED, is_for_room=True)
    assert len(departures) == 3
    assert departures.of(SPACE, BLOCKS[4]) is None
    assert departures.of(SPACE, BLOCKS[5]) is not None
