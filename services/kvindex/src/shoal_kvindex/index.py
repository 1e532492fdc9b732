"""The three questions that requests ask: how much is stored, is this stored yet, keep these.

Joins the directory with expiry, claims and waiters; knows no wire and no SQL. A match is answered from memory; only
for blocks that the map's bound dropped it waits for the durable directory, a moment and no longer.
docs/decisions/0009-sql-is-off-the-hot-path.md
"""

import asyncio
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal_kvindex.claims import Claims
from shoal_kvindex.directory import Directory, Level, Namespace, Run
from shoal_kvindex.match import Hit, longest_prefix
from shoal_kvindex.overview import Asked
from shoal_kvindex.waiters import Waiters, satisfies
from shoal_policy import ExpiryPolicy, TrafficClass
from shoal_runtime.clock import Clock

MAX_RECALLED_BLOCKS = 1024  # of one match; what a longer prompt has after them is recalled by its next one


class WaitOutcome(enum.Enum):
    """How a wait for a block ended."""

    STORED = "stored"
    NOT_STORED = "not_stored"
    REFUSED = "refused"  # too many wait already


@dataclass(frozen=True, slots=True)
class Settlement:
    """Blocks of a settled request: kept as asked, still to be reported, and claims that the bound pushed out."""

    claimed_blocks: int
    awaited_blocks: int
    dropped_claims: int


@dataclass(slots=True)
class Readiness:
    """Shared by the edges: whether the map may be asked and told."""

    is_loaded: bool = False


class Recall(Protocol):
    """Brings blocks that the bound dropped back into the directory."""

    async def recall(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        """Returns when what is durable of them is in the directory, at the latest after a few milliseconds; then
        they are a miss. Never raises."""


class Index:
    """Owned by the service; on the loop that also applies reports."""

    def __init__(
        self, directory: Directory, claims: Claims, waiters: Waiters, expiry: ExpiryPolicy, clock: Clock
    ) -> None:
        self._directory = directory
        self._claims = claims
        self._waiters = waiters
        self._expiry = expiry
        self._clock = clock
        self._recall: Recall | None = None
        self._asked = dict.fromkeys(TrafficClass, Asked(0, 0))

    @property
    def asked(self) -> Mapping[TrafficClass, Asked]:
        """Blocks that Match was asked for, and how many of them it found, since start."""
        return self._asked

    def recall_from(self, recall: Recall) -> None:
        """Ask there for what the bound dropped. Without it the map is all there is."""
        self._recall = recall

    async def match(
        self, namespace: Namespace, hashes: Sequence[bytes], traffic_class: TrafficClass, hold_s: float = 0.0
    ) -> Hit:
        """The longest usable prefix; renews what it found, and keeps it for ``hold_s`` at least."""
        run = self._directory.run(namespace, hashes)
        if self._recall is not None and (dropped := self._dropped(run)):
            await self._recall.recall(namespace, dropped)
            run = self._directory.run(namespace, hashes)
        hit = longest_prefix(run.stretches, self._directory.layout(namespace.pool))
        self._directory.renew_run(run, hit.blocks, self._rule(traffic_class, hold_s))
        return hit

    def count(self, traffic_class: TrafficClass, asked_blocks: int, hit_blocks: int) -> None:
        """A request goes on with this hit. Not for one that waits and asks again."""
        asked = self._asked[traffic_class]
        self._asked[traffic_class] = Asked(asked.asked_blocks + asked_blocks, asked.hit_blocks + hit_blocks)

    async def await_stored(
        self, namespace: Namespace, block_hash: bytes, level: Level | None, timeout_s: float
    ) -> WaitOutcome:
        """Returns as soon as the block is stored, at the latest after ``timeout_s``."""
        for readable in self._directory.readable_run(namespace, [block_hash]):
            if satisfies(readable, level):
                return WaitOutcome.STORED
        if self._waiters.is_full:
            return WaitOutcome.REFUSED
        with self._waiters.waiting(namespace, block_hash, level) as stored:
            try:
                async with asyncio.timeout(timeout_s):
                    await stored
            except TimeoutError:
                return WaitOutcome.NOT_STORED
        return WaitOutcome.STORED

    def settle(self, namespace: Namespace, hashes: Sequence[bytes], traffic_class: TrafficClass) -> Settlement:
        """Keep the blocks as long as the class asks; those not reported yet get it when their report comes."""
        claimed_blocks = self._directory.renew(namespace, hashes, self._rule(traffic_class))
        self._save_marked(namespace, hashes)
        if claimed_blocks == len(hashes):
            return Settlement(claimed_blocks, 0, 0)
        now_s = self._clock.monotonic()
        unknown = [h for h in hashes if self._directory.expires_at_s(namespace, h) is None]
        asked_s = int(self._clock.now() + self._expiry.lifetime_s(traffic_class))
        dropped_claims = sum(self._claims.add(namespace, h, asked_s, now_s) for h in unknown)
        return Settlement(claimed_blocks, len(unknown), dropped_claims)

    def expect(self, namespace: Namespace, hashes: Sequence[bytes], traffic_class: TrafficClass) -> None:
        """A request has these computed: they are kept as its class asks from their report on. With the lifetime of
        blocks that nobody claimed they would be the first to go from a full level, while the request still runs."""
        now_s = self._clock.monotonic()
        asked_s = int(self._clock.now() + self._expiry.lifetime_s(traffic_class))
        for block_hash in hashes:
            self._claims.add(namespace, block_hash, asked_s, now_s)

    def _save_marked(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        """The sweep takes back what is used after its mark, and sees a use by a later expiry: here it grows even when
        the gain alone would not be worth a write."""
        if not self._directory.marked:
            return
        marked = [block_hash for block_hash in hashes if self._directory.is_marked(namespace, block_hash)]
        self._directory.renew(namespace, marked, lambda expires_at_s: expires_at_s + 1)

    def _dropped(self, run: Run) -> Sequence[bytes]:
        """Blocks after the run that the map cannot speak of."""
        known_blocks = run.blocks
        if known_blocks == len(run.hashes) or self._directory.is_complete(run.namespace.pool):
            return ()
        if self._directory.is_marked(run.namespace, run.hashes[known_blocks]):
            return ()
        return self._directory.unknown(run.namespace, run.hashes[known_blocks : known_blocks + MAX_RECALLED_BLOCKS])

    def _rule(self, traffic_class: TrafficClass, hold_s: float = 0.0) -> Callable[[int], int | None]:
        now_s = self._clock.now()
        held_until_s = math.ceil(now_s + hold_s)

        def rule(expires_at_s: int) -> int | None:
            renewed_s = self._expiry.renew(expires_at_s, now_s, traffic_class)
            wanted_s = held_until_s if renewed_s is None else max(int(renewed_s), held_until_s)
            return wanted_s if wanted_s > expires_at_s else None

        return rule
