"""How the blocks that went of late went: because their time was over, for room, with a DRAM copy, or damaged.

Told by the directory when the last copy of a block is gone, with the sweep's mark on it. What goes without a mark was
not deleted by us: from DRAM a store takes it out as it likes, from the shared level only what it found broken or
missing. Blocks that go with all the DRAM of a server are not told one by one: the directory still knows their names.
Bounded; what is forgotten counts as never stored. docs/decisions/0015-nothing-falls-back-in-silence.md
"""

import enum
from collections import OrderedDict
from typing import NamedTuple

from shoal_kvindex.names import Level, Namespace, Place
from shoal_runtime.clock import Clock


class Way(enum.Enum):
    """How a block left the store."""

    EXPIRED = "expired"
    EVICTED = "evicted"  # the shared level was full
    DROPPED = "dropped"  # its last copy was in DRAM
    DAMAGED = "damaged"


class Departure(NamedTuple):
    """``at_s`` is Unix time; None: not known."""

    way: Way
    at_s: int | None


class Departures:
    """The latest ``max_blocks``; on the loop that applies changes."""

    def __init__(self, max_blocks: int, clock: Clock) -> None:
        self._max_blocks = max_blocks
        self._clock = clock
        self._departures: OrderedDict[tuple[Namespace, bytes], Departure] = OrderedDict()
        self._latest: Departure | None = None

    def __len__(self) -> int:
        return len(self._departures)

    def gone(self, namespace: Namespace, block_hash: bytes, last: Place, *, is_for_room: bool | None) -> None:
        """The last copy of a block, which was at ``last``, is not there any more. ``is_for_room`` is None without a
        mark."""
        key = (namespace, block_hash)
        departure = Departure(_way(is_for_room, last), int(self._clock.now()))
        if departure == self._latest:
            departure = self._latest  # one object for the many that go together
        self._latest = departure
        self._departures.pop(key, None)
        self._departures[key] = departure
        if len(self._departures) > self._max_blocks:
            self._departures.popitem(last=False)

    def of(self, namespace: Namespace, block_hash: bytes) -> Departure | None:
        """How it went the last time; None: as far as is remembered it never did."""
        return self._departures.get((namespace, block_hash))


def _way(is_for_room: bool | None, last: Place) -> Way:
    if is_for_room is not None:
        return Way.EVICTED if is_for_room else Way.EXPIRED
    return Way.DROPPED if last.level is Level.L1 else Way.DAMAGED
