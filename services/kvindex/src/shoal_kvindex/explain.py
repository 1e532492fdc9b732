"""Why the first block after a hit was not found, from what is known without any prompt.

What the directory itself knew of that block when it was asked for comes first: about to be deleted, incomplete, gone
and how. Only a block of which it knew nothing is looked for elsewhere: under another salt, in another pool, and in
the neighbourhood of prompts that began alike. Those look at the present, so they can name a block that came later.
``Explainer`` remembers and looks, ``explain`` judges. docs/decisions/0015-nothing-falls-back-in-silence.md
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_kvblocks import HASH_BYTES, count_hashes, split_hashes
from shoal_kvindex.departures import Departure, Departures, Way
from shoal_kvindex.directory import Directory
from shoal_kvindex.match import longest_prefix
from shoal_kvindex.names import Namespace
from shoal_kvindex.readable import Readable
from shoal_kvindex.recent import AskedPrompt, FirstMiss, RecentPrompts, Relative
from shoal_runtime.clock import Clock


class MissReason(enum.Enum):
    """The names are the wire's."""

    NO_MISS = "no_miss"
    NEVER_STORED = "never_stored"
    EXPIRED = "expired"
    EVICTED = "evicted"
    DROPPED = "dropped"
    DAMAGED = "damaged"
    OTHER_SALT = "other_salt"
    OTHER_POOL = "other_pool"
    DIVERGED = "diverged"
    STATE_MISSING = "state_missing"
    MARKED = "marked"


WAYS = {
    Way.EXPIRED: MissReason.EXPIRED,
    Way.EVICTED: MissReason.EVICTED,
    Way.DROPPED: MissReason.DROPPED,
    Way.DAMAGED: MissReason.DAMAGED,
}


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Whether the block is stored now where this request could not have read it."""

    is_in_other_salt: bool
    is_in_other_pool: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """``nearest`` only when the prompt diverged from another one, just after its ``shared_blocks``."""

    reason: MissReason
    gone_at_s: int | None = None  # Unix
    nearest: Relative | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One answer. ``block_tokens`` is None when no engine of the pool told its layout."""

    asked: AskedPrompt
    verdict: Verdict
    now_hit_blocks: int
    block_tokens: int | None


def explain(asked: AskedPrompt, elsewhere: Elsewhere, relatives: Sequence[Relative]) -> Verdict:
    """The reason for the block after ``asked.hit_blocks``."""
    if asked.hit_blocks >= asked.whole_blocks:
        return Verdict(MissReason.NO_MISS)
    known = _own_reason(asked.first_miss)
    if known is not None:
        return known
    if elsewhere.is_in_other_salt:
        return Verdict(MissReason.OTHER_SALT)
    if elsewhere.is_in_other_pool:
        return Verdict(MissReason.OTHER_POOL)
    nearest = _diverged_from(asked.hit_blocks, relatives)
    if nearest is not None:
        return Verdict(MissReason.DIVERGED, nearest=nearest)
    return Verdict(MissReason.NEVER_STORED)


def _own_reason(miss: FirstMiss) -> Verdict | None:
    if miss.is_marked:
        return Verdict(MissReason.MARKED)
    if miss.is_incomplete:
        return Verdict(MissReason.STATE_MISSING)
    if miss.departure is None:
        return None
    return Verdict(WAYS[miss.departure.way], miss.departure.at_s)


def _diverged_from(hit_blocks: int, relatives: Sequence[Relative]) -> Relative | None:
    """The latest request that goes on with another block just after the hit. None when an earlier one had the very
    block that was missed: then it was not stored, or lost, and this prompt differs from nothing there."""
    if not hit_blocks or any(relative.shared_blocks > hit_blocks for relative in relatives):
        return None
    others = [relative for relative in relatives if relative.is_other and relative.shared_blocks == hit_blocks]
    return others[-1] if others else None


class Explainer:
    """On the loop that answers requests; knows what this instance was asked, until the bounds make it forget."""

    def __init__(self, directory: Directory, recent: RecentPrompts, departures: Departures, clock: Clock) -> None:
        self._directory = directory
        self._recent = recent
        self._departures = departures
        self._clock = clock

    def matched(self, request_id: str, namespace: Namespace, hashes: bytes, hit_blocks: int) -> None:
        """A request was told this hit just now."""
        first = hashes[hit_blocks * HASH_BYTES : (hit_blocks + 1) * HASH_BYTES]
        miss = self._look(namespace, first) if first else FirstMiss()
        now_s = int(self._clock.now())
        asked = AskedPrompt(request_id, namespace, hashes, count_hashes(hashes), hit_blocks, now_s, miss)
        self._recent.remember(asked)

    def settled(self, request_id: str, hashes: bytes) -> None:
        """The blocks of the request's prompt and answer."""
        self._recent.settled(request_id, hashes)

    def explain(self, request_id: str) -> Explanation | None:
        """None: this instance does not remember the request."""
        asked = self._recent.get(request_id)
        if asked is None:
            return None
        hashes = split_hashes(asked.hashes)[: asked.whole_blocks]
        layout = self._directory.layout(asked.namespace.pool)
        now = longest_prefix(self._directory.run(asked.namespace, hashes).stretches, layout)
        first = hashes[asked.hit_blocks] if asked.hit_blocks < len(hashes) else None
        verdict = explain(asked, self._elsewhere(asked.namespace, first), self._recent.relatives(asked))
        return Explanation(asked, verdict, now.blocks, layout.block_tokens if layout else None)

    def _look(self, namespace: Namespace, block_hash: bytes) -> FirstMiss:
        directory = self._directory
        if directory.is_marked(namespace, block_hash):
            return FirstMiss(is_marked=True)
        if directory.expires_at_s(namespace, block_hash) is None:
            return FirstMiss(departure=self._departures.of(namespace, block_hash))
        readable = next(iter(directory.readable_run(namespace, [block_hash])))
        is_whole = all(_is_readable(kind) for kind in (readable, *readable.windows))
        if is_whole or not directory.copies(namespace, block_hash):
            # All its copies went with the DRAM of stores, or are in the DRAM of one that has not what comes before.
            return FirstMiss(departure=Departure(Way.DROPPED, None))
        return FirstMiss(is_incomplete=True)

    def _elsewhere(self, namespace: Namespace, block_hash: bytes | None) -> Elsewhere:
        if block_hash is None:
            return Elsewhere(is_in_other_salt=False, is_in_other_pool=False)
        spaces = [
            other
            for other in self._directory.namespaces()
            if other != namespace and self._directory.copies(other, block_hash)
        ]
        return Elsewhere(
            is_in_other_salt=any(other.pool == namespace.pool for other in spaces),
            is_in_other_pool=any(other.pool != namespace.pool for other in spaces),
        )


def _is_readable(kind: Readable) -> bool:
    """By somebody."""
    return kind.is_shared or bool(kind.instance_ids) or bool(kind.joined_ids)
