"""What is in the store and what became of it, for operators.

Joined from what this instance keeps anyway, at the moment of the question. What was asked is this instance's own; what
is stored is the same in all; the sweep, the ages and the lease are what the holder of the lease said last.
docs/decisions/0015-nothing-falls-back-in-silence.md
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal_kvindex.directory import SHARED, Level, Place, PlaceCount
from shoal_kvindex.ingest.changes import IndexState
from shoal_kvindex.ingest.instances import Address
from shoal_policy import TrafficClass


@dataclass(frozen=True, slots=True)
class Asked:
    """Blocks asked for by Match, and how many of them were part of a hit, since start."""

    asked_blocks: int
    hit_blocks: int


@dataclass(frozen=True, slots=True)
class StoreHoldings:
    """What one registered lmcache server has in DRAM. ``address`` is host:port of its HTTP side."""

    instance_id: str
    address: str
    l1_blocks: int


@dataclass(frozen=True, slots=True)
class Overview:
    """One answer. ``state`` is None until a holder of the lease was heard."""

    blocks: int
    evicted_blocks: int
    shared_bytes: int
    shared_capacity_bytes: int | None
    stores: Sequence[StoreHoldings]
    asked: Mapping[TrafficClass, Asked]
    is_complete: bool
    reason: str
    state: IndexState | None


class Holdings(Protocol):
    """The directory, as far as it is counted."""

    @property
    def block_count(self) -> int: ...

    @property
    def evicted_count(self) -> int: ...

    def count(self, place: Place) -> PlaceCount: ...


class Stores(Protocol):
    """Which lmcache servers are there."""

    @property
    def shared_capacity_bytes(self) -> int | None: ...

    def addresses(self) -> Mapping[str, Address]: ...


class Listings(Protocol):
    """Whether the index knows all that is stored."""

    @property
    def state(self) -> IndexState | None: ...

    @property
    def is_complete(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class Questions(Protocol):
    """What was asked of this instance."""

    @property
    def asked(self) -> Mapping[TrafficClass, Asked]: ...


class StoreView:
    """On the loop that answers requests; built by the service. ``set_capacity_bytes`` counts more than what the stores
    tell of the shared level; 0: nobody set it."""

    def __init__(
        self,
        holdings: Holdings,
        stores: Stores,
        listings: Listings,
        questions: Questions,
        set_capacity_bytes: int = 0,
    ) -> None:
        self._set_capacity_bytes = set_capacity_bytes
        self._holdings = holdings
        self._stores = stores
        self._listings = listings
        self._questions = questions

    def overview(self) -> Overview:
        """As of now."""
        return Overview(
            blocks=self._holdings.block_count,
            evicted_blocks=self._holdings.evicted_count,
            shared_bytes=self._holdings.count(SHARED).size_bytes,
            shared_capacity_bytes=self._set_capacity_bytes or self._stores.shared_capacity_bytes,
            stores=[self._store(*store) for store in sorted(self._stores.addresses().items())],
            asked=dict(self._questions.asked),
            is_complete=self._listings.is_complete,
            reason=self._listings.reason,
            state=self._listings.state,
        )

    def _store(self, instance_id: str, address: Address) -> StoreHoldings:
        host = f"[{address.host}]" if ":" in address.host else address.host
        l1_blocks = self._holdings.count(Place(Level.L1, instance_id)).blocks
        return StoreHoldings(instance_id, f"{host}:{address.http_port}", l1_blocks)
