"""How much of the shared level has to go before its time because the level is full.

Between two marks nothing happens: deleting down to the lower one at once leaves time until the next round, and what
is leaving already counts as gone. docs/decisions/0010-expiry-follows-the-traffic-class.md
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoomPolicy:
    """Shares of the capacity: above ``high`` blocks are evicted, down to ``low``."""

    high: float = 0.9
    low: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high <= 1:
            raise ValueError(f"0 < low < high <= 1, not low={self.low} high={self.high}")

    def bytes_to_evict(self, used_bytes: int, leaving_bytes: int, capacity_bytes: int | None) -> int:
        """``leaving_bytes`` of those in use are about to be deleted. Nothing is evicted from an unknown capacity."""
        staying_bytes = used_bytes - leaving_bytes
        if capacity_bytes is None or staying_bytes <= self.high * capacity_bytes:
            return 0
        return staying_bytes - int(self.low * capacity_bytes)
