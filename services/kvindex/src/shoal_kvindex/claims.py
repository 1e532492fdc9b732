"""Claims on blocks whose report has not come yet: reports trail a request by some hundred milliseconds.

Bounded by count and by time; what is dropped gets the expiry of unclaimed blocks, which the next use renews.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from shoal_kvindex.directory import Namespace

Tell = Callable[[Namespace, bytes, int], None]


class Claim(NamedTuple):
    """What was asked for a block (Unix seconds), and until when (monotonic) its report is awaited."""

    expires_at_s: int
    waits_until_s: float


class Claims:
    """The latest expiry asked for each block wins."""

    def __init__(self, max_claims: int, wait_s: float, tell: Tell | None = None) -> None:
        """``tell`` hears of each claim: the other instances must know it too."""
        self._max_claims = max_claims
        self._wait_s = wait_s
        self._tell = tell
        self._claims: OrderedDict[tuple[Namespace, bytes], Claim] = OrderedDict()

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, namespace: Namespace, block_hash: bytes, expires_at_s: int, now_s: float) -> int:
        """Remember what was asked for a block; returns how many claims the bound dropped."""
        self._forget_late(now_s)
        if self._tell is not None:
            self._tell(namespace, block_hash, expires_at_s)
        earlier = self._claims.pop((namespace, block_hash), None)
        latest_s = max(expires_at_s, earlier.expires_at_s) if earlier else expires_at_s
        self._claims[namespace, block_hash] = Claim(latest_s, now_s + self._wait_s)
        if len(self._claims) <= self._max_claims:
            return 0
        self._claims.popitem(last=False)
        return 1

    def take(self, namespace: Namespace, block_hash: bytes, now_s: float) -> int | None:
        """The expiry asked for a block that was just reported; told once."""
        claim = self._claims.pop((namespace, block_hash), None)
        return claim.expires_at_s if claim is not None and claim.waits_until_s >= now_s else None

    def _forget_late(self, now_s: float) -> None:
        while self._claims and next(iter(self._claims.values())).waits_until_s < now_s:
            self._claims.popitem(last=False)
